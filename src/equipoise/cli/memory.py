"""Device memory that balancing takes in the demo, worked out before anything is allocated."""

from equipoise.balancer.experts.config import CommitMode, ShareMode
from equipoise.balancer.experts.ledger import Entry, Ledger, tables_bytes
from equipoise.balancer.experts.placement import Shape
from equipoise.demo.model.config import ModelConfig
from equipoise.demo.settings import Balance, RunSettings, staging_buffers
from equipoise.hal import registry
from equipoise.hal.communicator import CountsMemory
from equipoise.hal.errors import BackendUnavailable
from equipoise.report.table import human_bytes

WEIGHT_BYTES = 4
"""The model computes in float32."""
COUNTER_BYTES = 4 + 8
"""Of an expert: rows in the open sub-window, and their sum while it travels."""


def demo_ledger(run: RunSettings) -> Ledger:
    """Bytes per rank by purpose, of the variant that the run is about.

    Staging holds a few layers of which every slot changes. What a communicator takes is known of
    those backends that say so.
    """
    model = ModelConfig()
    expert = 3 * model.hidden * model.expert_width * WEIGHT_BYTES
    home = model.experts // run.ranks * model.layers
    balanced = run.balance is Balance.ON
    slots = run.slots // run.ranks * model.layers if balanced else home
    staging = staging_buffers(run) if balanced and run.placement is None else 0
    shape = Shape(model.layers, model.experts, slots // model.layers * run.ranks, run.ranks)
    return Ledger(
        (
            Entry(
                "experts held without balancing", home * expert, f"{home} slots, the model's own"
            ),
            Entry("redundant slots", (slots - home) * expert, f"{slots - home} more"),
            Entry("staging", staging * expert, "where weights arrive beside the forward"),
            Entry("routing tables", tables_bytes(shape), "two sets, for two generations"),
            Entry("load counters", model.layers * model.experts * COUNTER_BYTES, "rows by expert"),
            _communicators(run),
        )
    )


def demo_memory(run: RunSettings) -> dict[str, int | None]:
    """The same as numbers; None where nobody can say."""
    return {entry.what: entry.nbytes for entry in demo_ledger(run).entries}


def render_ledger(run: RunSettings) -> str:
    """The ledger as a few lines, for whoever starts a run."""
    ledger = demo_ledger(run)
    rows = [(entry.what, words(entry.nbytes), entry.why) for entry in ledger.entries]
    unknown = any(entry.nbytes is None for entry in ledger.entries)
    rows.append(("total", words(ledger.total), "at least" if unknown else ""))
    first = max(len(what) for what, _, _ in rows)
    lines = [f"  {what:<{first}}  {size:>9}  {why}".rstrip() for what, size, why in rows]
    return "\n".join(["device memory of a rank:", *lines])


def words(nbytes: int | None) -> str:
    """Bytes for people."""
    return "unknown" if nbytes is None else human_bytes(nbytes)


def _communicators(run: RunSettings) -> Entry:
    """Experts, loads, and as configured moves and routing."""
    opened = ["experts", "loads"]
    if run.balance is Balance.ON and run.placement is None:
        opened += ["moves"] if run.commit is CommitMode.BOUNDARY else []
        opened += ["routing"] if run.shares is ShareMode.EXACT else []
    try:
        name = run.communicator or registry.accelerator(run.backend).communicator
        backend = registry.communicator(name)
    except BackendUnavailable:
        return Entry("communicators", None, "no backend")
    why = f"{len(opened)} of {name}: {', '.join(opened)}"
    if not isinstance(backend, CountsMemory):
        return Entry("communicators", None, f"{why}; it does not say")
    return Entry("communicators", backend.device_bytes(len(opened), run.ranks - 1), why)
