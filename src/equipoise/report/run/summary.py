"""Figures of a run, which table, report and JSON share."""

import math
from dataclasses import asdict, dataclass

from equipoise.balancer.experts.runtime.events import COMMITTED, COMPLETED, UNCHANGED
from equipoise.demo.engine_options import EngineOptions, uses_shares
from equipoise.demo.run_record import Rebalance, RunRecord, VariantRecord
from equipoise.demo.settings import VariantName
from equipoise.report.run import metrics
from equipoise.report.run.metrics import StepRange

REBALANCES_PER_PHASE = 2
"""Rebalances, committed or unchanged, that every phase needs for a run to count as balanced."""


SETUP = (
    *("version", "backend", "communicator", "machine", "layers", "experts", "slots"),
    *("ranks", "stages", "tensor_ranks"),
    *(
        "shares",
        "steps",
        "phases",
        "switch_steps",
        "reference_outputs",
        "placement",
        "engine_options",
    ),
)
"""Keys that a summary takes over from the record as they are."""


@dataclass(frozen=True, kw_only=True)
class VariantSummary:
    """One variant over the same steps as the others; seconds, tokens per second, bytes."""

    imbalance: float | None
    balancedness: float | None
    tokens_per_second: float | None
    stall_seconds: float
    rebalances: int
    rebalances_per_phase: tuple[int, ...]
    rebalances_unchanged: int
    copies: int
    bytes_moved: int
    rebalances_aborted: dict[str, int]
    outputs: str


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The JSON of a run, key by key (`docs/run.md` explains each); None: was not run."""

    version: str
    backend: str
    communicator: str
    ranks: int
    stages: int
    tensor_ranks: int
    layers: int
    experts: int
    slots: int
    shares: str
    placement: str
    """Digest of the placement that was given; empty where none was."""
    engine_options: EngineOptions
    """Options of the engine, by name; empty without one."""
    steps: int
    tokens: int
    phases: tuple[str, ...]
    switch_steps: tuple[int, ...]
    measured_from_step: int
    imbalance_unbalanced: float | None
    imbalance_balanced: float | None
    imbalance_static: float | None
    imbalance_lagged: float | None
    imbalance_local: float | None
    imbalance_node: float | None
    imbalance_exact: float | None
    imbalance_placement: float | None
    noise_floor: float | None
    rebalances: int
    rebalances_per_phase: tuple[int, ...]
    rebalances_unchanged: int
    copies: int
    slots_total: int
    bytes_moved: int
    rebalances_aborted: dict[str, int]
    stall_seconds: float | None
    stall_noise_seconds: float | None
    tokens_per_second: float | None
    tokens_per_second_unbalanced: float | None
    outputs_identical: bool
    reference_outputs: str
    not_exercised: str | None
    variants: dict[str, VariantSummary]
    machine: dict[str, str]

    @property
    def main(self) -> VariantSummary | None:
        """The variant that the run is about; None where it did not balance."""
        return self.variants.get(self.shares)

    @property
    def has_unbalanced(self) -> bool:
        """Whether the traffic was also served without balancing, to compare with."""
        return VariantName.UNBALANCED in self.variants

    @property
    def serves_placement(self) -> bool:
        """Whether a placement was given and served unchanged: nothing moves, and nothing has to."""
        return self.shares == VariantName.PLACEMENT

    @property
    def ranks_text(self) -> str:
        """On how many ranks, in words."""
        count = self.ranks * self.stages
        every = f"{count} rank{'s' * (count != 1)}"
        if self.stages > 1:
            every += f" in {self.stages} stages"
        if self.tensor_ranks > 1:
            every += f", {self.tensor_ranks} with the same requests"
        return every

    @property
    def sharing_text(self) -> str:
        """How the variant that the run is about served, in words."""
        rule = (
            ""
            if uses_shares(self.engine_options)
            else f", rule {self.engine_options['routing_rule']}"
        )
        if self.serves_placement:
            return f"the given placement{rule}"
        return "no balancing" if self.main is None else f"{self.shares} shares{rule}"

    @property
    def exit_code(self) -> int:
        """0 for a run that shows what it should; 1 if outputs differ or nothing was exercised."""
        return 0 if self.outputs_identical and self.not_exercised is None else 1

    def to_json(self) -> dict[str, object]:
        """Plain lists, numbers, strings and null."""
        return asdict(self)


def summarise(record: RunRecord) -> RunSummary:
    """Every figure of a run. Raises KeyError if the run's own variant is not in the record."""
    if record.shares != "none" and main_variant(record) is None:
        raise KeyError(f"the run was about {record.shares!r}, which is not in its record")
    window = metrics.after_first_commit(main_variant(record), record.steps)
    variants = {name: _variant(record, v, window) for name, v in record.variants.items()}
    main = variants.get(record.shares)
    unbalanced = variants.get(VariantName.UNBALANCED)
    return RunSummary(
        **{name: getattr(record, name) for name in SETUP},
        tokens=int(record.step_tokens.sum()),
        measured_from_step=window.first,
        imbalance_unbalanced=_imbalance(unbalanced),
        imbalance_balanced=_imbalance(main),
        imbalance_static=_imbalance(variants.get(VariantName.STATIC)),
        imbalance_lagged=_imbalance(variants.get(VariantName.LAGGED)),
        imbalance_local=_imbalance(variants.get(VariantName.LOCAL)),
        imbalance_node=_imbalance(variants.get(VariantName.NODE)),
        imbalance_exact=_imbalance(variants.get(VariantName.EXACT)),
        imbalance_placement=_imbalance(variants.get(VariantName.PLACEMENT)),
        noise_floor=_noise_floor(record, window),
        rebalances=main.rebalances if main else 0,
        rebalances_per_phase=main.rebalances_per_phase if main else tuple(0 for _ in record.phases),
        rebalances_unchanged=main.rebalances_unchanged if main else 0,
        copies=main.copies if main else 0,
        slots_total=record.slots * record.layers,
        bytes_moved=main.bytes_moved if main else 0,
        rebalances_aborted=main.rebalances_aborted if main else {},
        stall_seconds=main.stall_seconds if main else None,
        stall_noise_seconds=unbalanced.stall_seconds if unbalanced else None,
        tokens_per_second=main.tokens_per_second if main else None,
        tokens_per_second_unbalanced=unbalanced.tokens_per_second if unbalanced else None,
        outputs_identical=outputs_identical(record),
        not_exercised=None
        if record.shares == VariantName.PLACEMENT
        else _not_exercised(record, main),
        variants=variants,
    )


def outputs_identical(record: RunRecord) -> bool:
    """Whether every variant's digest is that of the one process without exchange."""
    outputs = {variant.outputs for variant in record.variants.values()}
    return outputs == {record.reference_outputs}


def committed_rebalances(variant: VariantRecord) -> tuple[Rebalance, ...]:
    """The rebalances that changed what slots hold."""
    return tuple(rebalance for rebalance in variant.rebalances if rebalance.outcome == COMMITTED)


def main_variant(record: RunRecord) -> VariantRecord | None:
    """The variant that the run is about; None where it did not balance."""
    return record.variants.get(record.shares)


def _variant(record: RunRecord, variant: VariantRecord, window: StepRange) -> VariantSummary:
    rebalances = committed_rebalances(variant)
    return VariantSummary(
        imbalance=_none_if_nan(metrics.imbalance(variant.rank_rows, window)),
        balancedness=_none_if_nan(metrics.balancedness(variant.rank_rows, window)),
        tokens_per_second=_rate(record, variant),
        stall_seconds=_stall(record, variant),
        rebalances=len(rebalances),
        rebalances_per_phase=_per_phase(record, rebalances),
        rebalances_unchanged=sum(
            rebalance.outcome == UNCHANGED for rebalance in variant.rebalances
        ),
        copies=sum(rebalance.copies for rebalance in rebalances),
        bytes_moved=sum(rebalance.bytes_moved for rebalance in rebalances),
        rebalances_aborted=dict(variant.aborts),
        outputs=variant.outputs,
    )


def _stall(record: RunRecord, variant: VariantRecord) -> float:
    """Against the unbalanced steps, or against the variant's own where there are none."""
    base = record.variants.get(VariantName.UNBALANCED, variant)
    step_range = metrics.after_first_rebalance_began(main_variant(record), record.steps)
    return metrics.stall_seconds(variant.step_seconds, base.step_seconds, step_range)


def _rate(record: RunRecord, variant: VariantRecord) -> float | None:
    seconds = float(variant.step_seconds.sum())
    return float(record.step_tokens.sum()) / seconds if seconds > 0 else None


def _per_phase(record: RunRecord, rebalances: tuple[Rebalance, ...]) -> tuple[int, ...]:
    """Rebalances by the phase that their step belongs to."""
    counts = [0] * len(record.phases)
    for rebalance in rebalances:
        counts[sum(rebalance.step >= switch for switch in record.switch_steps)] += 1
    return tuple(counts)


def _not_exercised(record: RunRecord, main: VariantSummary | None) -> str | None:
    """Why the run proves nothing about balancing; None where it does, or was not asked to."""
    if main is None or record.ranks == 1:
        return None  # one rank, or a stage of one, has every expert, and nothing to balance
    if main.copies == 0:
        return "no slot moved"
    ended = tuple(
        rebalance
        for rebalance in record.variants[record.shares].rebalances
        if rebalance.outcome in COMPLETED
    )
    for phase, rebalances in zip(record.phases, _per_phase(record, ended), strict=True):
        if rebalances < REBALANCES_PER_PHASE:
            return (
                f"phase {phase} had {rebalances} rebalance(s) without an abort, "
                f"needs {REBALANCES_PER_PHASE}"
            )
    return None


def _imbalance(variant: VariantSummary | None) -> float | None:
    return variant.imbalance if variant else None


def _noise_floor(record: RunRecord, window: StepRange) -> float | None:
    """Of the rows of any variant: they all serve the same tokens."""
    some = next(iter(record.variants.values()), None)
    return _none_if_nan(metrics.mean_noise_floor(some.rank_rows, window)) if some else None


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
