"""On how many ranks: the size of the expert-parallel group."""

from dataclasses import dataclass

from equipoise.balancer.experts.planning.planner import plan
from equipoise.balancer.formats.arrangement import Arrangement
from equipoise.report.advice.question import Question, Told, unheard
from equipoise.report.advice.redundancy import connectable, fewest
from equipoise.report.advice.step import step_seconds
from equipoise.report.advice.trial import Trial
from equipoise.report.spread import mean_known

REACH = 8
"""Ranks are tried from a part of those asked about to so many times as many."""


@dataclass(frozen=True)
class Width:
    """The same rows on so many ranks.

    Attributes:
        ranks: that serve.
        per_rank: slots of a layer and rank; as few as can hold all experts and connect the ranks.
        measured: imbalance of the windows measured on, mean over them and layers.
        weight_bytes: of a rank, over all layers; None where nobody said what an expert weighs.
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
class Widths:
    """Ever more ranks; `advised` is the first that fits memory and latency, None where none does.

    `judged` says by what: nothing, memory, or memory and latency.
    """

    choices: tuple[Width, ...]
    advised: Width | None
    judged: str


def candidates(experts: int, ranks: int) -> list[int]:
    """Numbers of ranks that divide the experts, and the one asked about."""
    divisors = {size for size in range(2, experts + 1) if experts % size == 0}
    near = {size for size in divisors if ranks <= size * REACH and size <= ranks * REACH}
    return sorted(near | {ranks})


def connected_slots(experts: int, ranks: int) -> int:
    """Slots of a rank: the fewest with which ranks can be connected, none holding all twice."""
    size = fewest(experts, ranks)
    while not connectable(experts, size * ranks, ranks) and size < experts:
        size += 1
    return size


def widths(question: Question, trial: Trial, told: Told = unheard) -> Widths:
    """Raises `PlacementError`, and `FormatError` where the hardware lacks a figure."""
    sizes = candidates(question.statistics.experts, question.ranks)
    choices = []
    for size in sizes:
        told(f"{size:,} ranks")
        choices.append(_width(question, trial, size))
    if choices[0].memory is None:
        return Widths(tuple(choices), None, "nothing")
    judged = "memory" if choices[0].latency is None else "memory and latency"
    fitting = [one for one in choices if _fits(question, one)]
    return Widths(tuple(choices), fitting[0] if fitting else None, judged)


def _fits(question: Question, one: Width) -> bool:
    in_memory = one.memory is not None and one.memory <= question.memory_share
    return in_memory and (one.latency is None or one.latency <= question.moe_share)


def _width(question: Question, trial: Trial, ranks: int) -> Width:
    per_rank = connected_slots(question.statistics.experts, ranks)
    found = plan(trial.train.counts, slots=per_rank * ranks, ranks=ranks, policy="connected")
    layout = Arrangement(found.placement, found.shares, ranks, trial.train.layers)
    expert = question.expert
    size = None if expert is None else expert.size * per_rank * len(layout.layers)
    memory = None
    if question.hardware is not None and size is not None:
        memory = size / question.hardware.memory_bytes
    seconds = step_seconds(question, trial, layout)
    latency = None
    if seconds is not None and question.latency is not None:
        latency = seconds / question.latency
    measured = mean_known(trial.measured(layout))
    return Width(ranks, per_rank, measured, size, memory, seconds, latency)
