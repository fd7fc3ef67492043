"""Part of family *failures*: what becomes of work in flight when its communicator ends."""

import threading
from dataclasses import replace

from hypothesis import strategies as st

from equipoise.hal.communicator import Communicator
from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand, outcome
from equipoise.hal.conformance.junk import junk_for, untouched
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Pace, Property, Ranks, Traits
from equipoise.hal.conformance.strategies import few
from equipoise.hal.conformance.traffic import (
    RANKS,
    Transfer,
    company,
    fit,
    issue,
    lone,
    operations,
)
from equipoise.hal.conformance.unanswered import call, lonely, lonely_steps
from equipoise.hal.errors import (
    CommunicatorFailed,
    EquipoiseError,
    OperationTimeout,
    ResultPending,
)
from equipoise.hal.work import Work

FAMILY = "failures"
MOST = 4


def _close_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """Traffic, with a place where each rank closes: `rank r: close()`, or at the end."""
    close = st.builds(lambda rank: Step("close", (), rank), RANKS)
    step = st.one_of(operations(traits), close)

    def made(size: int, steps: list[Step]) -> Program:
        placed = [replace(s, rank=s.rank % size) if s.op == "close" else s for s in steps]
        return program(lone(fit(placed, size)), size)

    return st.builds(made, few(traits), st.lists(step, min_size=1, max_size=MOST))


def _play_close(bench: Bench, found: Program) -> Play:
    """Issue until this rank closes; then nothing works, nothing waits, nobody writes."""
    before = set(threading.enumerate())
    group = yield from bench.communicator()
    works: list[Work] = []
    sizes: list[int] = []
    for number, step in enumerate(found.steps):
        if step.op == "close" and step.rank == bench.rank:
            break
        if step.op != "close":
            _note(_tried(bench, group, step, number), works, sizes)
            yield NEXT
    group.close()
    junk = junk_for(bench, *sizes)
    yield NEXT
    refused = attempt(lambda: call(bench, group, "barrier"), CommunicatorFailed)
    demand("E5", refused, f"rank {bench.rank}: issued on a communicator that was closed")
    for work in works:
        left = attempt(lambda work=work: work.result(bench.patience), EquipoiseError)  # type: ignore[misc]
        waits = isinstance(left, ResultPending)
        demand("E5", not waits, f"rank {bench.rank}: a work in flight outlives the close: {left}")
    untouched("E5", junk)
    _nobody_left(bench, before)


def _tried(bench: Bench, group: Communicator, step: Step, number: int) -> Transfer | None:
    """Issue, unless a peer that has closed has failed the communicator already."""
    made: list[Transfer | None] = [None]
    attempt(lambda: made.append(issue(bench, group, step, number)), CommunicatorFailed)
    return made[-1]


def _note(transfer: Transfer | None, works: list[Work], sizes: list[int]) -> None:
    """Keep the work and forget the buffers."""
    if transfer is not None:
        works.append(transfer.work)
        buffers = [*transfer.operands, *(found for found, _ in transfer.results)]
        sizes += [buffer.nbytes for buffer in buffers]


def _nobody_left(bench: Bench, before: set[threading.Thread]) -> None:
    """The threads that came with the communicator end with it; bounded."""
    later = [thread for thread in threading.enumerate() if thread not in before]
    for thread in later:
        thread.join(bench.patience)
    alive = [thread.name for thread in later if thread.is_alive()]
    demand("E5", not alive, f"rank {bench.rank}: threads that outlive the close: {alive}")


def _aborts(traits: Traits) -> str | None:
    return company(traits) or (None if traits.groups.abort else "abort")


def _abort_programs(traits: Traits) -> st.SearchStrategy[Program]:
    return st.builds(lambda n, step: program([step], n), few(traits), lonely_steps())


def _play_abort(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    op, work = lonely(bench, group, found.steps[0])
    yield NEXT
    group.abort()
    error = yield from outcome(bench, work, f"{op}, which was aborted")
    what = f"rank {bench.rank}: {op} that was aborted ended with {error!r}"
    demand("E8", isinstance(error, CommunicatorFailed), what)
    demand("E8", not isinstance(error, OperationTimeout), f"{what}: only its deadline ended it")
    refused = attempt(lambda: call(bench, group, "barrier"), CommunicatorFailed)
    demand("E8", refused, f"rank {bench.rank}: issued on a communicator that was aborted")


PROPERTIES = (
    Property(
        name="closing-ends-what-is-in-flight",
        family=FAMILY,
        clauses=("E5",),
        claim="close returns, later calls raise, waits end, no thread and no late write is left.",
        programs=_close_programs,
        play=_play_close,
        needs=company,
        ranks=Ranks.GROUP,
        pace=Pace.BRISK,
    ),
    Property(
        name="abort-ends-what-is-in-flight",
        family=FAMILY,
        clauses=("E8",),
        claim="After abort every wait ends with an error, long before its deadline.",
        programs=_abort_programs,
        play=_play_abort,
        needs=_aborts,
        ranks=Ranks.GROUP,
    ),
)
