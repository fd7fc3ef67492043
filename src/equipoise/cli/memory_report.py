"""Device memory that balancing takes in the demo, computed before anything is allocated."""

from equipoise.balancer.experts.config import CommitMode, ShareMode
from equipoise.balancer.experts.placement import ExpertShape
from equipoise.balancer.experts.weights.memory_report import (
    BACKEND_TABLES,
    COUNTER_BYTES,
    MemoryItem,
    MemoryReport,
    RoundOrder,
    backend_tables,
    packed_reason,
    packed_slots,
    tables_bytes,
)
from equipoise.demo.model.config import ModelConfig
from equipoise.demo.settings import Balance, RunSettings, staging_buffers
from equipoise.hal import registry
from equipoise.hal.communicator import CommunicatorBackend, EstimatesCommunicatorMemory
from equipoise.hal.errors import BackendUnavailable
from equipoise.report.text import human_bytes

WEIGHT_BYTES = 4
"""The model computes in float32."""


def demo_memory_report(run: RunSettings) -> MemoryReport:
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
    shape = ExpertShape(model.layers, model.experts, slots // model.layers * run.ranks, run.ranks)
    return MemoryReport(
        (
            MemoryItem(
                "experts held without balancing", home * expert, f"{home} slots, the model's own"
            ),
            MemoryItem("redundant slots", (slots - home) * expert, f"{slots - home} more"),
            MemoryItem("staging", staging * expert, "where weights arrive during a forward pass"),
            _blobs(run, staging, slots, expert),
            MemoryItem("routing tables", tables_bytes(shape), "two sets, for two generations"),
            *_own_tables(run, shape),
            MemoryItem(
                "load counters", model.layers * model.experts * COUNTER_BYTES, "rows by expert"
            ),
            _communicators(run),
        )
    )


def demo_memory(run: RunSettings) -> dict[str, int | None]:
    """The same as numbers; None where it is unknown."""
    return {entry.name: entry.nbytes for entry in demo_memory_report(run).items}


def render_memory_report(run: RunSettings) -> str:
    """The memory report as a few lines, which `run` begins with."""
    report = demo_memory_report(run)
    rows = [(entry.name, bytes_or_unknown(entry.nbytes), entry.reason) for entry in report.items]
    unknown = any(entry.nbytes is None for entry in report.items)
    rows.append(("total", bytes_or_unknown(report.total), "at least" if unknown else ""))
    first = max(len(name) for name, _, _ in rows)
    lines = [f"  {name:<{first}}  {size:>9}  {why}".rstrip() for name, size, why in rows]
    return "\n".join(["device memory of a rank:", *lines])


def bytes_or_unknown(nbytes: int | None) -> str:
    """Bytes for people."""
    return "unknown" if nbytes is None else human_bytes(nbytes)


def _blobs(run: RunSettings, staging: int, slots: int, expert: int) -> MemoryItem:
    """What is packed while it travels, `expert` bytes a slot."""
    try:
        rounds = RoundOrder.of_communicator(_backend(run).capabilities)
    except BackendUnavailable:
        return MemoryItem("packed slots", None, "no backend")
    packed = packed_slots(staging, slots, run.slots_per_message, rounds)
    return MemoryItem("packed slots", packed * expert, packed_reason(rounds))


def _own_tables(run: RunSettings, shape: ExpertShape) -> list[MemoryItem]:
    """Bytes that the backend keeps for routing, besides the tables of all backends."""
    try:
        backend = registry.accelerator(run.backend)
    except BackendUnavailable:
        return [MemoryItem(BACKEND_TABLES, None, "no backend")]
    return backend_tables(backend, [shape])


def _backend(run: RunSettings) -> CommunicatorBackend:
    """Of communicators. Raises `BackendUnavailable`."""
    return registry.communicator(run.communicator or registry.accelerator(run.backend).communicator)


def _communicators(run: RunSettings) -> MemoryItem:
    """Experts, loads, and as configured moves and routing."""
    names = ["experts", "loads"]
    if run.balance is Balance.ON and run.placement is None:
        names += ["moves"] if run.commit is CommitMode.STAGED else []
        names += ["routing"] if run.shares in (ShareMode.NODE, ShareMode.EXACT) else []
    try:
        backend = _backend(run)
    except BackendUnavailable:
        return MemoryItem("communicators", None, "no backend")
    why = f"{len(names)} of {backend.name}: {', '.join(names)}"
    if not isinstance(backend, EstimatesCommunicatorMemory):
        return MemoryItem("communicators", None, f"{why}; it does not say")
    return MemoryItem("communicators", backend.device_bytes(len(names), run.ranks - 1), why)
