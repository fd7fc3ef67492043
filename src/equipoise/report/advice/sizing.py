"""How many redundant slots, and how many ranks in the expert-parallel group."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from equipoise.balancer.experts.planning.planner import plan
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.report.advice.inputs import (
    LEAST_GAIN,
    AdviceInputs,
    OnProgress,
    TrainTestSplit,
    faster_way,
    no_progress,
    served_imbalance,
    step_factor,
    step_seconds,
)
from equipoise.report.placement.spread import Reals, mean_known

EXTRA_SLOTS_TRIED = 4
"""Slots of a rank more than it needs that are tried."""
ALMOST_ALL = 0.005
"""Of a step: what slots by layer may cost."""
LEAST_PART_SPARED = 0.2
"""Of the redundant slots: where fewer could be left out, layers are not told apart."""


@dataclass(frozen=True)
class SlotChoice:
    """So many slots.

    Attributes:
        slots: of a layer, over all ranks.
        per_rank: of a layer.
        connected: whether ranks can be connected, so that shares can level any batch.
        planned: imbalance of the rows planned on, mean over layers.
        measured: (layers,) imbalance of the windows measured on, mean over them, by one plan or by
            plans of the window before, see `faster_way`.
        extra_bytes: of a rank, over all layers, more than with the fewest slots; None where the
            size of an expert is unknown.
        kv_tokens: that a rank has KV cache for; None where unknown.
        throughput: over that of now: requests that run, by the time of a step.
        step: step time over that of balanced ranks, by the dead zone.
        seconds: of all layers of a step on the slowest ranks; None without hardware.
    """

    slots: int
    per_rank: int
    connected: bool
    planned: float
    measured: Reals
    extra_bytes: int | None
    kv_tokens: int | None
    throughput: float
    step: float
    seconds: float | None


class SlotChoiceReason(StrEnum):
    """Why this number of slots is advised."""

    FEWEST = "the fewest whose throughput is within 2% of the best"
    INSTALLED = "those installed, within 2% of the best throughput"
    READING = "to read the weights of more takes longer than balance saves"


@dataclass(frozen=True)
class SlotChoices:
    """Choices of ever more slots; `advised` is one of them.

    `layers_that_gain` are numbers of the layers that its redundant slots make faster, where enough
    of the others could do without; else None.
    """

    choices: tuple[SlotChoice, ...]
    advised: SlotChoice
    reason: SlotChoiceReason
    layers_that_gain: tuple[int, ...] | None

    @property
    def best_step(self) -> float:
        """The least step time over that of balanced ranks."""
        return min(one.step for one in self.choices)

    def of(self, slots: int) -> SlotChoice | None:
        """The choice of so many slots, where it was tried."""
        return next((one for one in self.choices if one.slots == slots), None)


def min_slots_per_rank(experts: int, ranks: int) -> int:
    """Slots of a rank that are needed to hold every expert once."""
    return -(-experts // ranks)


def can_connect(experts: int, slots: int, ranks: int) -> bool:
    """Ranks can be connected from `ranks` - 1 slots more than experts on."""
    return slots - experts >= ranks - 1


def choose_slots(
    inputs: AdviceInputs,
    split: TrainTestSplit,
    now: ExpertPlacement,
    on_progress: OnProgress = no_progress,
) -> SlotChoices:
    """Tries some numbers of slots, each planned anew. Raises `PlacementError`."""
    experts, ranks = inputs.statistics.experts, inputs.ranks
    least = min_slots_per_rank(experts, ranks)
    sizes = {least + more for more in range(EXTRA_SLOTS_TRIED + 1)}
    sizes |= {slots // ranks for slots in (inputs.slots, inputs.slots_now) if slots is not None}
    flat = _good_enough(inputs)
    now_step = step_factor(flat, split.measured_imbalance(now))
    # More than one copy of an expert on a rank serves nothing.
    choices = []
    for size in sorted(sizes):
        if size <= experts:
            on_progress(f"{size * ranks:,} slots on {ranks:,} ranks")
            choices.append(_choice(flat, split, size, now_step))
    installed = None if inputs.installed is None else inputs.installed.slots
    advised, reason = advise_slots(choices, installed)
    gain = layers_that_gain(flat, choices[0], advised)
    numbers = None if gain is None else tuple(split.test.layers[place] for place in gain)
    return SlotChoices(tuple(choices), advised, reason, numbers)


def _good_enough(inputs: AdviceInputs) -> AdviceInputs:
    """The same with a dead zone that reaches to the target: below it nothing is asked for."""
    zone = inputs.zone
    return replace(inputs, dead_zone=replace(zone, knee=max(zone.knee, 1 + inputs.target)))


def advise_slots(
    choices: Sequence[SlotChoice], installed: int | None = None
) -> tuple[SlotChoice, SlotChoiceReason]:
    """The installed number where it is as good as the best, else the fewest that are.

    But see `SlotChoiceReason.READING`. `choices` are of ever more slots, the first without
    redundancy.
    """
    enough = max(one.throughput for one in choices) / (1 + LEAST_GAIN)
    good = [one for one in choices if one.throughput >= enough]
    for choice in good:
        if choice.slots == installed:
            return choice, SlotChoiceReason.INSTALLED
    choice, least = good[0], choices[0]
    if choice.seconds is not None and least.seconds is not None and choice.seconds > least.seconds:
        return least, SlotChoiceReason.READING
    return choice, SlotChoiceReason.FEWEST


def layers_that_gain(
    inputs: AdviceInputs, least: SlotChoice, advised: SlotChoice
) -> tuple[int, ...] | None:
    """Places of the fewest layers whose redundant slots bring all but 0.5 % of a step.

    None where there are no redundant slots, or fewer than `LEAST_PART_SPARED` could be left out.
    """
    gain = inputs.zone.factor(1 + least.measured) - inputs.zone.factor(1 + advised.measured)
    gain = np.nan_to_num(gain)
    order = np.argsort(gain, kind="stable")
    lost = np.cumsum(np.maximum(gain[order], 0.0)) / len(gain)
    spared = int((lost <= ALMOST_ALL * advised.step).sum())
    if advised.slots == least.slots or spared < LEAST_PART_SPARED * len(gain):
        return None
    return tuple(sorted(order[spared:].tolist()))


def _choice(
    inputs: AdviceInputs, split: TrainTestSplit, per_rank: int, now_step: float
) -> SlotChoice:
    experts, ranks = inputs.statistics.experts, inputs.ranks
    slots = per_rank * ranks
    new_plan = plan(split.train.counts, slots=slots, ranks=ranks, policy="connected")
    layout = ExpertPlacement(new_plan.placement, new_plan.shares, ranks, split.train.layers)
    extra = None
    if inputs.expert is not None:
        least = min_slots_per_rank(experts, ranks) * ranks
        extra = inputs.weight_bytes(inputs.expert, slots - least)
    served = faster_way(inputs, split.once(layout), split.following(slots, ranks))
    measured = served_imbalance(served)
    step = step_factor(inputs, measured)
    return SlotChoice(
        slots=slots,
        per_rank=per_rank,
        connected=can_connect(experts, slots, ranks),
        planned=split.planned_imbalance(layout),
        measured=measured,
        extra_bytes=extra,
        kv_tokens=inputs.kv_tokens(slots),
        throughput=inputs.running_requests(slots) * now_step / step,
        step=step,
        seconds=step_seconds(inputs, split, served),
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
    seconds = step_seconds(inputs, split, split.once(layout))
    latency = None
    if seconds is not None and inputs.latency is not None:
        latency = seconds / inputs.latency
    imbalance = mean_known(split.measured_imbalance(layout))
    return RankChoice(ranks, per_rank, imbalance, size, memory, seconds, latency)
