"""How many redundant slots?"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from equipoise.balancer.experts.planning.planner import plan
from equipoise.balancer.formats.arrangement import Arrangement
from equipoise.report.advice.question import Question, Told, unheard
from equipoise.report.advice.step import step_seconds
from equipoise.report.advice.trial import Trial
from equipoise.report.spread import mean_known

STEPS = 4
"""Slots of a rank more than it needs that are tried."""


@dataclass(frozen=True)
class Choice:
    """So many slots.

    Attributes:
        slots: of a layer, over all ranks.
        per_rank: of a layer.
        connected: whether ranks can be connected, so that shares can level any batch.
        planned: imbalance of the rows planned on, mean over layers.
        measured: imbalance of the windows measured on, mean over them and layers.
        extra_bytes: of a rank, over all layers, more than with the fewest slots; None where nobody
            said what an expert weighs.
        seconds: of all layers of a step on the slowest ranks; None without hardware.
    """

    slots: int
    per_rank: int
    connected: bool
    planned: float
    measured: float
    extra_bytes: int | None
    seconds: float | None


class Reason(StrEnum):
    """Why so many slots."""

    TARGET = "the fewest that meet the target"
    BEST = "none that was tried meets the target; these come nearest"
    READING = "to read the weights of more takes longer than balance saves"


@dataclass(frozen=True)
class Redundancy:
    """Choices of ever more slots; `advised` is one of them."""

    choices: tuple[Choice, ...]
    advised: Choice
    reason: Reason


def fewest(experts: int, ranks: int) -> int:
    """Slots of a rank that are needed to hold every expert once."""
    return -(-experts // ranks)


def connectable(experts: int, slots: int, ranks: int) -> bool:
    """Ranks can be connected from `ranks` - 1 slots more than experts on."""
    return slots - experts >= ranks - 1


def redundancy(question: Question, trial: Trial, told: Told = unheard) -> Redundancy:
    """Tries some numbers of slots, each planned anew. Raises `PlacementError`."""
    experts, ranks = question.statistics.experts, question.ranks
    least = fewest(experts, ranks)
    sizes = {least + more for more in range(STEPS + 1)}
    if question.slots is not None:
        sizes.add(question.slots // ranks)
    # More than one copy of an expert on a rank serves nothing.
    choices = []
    for size in sorted(sizes):
        if size <= experts:
            told(f"{size * ranks:,} slots on {ranks:,} ranks")
            choices.append(_choice(question, trial, size))
    return Redundancy(tuple(choices), *advised(choices, question.target))


def advised(choices: Sequence[Choice], target: float) -> tuple[Choice, Reason]:
    """The fewest slots that meet the target, connected ranks first; but see `Reason`."""
    good = [one for one in choices if one.planned <= target]
    if good:
        found, reason = min(good, key=lambda one: (not one.connected, one.slots)), Reason.TARGET
    else:
        found, reason = min(choices, key=lambda one: (one.planned, one.slots)), Reason.BEST
    least = choices[0]
    if found.seconds is not None and least.seconds is not None and found.seconds > least.seconds:
        return least, Reason.READING
    return found, reason


def _choice(question: Question, trial: Trial, per_rank: int) -> Choice:
    experts, ranks = question.statistics.experts, question.ranks
    slots = per_rank * ranks
    found = plan(trial.train.counts, slots=slots, ranks=ranks, policy="connected")
    layout = Arrangement(found.placement, found.shares, ranks, trial.train.layers)
    extra = None
    if question.expert is not None:
        more = per_rank - fewest(experts, ranks)
        extra = more * len(trial.train.layers) * question.expert.size
    return Choice(
        slots=slots,
        per_rank=per_rank,
        connected=connectable(experts, slots, ranks),
        planned=trial.planned(layout),
        measured=mean_known(trial.measured(layout)),
        extra_bytes=extra,
        seconds=step_seconds(question, trial, layout),
    )
