"""Part of family *failures*: a host that stops waiting, softly or for good."""

from dataclasses import replace

from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.communicator import Communicator
from equipoise.hal.conformance.ballots import gather, plane
from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand, outcome
from equipoise.hal.conformance.junk import junk_for, untouched
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Pace, Property, Ranks, Traits
from equipoise.hal.conformance.strategies import few
from equipoise.hal.conformance.traffic import (
    ELEMENTS,
    RANKS,
    WARM,
    Transfer,
    company,
    fit,
    issue,
    land,
    lone,
    perhaps_warm,
    warm_up,
)
from equipoise.hal.conformance.unanswered import call
from equipoise.hal.errors import CommunicatorFailed, ResultPending
from equipoise.hal.work import Work

FAMILY = "failures"
MOST = 3
SOFT = 0.001
"""The part of the deadline that a soft wait may take."""
SENDS, RECEIVES = "sends", "receives"
"""Which end of a message gives up."""
JOINED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Collectives that no rank can end while another stays away."""


def _messages() -> st.SearchStrategy[Step]:
    """A message, and which of its ends gives up; not yet fitted."""
    end = st.sampled_from((SENDS, RECEIVES))
    return st.builds(
        lambda source, hop, nbytes, end: Step("message", (source, hop, nbytes, end)),
        RANKS,
        RANKS,
        st.sampled_from(ELEMENTS),
        end,
    )


def _soft_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """Messages, and collectives `op(elements, rank)` to which one rank comes late."""
    joint = st.builds(
        lambda op, count, late: Step(op, (count, late)),
        st.sampled_from(JOINED),
        st.sampled_from(ELEMENTS),
        RANKS,
    )
    drawn = st.lists(_messages() | joint, min_size=1, max_size=MOST)

    def made(size: int, first: list[Step], steps: list[Step]) -> Program:
        shared = [_of_size(step, size) for step in steps if step.op == "message" or size > 1]
        return program([*first, *lone(fit(shared, size))], size)

    return st.builds(made, few(traits), perhaps_warm(), drawn)


def _of_size(step: Step, size: int) -> Step:
    """A collective names the rank that comes late among those that there are."""
    if step.op == "message":
        return step
    return replace(step, args=(step.args[0], int(step.args[1]) % size))


def _play_soft(bench: Bench, found: Program) -> Play:
    """All ranks but one give up and say so; only then the last one comes."""
    group = yield from bench.communicator()
    warm_up(group, found.steps)
    transfers: list[Transfer | None] = []
    junk: list[Tensor] = []
    for number, step in enumerate(found.steps):
        if step == WARM:
            continue
        early, late = _parties(step, bench.size)
        given_up = f"{group.purpose}/step {number} was given up"
        if bench.rank in early:
            kept, sizes = _give_up(bench, group, step, number)
            transfers.append(kept)
            junk += junk_for(bench, *sizes)
            plane(bench).cast(given_up, b"")
        elif bench.rank == late:
            yield from gather(bench, given_up, early)
            transfers.append(issue(bench, group, step, number))
        yield NEXT
    yield from land(bench, transfers, "E3")


def _parties(step: Step, size: int) -> tuple[list[int], int]:
    """Who gives up, and who comes late."""
    if step.op == "message":
        early, late = _ends(step)
        return [early], late
    late = int(step.args[1])
    return [rank for rank in range(size) if rank != late], late


def _ends(step: Step) -> tuple[int, int]:
    """Who gives up, and who comes late."""
    source, target = int(step.args[0]), int(step.args[1])
    return (source, target) if step.args[3] == SENDS else (target, source)


def _give_up(
    bench: Bench, group: Communicator, step: Step, number: int
) -> tuple[Transfer | None, list[int]]:
    """Issue this rank's part and wait for a moment, in vain; what was to be sent is dropped.

    Returns what is still to arrive, and the sizes (bytes) of what was dropped.
    """
    transfer = issue(bench, group, step, number)
    if transfer is None:
        return None, []
    pending = attempt(lambda: transfer.work.result(SOFT * bench.deadline), ResultPending)
    demand("E3", pending, f"{transfer.what}: ended before the last rank came")
    sizes = [operand.nbytes for operand in transfer.operands]
    return replace(transfer, operands=()), sizes


def _cancel_programs(traits: Traits) -> st.SearchStrategy[Program]:
    return st.builds(lambda n, step: program(fit([step], n), n), few(traits), _messages())


def _play_cancel(bench: Bench, found: Program) -> Play:
    """The other end comes after the cancel; only when it has ended, the junk is looked at."""
    group = yield from bench.communicator()
    step = found.steps[0]
    canceller, other = _ends(step)
    cancelled, ended = (f"{group.purpose}/{what}" for what in ("cancelled", "ended"))
    if bench.rank == canceller:
        work = _cancel(bench, group, step)
        junk = junk_for(bench, int(step.args[2]))
        plane(bench).cast(cancelled, b"")
        yield NEXT
        _is_over(bench, work)
        raised = attempt(lambda: call(bench, group, "barrier"), CommunicatorFailed)
        demand("E4", raised, f"rank {bench.rank}: issued after a cancel as if nothing had happened")
        yield from gather(bench, ended, [other])
        _is_over(bench, work)
        untouched("E4", junk)
    elif bench.rank == other:
        yield from gather(bench, cancelled, [canceller])
        transfer = issue(bench, group, step, 0)
        if transfer is not None and (yield from outcome(bench, transfer.work)) is None:
            transfer.check("E4")
        plane(bench).cast(ended, b"")


def _is_over(bench: Bench, work: Work) -> None:
    """It has ended for its issuer, and has failed, whatever the other end does."""
    what = f"rank {bench.rank}: an operation that was cancelled"
    demand("E4", work.done(), f"{what} is not done")
    raised = attempt(lambda: work.result(0.0), CommunicatorFailed, ResultPending)
    named = f"{type(raised).__name__}: {raised}" if raised else "nothing"
    demand("E4", isinstance(raised, CommunicatorFailed), f"{what}: its result raises {named}")


def _cancel(bench: Bench, group: Communicator, step: Step) -> Work:
    """Issue, cancel, and drop the buffer."""
    transfer = issue(bench, group, step, 0)
    assert transfer is not None, "this rank is an end of the message"
    transfer.work.cancel()
    return transfer.work


PROPERTIES = (
    Property(
        name="a-soft-wait-that-gives-up-changes-nothing",
        family=FAMILY,
        clauses=("E3",),
        claim="result(timeout) raises ResultPending; the operation lives on and owns its buffers.",
        programs=_soft_programs,
        play=_play_soft,
        needs=company,
        ranks=Ranks.GROUP,
    ),
    Property(
        name="a-cancelled-operation-keeps-its-buffers-and-fails-its-communicator",
        family=FAMILY,
        clauses=("E4",),
        claim="A cancel ends the operation at once; nobody reads or writes memory that was freed.",
        programs=_cancel_programs,
        play=_play_cancel,
        needs=company,
        ranks=Ranks.GROUP,
        pace=Pace.BRISK,
    ),
)
