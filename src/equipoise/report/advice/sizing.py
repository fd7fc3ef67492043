"""How many redundant slots, and how many ranks in the expert-parallel group."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from equipoise.balancer.experts.planning.planner import plan
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.report.advice.inputs import (
    AdviceInputs,
    OnProgress,
    TrainTestSplit,
    no_progress,
    step_seconds,
)
from equipoise.report.placement.spread import mean_known

EXTRA_SLOTS_TRIED = 4
"""Slots of a rank more than it needs that are tried."""


@dataclass(frozen=True)
class SlotChoice:
    """So many slots.

    Attributes:
        slots: of a layer, over all ranks.
        per_rank: of a layer.
        connected: whether ranks can be connected, so that shares can level any batch.
        planned: imbalance of the rows planned on, mean over layers.
        measured: imbalance of the windows measured on, mean over them and layers.
        extra_bytes: of a rank, over all layers, more than with the fewest slots; None where the
            size of an expert is unknown.
        seconds: of all layers of a step on the slowest ranks; None without hardware.
    """

    slots: int
    per_rank: int
    connected: bool
    planned: float
    measured: float
    extra_bytes: int | None
    seconds: float | None


class SlotChoiceReason(StrEnum):
    """Why this number of slots is advised."""

    TARGET = "the fewest that meet the target"
    BEST = "none that was tried meets the target; these come nearest"
    READING = "to read the weights of more takes longer than balance saves"


@dataclass(frozen=True)
class SlotChoices:
    """Choices of ever more slots; `advised` is one of them."""

    choices: tuple[SlotChoice, ...]
    advised: SlotChoice
    reason: SlotChoiceReason


def min_slots_per_rank(experts: int, ranks: int) -> int:
    """Slots of a rank that are needed to hold every expert once."""
    return -(-experts // ranks)


def can_connect(experts: int, slots: int, ranks: int) -> bool:
    """Ranks can be connected from `ranks` - 1 slots more than experts on."""
    return slots - experts >= ranks - 1


def choose_slots(
    inputs: AdviceInputs, split: TrainTestSplit, on_progress: OnProgress = no_progress
) -> SlotChoices:
    """Tries some numbers of slots, each planned anew. Raises `PlacementError`."""
    experts, ranks = inputs.statistics.experts, inputs.ranks
    least = min_slots_per_rank(experts, ranks)
    sizes = {least + more for more in range(EXTRA_SLOTS_TRIED + 1)}
    if inputs.slots is not None:
        sizes.add(inputs.slots // ranks)
    # More than one copy of an expert on a rank serves nothing.
    choices = []
    for size in sorted(sizes):
        if size <= experts:
            on_progress(f"{size * ranks:,} slots on {ranks:,} ranks")
            choices.append(_choice(inputs, split, size))
    return SlotChoices(tuple(choices), *advise_slots(choices, inputs.target))


def advise_slots(
    choices: Sequence[SlotChoice], target: float
) -> tuple[SlotChoice, SlotChoiceReason]:
    """The fewest slots that meet the target, connected ranks first; but see `SlotChoiceReason`."""
    good = [one for one in choices if one.planned <= target]
    if good:
        choice, reason = (
            min(good, key=lambda one: (not one.connected, one.slots)),
            SlotChoiceReason.TARGET,
        )
    else:
        choice, reason = (
            min(choices, key=lambda one: (one.planned, one.slots)),
            SlotChoiceReason.BEST,
        )
    least = choices[0]
    if choice.seconds is not None and least.seconds is not None and choice.seconds > least.seconds:
        return least, SlotChoiceReason.READING
    return choice, reason


def _choice(inputs: AdviceInputs, split: TrainTestSplit, per_rank: int) -> SlotChoice:
    experts, ranks = inputs.statistics.experts, inputs.ranks
    slots = per_rank * ranks
    new_plan = plan(split.train.counts, slots=slots, ranks=ranks, policy="connected")
    layout = ExpertPlacement(new_plan.placement, new_plan.shares, ranks, split.train.layers)
    extra = None
    if inputs.expert is not None:
        more = per_rank - min_slots_per_rank(experts, ranks)
        extra = more * len(split.train.layers) * inputs.expert.size
    return SlotChoice(
        slots=slots,
        per_rank=per_rank,
        connected=can_connect(experts, slots, ranks),
        planned=split.planned_imbalance(layout),
        measured=mean_known(split.measured_imbalance(layout)),
        extra_bytes=extra,
        seconds=step_seconds(inputs, split, layout),
    )


MAX_RANK_FACTOR = 8
"""Ranks are tried from a part of those asked about to so many times as many."""


@dataclass(frozen=True)
class RankChoice:
    """The same rows on so many ranks.

    Attributes:
        ranks: that serve.
        per_rank: slots of a layer and rank; as few as can hold all experts and connect the ranks.
        measured: imbalance of the windows measured on, mean over them and layers.
        weight_bytes: of a rank, over all layers; None where the size of an expert is unknown.
        memory: part of a rank's memory that these take; None without hardware.
        seconds: of all layers of a step on the slowest ranks; None without hardware.
        latency: part of the latency asked for that these are; None where there is none.
    """

    ranks: int
    per_rank: int
    measured: float
    weight_bytes: int | None
    memory: float | None
    seconds: float | None
    latency: float | None


@dataclass(frozen=True)
class RankChoices:
    """Ever more ranks; `advised` is the first that fits memory and latency, None where none does.

    `judged_by` says by what: nothing, memory, or memory and latency.
    """

    choices: tuple[RankChoice, ...]
    advised: RankChoice | None
    judged_by: str


def candidate_ranks(experts: int, ranks: int) -> list[int]:
    """Numbers of ranks that divide the experts, and the one asked about."""
    divisors = {size for size in range(2, experts + 1) if experts % size == 0}
    near = {
        size
        for size in divisors
        if ranks <= size * MAX_RANK_FACTOR and size <= ranks * MAX_RANK_FACTOR
    }
    return sorted(near | {ranks})


def connected_slots(experts: int, ranks: int) -> int:
    """Slots of a rank: the fewest with which ranks can be connected, none holding all twice."""
    size = min_slots_per_rank(experts, ranks)
    while not can_connect(experts, size * ranks, ranks) and size < experts:
        size += 1
    return size


def choose_ranks(
    inputs: AdviceInputs, split: TrainTestSplit, on_progress: OnProgress = no_progress
) -> RankChoices:
    """Raises `PlacementError`, and `FormatError` where the hardware lacks a figure."""
    sizes = candidate_ranks(inputs.statistics.experts, inputs.ranks)
    choices = []
    for size in sizes:
        on_progress(f"{size:,} ranks")
        choices.append(_width(inputs, split, size))
    if choices[0].memory is None:
        return RankChoices(tuple(choices), None, "nothing")
    judged_by = "memory" if choices[0].latency is None else "memory and latency"
    fitting = [one for one in choices if _fits(inputs, one)]
    return RankChoices(tuple(choices), fitting[0] if fitting else None, judged_by)


def _fits(inputs: AdviceInputs, one: RankChoice) -> bool:
    in_memory = one.memory is not None and one.memory <= inputs.memory_share
    return in_memory and (one.latency is None or one.latency <= inputs.moe_share)


def _width(inputs: AdviceInputs, split: TrainTestSplit, ranks: int) -> RankChoice:
    per_rank = connected_slots(inputs.statistics.experts, ranks)
    new_plan = plan(split.train.counts, slots=per_rank * ranks, ranks=ranks, policy="connected")
    layout = ExpertPlacement(new_plan.placement, new_plan.shares, ranks, split.train.layers)
    expert = inputs.expert
    size = None if expert is None else expert.size * per_rank * len(layout.layers)
    memory = None
    if inputs.hardware is not None and size is not None:
        memory = size / inputs.hardware.memory_bytes
    seconds = step_seconds(inputs, split, layout)
    latency = None
    if seconds is not None and inputs.latency is not None:
        latency = seconds / inputs.latency
    imbalance = mean_known(split.measured_imbalance(layout))
    return RankChoice(ranks, per_rank, imbalance, size, memory, seconds, latency)
