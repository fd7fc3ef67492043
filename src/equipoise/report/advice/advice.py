"""All answers of `equipoise advise`, computed from its inputs."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from equipoise.balancer.experts.planning.planner import Plan, plan
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.report.advice.decision import Decision, decide
from equipoise.report.advice.inputs import (
    AdviceInputs,
    OnProgress,
    TrainTestSplit,
    layer_seconds,
    no_progress,
)
from equipoise.report.advice.migration_cost import (
    Copies,
    MigrationCost,
    TransferRate,
    incoming_copies,
    migration_cost,
)
from equipoise.report.advice.sizing import RankChoices, SlotChoices, choose_ranks, choose_slots
from equipoise.report.advice.worth import CandidateLayouts, Worth, worth
from equipoise.report.placement.spread import linear


@dataclass(frozen=True)
class MigrationAdvice:
    """How fast experts move, and what moves.

    Attributes:
        pace: of one rank.
        moves: to the plan first; then from there to that of the windows measured on, and the same
            by the public rule, where windows were held out; last, of every slot.
        saved: seconds of a step that it saves, the plan or plans that follow the load; negative
            where they cost.
    """

    pace: TransferRate
    moves: tuple[MigrationCost, ...]
    saved: float


@dataclass(frozen=True)
class Advice:
    """Everything. `migration` is None without hardware, latency and what an expert weighs."""

    decision: Decision
    question: AdviceInputs
    split: TrainTestSplit
    slots: int
    worth: Worth
    slot_choices: SlotChoices
    rank_choices: RankChoices
    migration: MigrationAdvice | None


def advise(question: AdviceInputs, on_progress: OnProgress = no_progress) -> Advice:
    """Answers the questions; `on_progress` is what is planned next, which may take minutes in all.

    Raises `PlacementError`, and `FormatError` where the hardware lacks a figure.
    """
    if question.kv_cache is not None and question.expert is not None:
        held = question.weight_bytes(question.expert, question.slots_now)
        question.kv_cache.check_room(held, "--memory")
    split = TrainTestSplit.of(question.statistics)
    now = question.installed or linear(question.statistics, question.ranks)
    swept = choose_slots(question, split, now, on_progress)
    on_progress("greedy and planned")
    slots = question.slots or swept.advised.slots
    layouts = CandidateLayouts(
        now,
        _greedy_placement(question, split, slots),
        _plan_placement(question, split, slots),
    )
    best = worth(question, split, layouts, swept.best_step)
    return Advice(
        decide(question, slots, best, swept),
        question,
        split,
        slots,
        best,
        swept,
        choose_ranks(question, split, on_progress),
        _migration(question, split, best, layouts),
    )


def _plan_placement(question: AdviceInputs, split: TrainTestSplit, slots: int) -> ExpertPlacement:
    """From what is installed where that is in as many slots, and anew where not."""
    installed = question.installed
    fits = installed is not None and installed.slots == slots
    new_plan = plan(
        split.train.counts,
        slots=slots,
        ranks=question.ranks,
        installed=installed.placement if installed is not None and fits else None,
        policy="incremental" if fits else "connected",
        target=question.target,
    )
    return ExpertPlacement(new_plan.placement, new_plan.shares, question.ranks, split.train.layers)


def _greedy_placement(question: AdviceInputs, split: TrainTestSplit, slots: int) -> ExpertPlacement:
    new_plan = plan(split.train.counts, slots=slots, ranks=question.ranks, policy="greedy")
    return ExpertPlacement.with_even_shares(new_plan.placement, question.ranks, split.train.layers)


def _migration(
    question: AdviceInputs, split: TrainTestSplit, best: Worth, layouts: CandidateLayouts
) -> MigrationAdvice | None:
    roofline = question.roofline
    if roofline is None or question.latency is None:
        return None
    rate = roofline.hardware.link_bytes_per_second(question.link)
    pace = TransferRate(rate, roofline.expert.size, question.latency)
    seconds = layer_seconds(question, split, split.once(layouts.planned))
    assert seconds is not None
    moves = tuple(
        migration_cost(name, copies, pace, seconds)
        for name, copies in _transfers(question, split, layouts)
    )
    before, after = best.now.seconds, best.best.seconds
    assert before is not None
    assert after is not None
    return MigrationAdvice(pace, moves, before - after)


def _transfers(
    question: AdviceInputs, split: TrainTestSplit, layouts: CandidateLayouts
) -> Iterator[tuple[str, Copies]]:
    """Names, and copies (layers, ranks) that arrive."""
    planned = layouts.planned
    first = incoming_copies(layouts.now, planned)
    yield "to the plan", first
    if split.held_out:
        load, size, ranks = split.test.counts, planned.slots, planned.ranks
        again = plan(load, slots=size, ranks=ranks, installed=planned.placement,
                     target=question.target)  # fmt: skip
        yield "next, incremental", incoming_copies(planned, _even(again, planned))
        next_plan = plan(load, slots=size, ranks=ranks, policy="greedy")
        yield "next, greedy", incoming_copies(layouts.greedy, _even(next_plan, planned))
    yield "every slot", np.full_like(first, planned.slots // planned.ranks)


def _even(new_plan: Plan, like: ExpertPlacement) -> ExpertPlacement:
    return ExpertPlacement.with_even_shares(new_plan.placement, like.ranks, like.layers)
