"""Settings of a run, and the constants of the shipped model that they depend on."""

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from equipoise.balancer.experts.config import PLANNER_LIMITS, CommitMode, Locality, RoutingRule
from equipoise.balancer.experts.config import ShareMode as Shares
from equipoise.balancer.formats.iterations import IterationRange
from equipoise.byte_sizes import BYTES
from equipoise.option import OUTPUT, PATH, SECONDS, Kind, Option, choice, several

__all__ = [
    "Balance",
    "CommitMode",
    "ExchangeForm",
    "Locality",
    "RecordedContent",
    "RecordingSettings",
    "RoutingRule",
    "RunSettings",
    "Shares",
    "VariantName",
    "available_variants",
    "served_variants",
    "staging_buffers",
]
EXPERTS = 32
"""Logical experts per layer of the shipped model."""
LAYERS = 6
"""Its layers, all with experts."""
SLOT_BYTES = 61_440
"""Weights of one of its experts: what travels with a slot."""


class Balance(StrEnum):
    """Whether the run balances, or only shows what happens without."""

    ON = "on"
    OFF = "off"


class VariantName(StrEnum):
    """A way to serve the traffic of a run, a row of its table; in the order of the table."""

    UNBALANCED = "unbalanced"
    """Every expert has one slot, and nothing moves."""
    PLACEMENT = "placement"
    """A given placement, served unchanged."""
    STATIC = "static"
    LAGGED = "lagged"
    LOCAL = "local"
    NODE = "node"
    EXACT = "exact"
    """Rebalanced online; the names are those of `RankLoads`."""


REFERENCE_NAME = "reference"
"""Of the pass that one process serves alone, in what a run tells of its progress."""


class ExchangeForm(StrEnum):
    """Which form of the exchange carries rows to their experts."""

    PORTABLE = "portable"
    """The host reads the counts of every layer."""
    FIXED = "fixed"
    """Counts stay on the device: messages have one size, and cannot overflow."""


RANKS, TRAFFIC, BALANCING = "ranks", "traffic", "balancing"
PLANS, MOVES, WATCHING = "what plans aim at", "how weights move", "watching"
MAX_RANKS = 64
MAX_MICRO_BATCHES = 16
MAX_SLOTS = 4096
MAX_STEPS = 100_000
MAX_PER_STEP = 4096
"""Slots of a message, and layers of a step."""
MAX_MIN_GAIN = 1000
"""As the target: no layer can gain so much on so few ranks."""
SHORTEST_DEADLINE, MAX_DEADLINE = 1, 86_400
"""Seconds: what a healthy rank may need to answer, and a day."""


def _balance_of_yaml(value: object) -> Balance:
    # YAML 1.1 reads an unquoted `on` as true.
    if isinstance(value, bool):
        return Balance.ON if value else Balance.OFF
    if value not in tuple(Balance):
        raise ValueError(value)
    return Balance(str(value))


BALANCE: Kind = replace(choice(Balance), from_yaml=_balance_of_yaml)
TEXTS = several(PATH, "a path or a list of paths")
VARIANTS = replace(
    several(choice(VariantName), f"a variant ({', '.join(VariantName)})"), metavar="NAME"
)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One `equipoise run`; every field is also an option and a key of the configuration file.

    An empty `text` means the shipped samples, an empty `communicator` the one that goes with the
    backend, empty `variants` all that this run can serve. A `placement` is a file of the one that
    is served unchanged. Where ranks are divided into stages, `slots` are those of a layer over the
    ranks of a stage. `staging_bytes` bounds the staging of one rank, in bytes of weights; None for
    `LAYERS_IN_FLIGHT` layers. `min_gain` is imbalance, max/mean - 1; the other words are those of
    `equipoise.balancer.experts.config`.
    """

    # fmt: off
    ranks: Annotated[int, Option(
        "processes to serve on; each holds slots/N slots of every layer", RANKS,
        least=1, most=MAX_RANKS)] = 4
    pipeline_ranks: Annotated[int, Option(
        "stages that the ranks are divided into, each with a part of the layers; activations go "
        "from stage to stage, and experts are shared within one", RANKS,
        least=1, most=LAYERS, rare=True)] = 1
    micro_batches: Annotated[int, Option(
        "parts of a step's requests that are under way at once, where there are stages", RANKS,
        least=1, most=MAX_MICRO_BATCHES, default="as many as there are stages", rare=True)] = 0
    tensor_ranks: Annotated[int, Option(
        "ranks of a stage that serve the same requests: each sends a slice of the rows to experts, "
        "and hands a slice of them to the next stage", RANKS, least=1, most=MAX_RANKS, rare=True,
    )] = 1
    backend: Annotated[str, Option(
        "accelerator to run on (`equipoise doctor` lists them)", RANKS)] = "cpu"
    communicator: Annotated[str, Option(
        "communicator between ranks", RANKS, default="the one that goes with the backend")] = ""
    exchange: Annotated[ExchangeForm, Option(
        "how tokens come to their experts: portable, whose host reads the counts of every layer, "
        "or fixed, whose messages have one size and whose counts stay on the device", RANKS,
        rare=True)] = ExchangeForm.PORTABLE
    deadline: Annotated[float, Option(
        "longest that anything waits for another rank", RANKS, kind=SECONDS,
        least=SHORTEST_DEADLINE, most=MAX_DEADLINE)] = 60.0
    steps: Annotated[int, Option(
        "forwards to serve, divided evenly among the texts", TRAFFIC, least=1, most=MAX_STEPS
    )] = 120
    text: Annotated[tuple[Path, ...], Option(
        "UTF-8 files to serve, one phase of traffic each, in this order", TRAFFIC, kind=TEXTS,
        default="shipped samples of Python, Chinese and tables")] = ()
    seed: Annotated[int, Option("which prompts are cut from the texts", TRAFFIC, least=0)] = 0
    balance: Annotated[Balance, Option(
        "whether experts move meanwhile; the counts are the same: they are of experts, not of "
        "slots", BALANCING, kind=BALANCE)] = Balance.ON
    slots: Annotated[int, Option(
        "slots per layer over all ranks", BALANCING, least=EXPERTS, most=MAX_SLOTS)] = 40
    shares: Annotated[Shares, Option(
        "how an expert's rows are divided among its replicas: as planned, from the last load, or "
        "so that each batch is level: that of a rank, of the ranks of a node together, or of all "
        "ranks", BALANCING)] = Shares.LOCAL
    variants: Annotated[tuple[VariantName, ...], Option(
        "which rows of the table to serve, of unbalanced, static, lagged, local, node, exact, and "
        "placement with --placement; fewer take less time, and unbalanced alone serves without "
        "balancing. Without --shares the run is about the last of them in this order. Every one is "
        "compared with one process that serves alone", BALANCING, kind=VARIANTS,
        default="all that the other options allow")] = ()
    locality: Annotated[Locality, Option(
        "which replica is preferred where shares leave a choice: any, or those on the row's own "
        "rank, up to what they take; that goes with --shares exact", BALANCING, rare=True,
    )] = Locality.ANY
    routing_rule: Annotated[RoutingRule, Option(
        "who picks a replica: the shares, or another engine's rule to the bit, which divides "
        "evenly, so that only --shares static goes with it and is its default", BALANCING,
        rare=True)] = RoutingRule.SHARES
    placement: Annotated[Path | None, Option(
        "serve this placement with its shares, in any format, and move nothing; instead of "
        "--shares", BALANCING)] = None
    window_size: Annotated[int, Option(
        "steps of load that a plan is made from", BALANCING,
        least=1, most=MAX_STEPS, metavar="STEPS")] = 4
    step_interval: Annotated[int, Option(
        "steps from one plan to the next", BALANCING, least=1, most=MAX_STEPS, metavar="STEPS")] = 8
    target: Annotated[float, Option(
        "imbalance, max/mean - 1 of the ranks, mean over layers, that is good enough", PLANS,
        least=0, most=PLANNER_LIMITS["target"])] = 0.02
    slack: Annotated[float, Option(
        "room that is kept on each rank for shares, as part of the mean", PLANS,
        least=0, most=PLANNER_LIMITS["slack"], rare=True)] = 0.1
    sigma: Annotated[float, Option(
        "plan for the load of the window and so many standard deviations more", PLANS,
        least=0, most=PLANNER_LIMITS["sigma"], metavar="Z", rare=True)] = 0.0
    headroom: Annotated[int, Option(
        "swaps of two experts in each layer that changes, so that shares have room to level single "
        "batches; for the variants local, node and exact", PLANS,
        least=0, most=PLANNER_LIMITS["headroom"], rare=True)] = 8
    min_gain: Annotated[float, Option(
        "imbalance, max/mean - 1, that a layer must gain for any of its weights to move", PLANS,
        least=0, most=MAX_MIN_GAIN, rare=True)] = 0.01
    survive: Annotated[int, Option(
        "what no expert may be lost with: 0 nothing, 1 any one rank, 2 any one node; from 1 on "
        f"takes --slots {2 * EXPERTS}", PLANS,
        least=0, most=PLANNER_LIMITS["survive"], metavar="0|1|2")] = 0
    nodes: Annotated[int, Option(
        "machines that the ranks count as being on, evenly, neighbours together: copies come from "
        "the same one where they can", PLANS, least=1, most=MAX_RANKS)] = 1
    commit: Annotated[CommitMode, Option(
        "how weights come into slots: from peers, between two steps; or from the host's memory, a "
        "few layers a step, each under a stream lock", MOVES)] = CommitMode.STAGED
    staging_bytes: Annotated[int | None, Option(
        "staged: weights on their way into a rank at once, such as 2MiB, which is memory of the "
        "device; at least a slot. With less than a rank holds of a layer, what a layer needs may "
        "take several rebalances", MOVES, kind=BYTES, rare=True,
        default="two layers of which every slot changes")] = None
    slots_per_message: Annotated[int, Option(
        "staged: slots that travel in one message at most", MOVES,
        least=1, most=MAX_PER_STEP, metavar="SLOTS", rare=True)] = 16
    layer_updates_per_iter: Annotated[int, Option(
        "in_place: layers that are rewritten in one step", MOVES,
        least=1, most=MAX_PER_STEP, metavar="LAYERS", rare=True)] = 2
    max_stalled_steps: Annotated[int, Option(
        "steps without progress after which a rebalance is aborted; a plan may take 16 times as "
        "many", MOVES,
        least=1, most=MAX_STEPS, metavar="STEPS", rare=True)] = 64
    live: Annotated[bool, Option(
        "draw on the terminal what happens while it serves: ranks as bars, the switch of the text, "
        "weights that move; without --variants, serves before and after only", WATCHING)] = False
    log_rebalances: Annotated[bool, Option(
        "one line per rebalance on standard error; aborted ones are logged anyway", WATCHING
    )] = False
    log_balancedness: Annotated[bool, Option(
        "lines on standard error that say how even the load is", WATCHING)] = False
    log_balancedness_interval: Annotated[int, Option(
        "steps from one such line to the next", WATCHING,
        needs=("log_balancedness", "no line is written without it"),
        least=1, most=MAX_STEPS, metavar="STEPS", rare=True)] = 1
    metrics_port: Annotated[int | None, Option(
        "serve Prometheus metrics while the run lasts: rank 0 on this port, rank r on PORT + r; "
        "needs the extra serve", WATCHING, least=1, most=65_535, metavar="PORT")] = None
    metrics_address: Annotated[str, Option(
        "address to serve them on", WATCHING, metavar="ADDRESS",
        needs=("metrics_port", "none are served without it"))] = "127.0.0.1"
    wandb: Annotated[str, Option(
        "log rebalances to this project at Weights & Biases; needs the extra wandb", WATCHING,
        metavar="PROJECT", default="none")] = ""
    out: Annotated[Path, Option(
        "folder of summary.json and report.html", OUTPUT, metavar="DIR")] = Path("equipoise-run")
    # fmt: on

    @property
    def stage_ranks(self) -> int:
        """Ranks of a stage, which share the experts of its layers."""
        return self.ranks // self.pipeline_ranks

    @property
    def forwards_per_step(self) -> int:
        """Forwards of a step: micro-batches, where there are stages."""
        return self.micro_batches or self.pipeline_ranks


class RecordedContent(StrEnum):
    """What a recording keeps of the routing."""

    COUNTS = "counts"
    """Rows of every expert, step by step."""
    TOKENS = "tokens"
    """The experts of every token, request by request."""


@dataclass(frozen=True)
class RecordingSettings:
    """What every rank writes of its routing: of which steps, into which folder."""

    folder: Path
    steps: IterationRange
    content: RecordedContent = RecordedContent.COUNTS


def available_variants(run: RunSettings) -> tuple[VariantName, ...]:
    """The variants that a run with these settings can serve, whichever of them are asked for.

    In the order in which they are served: without balancing, then each share mode, that of the run
    last; or the given placement. On one node the shares of a node are as good as exact ones: they
    are served only if the run is about them.
    """
    if run.placement is not None:
        return VariantName.UNBALANCED, VariantName.PLACEMENT
    if run.balance is Balance.OFF:
        return (VariantName.UNBALANCED,)
    # Another engine's rule reads no shares, so there is one way to serve under it.
    reads_shares = run.routing_rule is RoutingRule.SHARES
    idle = {run.shares, *([Shares.NODE] if run.nodes == 1 else [])}
    other_modes = [mode for mode in Shares if mode not in idle] if reads_shares else []
    return (VariantName.UNBALANCED, *(VariantName(mode) for mode in (*other_modes, run.shares)))


def served_variants(run: RunSettings) -> tuple[VariantName, ...]:
    """The variants that a run serves, in order; the one that it is about is the last."""
    names = available_variants(run)
    return tuple(name for name in names if not run.variants or name in run.variants)


LAYERS_IN_FLIGHT = 2
"""Default of staging: layers of which every slot changes."""


def staging_buffers(run: RunSettings) -> int:
    """Of a rank that balances; none where weights are written in place.

    No more than the rank has slots: there is nothing that would use them.
    """
    if run.commit is CommitMode.IN_PLACE:
        return 0
    a_layer = run.slots // run.stage_ranks
    if run.staging_bytes is None:
        return LAYERS_IN_FLIGHT * a_layer
    return min(run.staging_bytes // SLOT_BYTES, LAYERS * a_layer)
