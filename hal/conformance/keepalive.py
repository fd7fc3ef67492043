"""Family *keepalive*: who owns what is in flight, and what a handle may be asked."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from equipoise.hal.communicator import Communicator
from equipoise.hal.conformance.bench import NEXT, Bench, Play, demand, finish
from equipoise.hal.conformance.handles import PROPERTIES as HANDLES
from equipoise.hal.conformance.junk import junk_for, untouched
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Ranks, Traits
from equipoise.hal.conformance.strategies import few
from equipoise.hal.conformance.traffic import (
    RANKS,
    Transfer,
    company,
    fit,
    issue,
    land,
    lone,
    operations,
)
from equipoise.hal.conformance.verbs_own import PROPERTIES as VERBS

FAMILY = "keepalive"
Gone = Callable[[], bool]
_reference_to: Any = StorageWeakRef
"""Whose own module has no types; sees the memory go, where a weak tensor sees only the tensor."""
MOST = 6
BATCHES = ("exchange", "message", "all_gather")
"""Operations, many of them several messages."""
LATER = 12
"""Later calls by which the memory of dropped works is given back (clause K2)."""
SPARE = 2
"""Operations that a backend may hold on to: gloo's two threads each keep their latest one."""


def _dropped_programs(traits: Traits) -> st.SearchStrategy[Program]:
    step = st.one_of(operations(traits), st.just(Step("blindly")))

    def made(size: int, steps: list[Step]) -> Program:
        return program(lone(fit(steps, size)), size)

    return st.builds(made, few(traits), st.lists(step, min_size=1, max_size=MOST))


def _play_dropped(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    bare: list[Transfer] = []
    junk: list[Tensor] = []
    blind = False
    for number, step in enumerate(found.steps):
        if step.op != "blindly":
            _issue_bare(bench, group, (step, number, blind), bare, junk)
            yield NEXT
        blind = step.op == "blindly"
    yield from land(bench, bare, "K1")
    untouched("K1", junk)


def _issue_bare(
    bench: Bench,
    group: Communicator,
    order: tuple[Step, int, bool],
    bare: list[Transfer],
    junk: list[Tensor],
) -> None:
    """Issue a step and drop its buffers, *blindly* those of the result too; keep its work."""
    step, number, blind = order
    transfer = issue(bench, group, step, number)
    if transfer is None:
        return
    dropped = [*transfer.operands, *(found for found, _ in transfer.results if blind)]
    sizes = [buffer.nbytes for buffer in dropped]
    bare.append(replace(transfer, operands=(), results=() if blind else transfer.results))
    del transfer, dropped
    junk += junk_for(bench, *sizes)


def _works_programs(traits: Traits) -> st.SearchStrategy[Program]:
    drop = st.builds(lambda rank: Step("drop", (), rank), RANKS)
    step = st.one_of(operations(traits), drop)

    def made(size: int, steps: list[Step]) -> Program:
        placed = [replace(s, rank=s.rank % size) if s.op == "drop" else s for s in steps]
        return program(lone(fit(placed, size)), size)

    return st.builds(made, few(traits), st.lists(step, min_size=2, max_size=MOST + 2))


def _play_works(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    held: list[Transfer] = []
    dropped: list[list[Gone]] = []
    for number, step in enumerate(found.steps):
        if step.op == "drop":
            if step.rank == bench.rank:
                dropped += [_watch(transfer) for transfer in held]
                held.clear()
                bench.churn()
        else:
            _hold(held, issue(bench, group, step, number))
        yield NEXT
    yield from land(bench, held, "K1")
    yield from _given_back(bench, group, dropped)


def _hold(held: list[Transfer], transfer: Transfer | None) -> None:
    if transfer is not None:
        held.append(transfer)


def _watch(transfer: Transfer) -> list[Gone]:
    """Whether the memory of each buffer has been given back; does not keep it alive."""
    buffers = [*transfer.operands, *(found for found, _ in transfer.results)]
    return [_gone(buffer) for buffer in buffers]


def _gone(buffer: Tensor) -> Gone:
    reference: Any = _reference_to(buffer.untyped_storage())
    return lambda: bool(reference.expired())


def _given_back(bench: Bench, group: Communicator, dropped: list[list[Gone]]) -> Play:
    """Make later calls, as many on every rank, and count the operations that are still alive."""
    for _ in range(LATER):
        yield from finish(bench, group.barrier(), "a later call")
    alive = sum(not all(gone() for gone in buffers) for buffers in dropped)
    what = f"{alive} of {len(dropped)} dropped works hold memory {LATER} calls after their end"
    demand("K2", alive <= SPARE, what)


def _order_programs(traits: Traits) -> st.SearchStrategy[Program]:
    finish_one = st.builds(lambda which: Step("finish", (which,)), st.integers(0, MOST - 1))
    step = st.one_of(operations(traits, BATCHES), finish_one)

    def made(size: int, steps: list[Step]) -> Program:
        return program(_finishable(lone(fit(steps, size))), size)

    return st.builds(made, few(traits), st.lists(step, min_size=1, max_size=MOST))


def _finishable(steps: list[Step]) -> list[Step]:
    """Each *finish* names the place, in the program, of an operation before it."""
    kept: list[Step] = []
    for step in steps:
        if step.op == "finish":
            issued = [place for place, earlier in enumerate(kept) if earlier.op != "finish"]
            if not issued:
                continue
            step = Step("finish", (issued[int(step.args[0]) % len(issued)],))
        kept.append(step)
    return kept


def _play_order(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    flying: dict[int, Transfer] = {}
    for number, step in enumerate(found.steps):
        if step.op == "finish":
            yield from land(bench, [flying.pop(int(step.args[0]), None)], "K4")
        elif (transfer := issue(bench, group, step, number)) is not None:
            flying[number] = transfer
        yield NEXT
    yield from land(bench, reversed(flying.values()), "K4")


PROPERTIES = (
    Property(
        name="buffers-dropped-in-flight-still-travel",
        family=FAMILY,
        clauses=("K1",),
        claim="An operation owns its buffers: its caller may drop them at once.",
        programs=_dropped_programs,
        play=_play_dropped,
        needs=company,
        ranks=Ranks.GROUP,
    ),
    Property(
        name="dropped-works-neither-cancel-nor-leak",
        family=FAMILY,
        clauses=("K2", "K1"),
        claim="Without its work an operation goes on, and its memory comes back in the end.",
        programs=_works_programs,
        play=_play_works,
        needs=company,
        ranks=Ranks.GROUP,
    ),
    Property(
        name="works-end-in-any-order",
        family=FAMILY,
        clauses=("K4",),
        claim="A work may be waited for before earlier ones, and ends with all of its batch.",
        programs=_order_programs,
        play=_play_order,
        needs=company,
        ranks=Ranks.GROUP,
    ),
    *HANDLES,
    *VERBS,
)
