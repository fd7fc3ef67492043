"""Settings of a run, and the constants of the shipped model that they depend on."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from equipoise.balancer.experts.config import CommitMode, Locality, RoutingRule
from equipoise.balancer.experts.config import ShareMode as Shares
from equipoise.balancer.formats.iterations import IterationRange

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


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One `equipoise run`; every field is also an option and a key of the configuration file.

    `slots` counts slots per layer over all ranks, `window_size` and `step_interval`
    are steps (vLLM's words), `deadline` is seconds. An empty `text` means the shipped samples, and
    an empty `communicator` the one that goes with the backend. `variants` are the ways in which the
    traffic is served; empty for all that this run can serve. A `placement` is a file of the one
    that is served unchanged. Rank r serves metrics on `metrics_port` + r, where there is one.
    Ranks are `pipeline_ranks` stages of equally many, each with some of the layers; of a stage,
    `tensor_ranks` serve the same requests. A step's requests are divided into `micro_batches`, as
    many as there are stages if 0. `slots` are those of a layer, over the ranks of a stage.
    `staging_bytes` bounds the staging of one rank, in bytes of weights; None for `LAYERS_IN_FLIGHT`
    layers.
    `min_gain` is imbalance, max/mean - 1; the other words are those of
    `equipoise.balancer.experts.config`.
    """

    ranks: int = 4
    pipeline_ranks: int = 1
    micro_batches: int = 0
    tensor_ranks: int = 1
    backend: str = "cpu"
    communicator: str = ""
    exchange: ExchangeForm = ExchangeForm.PORTABLE
    steps: int = 120
    text: tuple[Path, ...] = ()
    slots: int = 40
    shares: Shares = Shares.LOCAL
    variants: tuple[VariantName, ...] = ()
    locality: Locality = Locality.ANY
    routing_rule: RoutingRule = RoutingRule.SHARES
    commit: CommitMode = CommitMode.STAGED
    balance: Balance = Balance.ON
    placement: Path | None = None
    window_size: int = 4
    step_interval: int = 8
    target: float = 0.02
    slack: float = 0.1
    sigma: float = 0.0
    headroom: int = 8
    min_gain: float = 0.01
    survive: int = 0
    nodes: int = 1
    staging_bytes: int | None = None
    slots_per_message: int = 16
    layer_updates_per_iter: int = 2
    max_stalled_steps: int = 64
    deadline: float = 20.0
    seed: int = 0
    metrics_port: int | None = None
    metrics_address: str = "127.0.0.1"
    wandb: str = ""
    log_rebalances: bool = False
    log_balancedness: bool = False
    log_balancedness_interval: int = 1
    live: bool = False
    out: Path = Path("equipoise-run")

    @property
    def stage_ranks(self) -> int:
        """Ranks of a stage, which share the experts of its layers."""
        return self.ranks // self.pipeline_ranks

    @property
    def turns(self) -> int:
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
