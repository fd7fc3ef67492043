"""Family *failures*: what nobody answers ends in an error that says what it was, and no other."""

from hypothesis import strategies as st

from equipoise.hal.communicator import Communicator
from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand, outcome
from equipoise.hal.conformance.ends import PROPERTIES as ENDS
from equipoise.hal.conformance.failed_waits import PROPERTIES as FAILED_WAITS
from equipoise.hal.conformance.giving_up import PROPERTIES as GIVING_UP
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Pace, Property, Ranks, Traits
from equipoise.hal.conformance.strategies import few
from equipoise.hal.conformance.traffic import (
    RANKS,
    WARM,
    Transfer,
    company,
    fit,
    issue,
    land,
    lone,
    operations,
    perhaps_warm,
)
from equipoise.hal.conformance.unanswered import (
    JOINT,
    NBYTES,
    POINTED,
    call,
    lonely,
    lonely_steps,
)
from equipoise.hal.errors import CommunicatorFailed
from equipoise.hal.work import Work

FAMILY = "failures"
MOST = 3
PROBE = Step("all_reduce", (NBYTES,))
"""What must still work on a communicator that has nothing to do with the failure."""


def _lonely_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """`lonely(...)`, sound traffic on another communicator, and `later(op)` after the failure;
    perhaps between ranks that have links."""
    later = st.builds(lambda op: Step("later", (op,)), st.sampled_from((*POINTED, *JOINT)))
    sound, after = st.lists(operations(traits), max_size=MOST), st.lists(later, max_size=MOST)

    def made(
        size: int, first: list[Step], alone: Step, steps: list[Step], laters: list[Step]
    ) -> Program:
        return program([*first, alone, *lone(fit(steps, size)), *laters], size)

    return st.builds(made, few(traits), perhaps_warm(), lonely_steps(), sound, after)


def _play_lonely(bench: Bench, found: Program) -> Play:
    broken = yield from bench.communicator("broken")
    sound = yield from bench.communicator("sound")
    if WARM in found.steps:
        broken.warm([(rank, (rank + 1) % broken.size) for rank in range(broken.size)])
    (alone,) = (step for step in found.steps if step.op == "lonely")
    op, work = lonely(bench, broken, alone)
    transfers = []
    for number, step in enumerate(found.steps):
        if step.op not in ("warm", "lonely", "later"):
            transfers.append(issue(bench, sound, step, number))
            yield NEXT
    yield from _sound(bench, transfers)
    yield from _fails(bench, broken, op, work)
    for step in found.steps:
        if step.op == "later":
            _refused(bench, broken, str(step.args[0]))
            yield NEXT
    yield from _sound(bench, [issue(bench, sound, PROBE, len(found.steps))])


def _fails(bench: Bench, broken: Communicator, op: str, work: Work) -> Play:
    """The operation ends with an error, and the error says which operation, of what purpose."""
    error = yield from outcome(bench, work, f"{op}, which nobody answers")
    what = f"rank {bench.rank}: {op} that nobody answered"
    demand("P3", isinstance(error, CommunicatorFailed), f"{what} ended with {error!r}")
    named = op in str(error) and broken.purpose in str(error)
    demand("E1", named, f"{what} of {broken.purpose!r}: the error says only {str(error)!r}")


def _refused(bench: Bench, broken: Communicator, op: str) -> None:
    raised = attempt(lambda: call(bench, broken, op), CommunicatorFailed)
    demand("E2", raised, f"rank {bench.rank}: {op} was accepted by a communicator that had failed")


def _sound(bench: Bench, transfers: list[Transfer | None]) -> Play:
    """What another communicator does ends well."""
    for transfer in transfers:
        if transfer is not None:
            error = yield from outcome(bench, transfer.work, transfer.what)
            demand("X3", error is None, f"{transfer.what}, of another communicator: {error!r}")
            transfer.check("X3")


def _rebuilds(traits: Traits) -> str | None:
    return company(traits) or (None if traits.groups.rebuild else "rebuild")


def _rebuilt_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """`leave(rank)` for those that are not among the survivors, then traffic of the survivors."""
    leaving = st.lists(RANKS, max_size=2, unique=True)
    steps = st.lists(operations(traits), min_size=1, max_size=MOST)
    whole = st.lists(_as_stale(), max_size=MOST)

    def made(size: int, gone: list[int], drawn: list[Step], like: list[Step]) -> Program:
        leave = sorted({rank % size for rank in gone})[: size - 1]
        sized = fit([*like, *drawn], size - len(leave))
        return program([*(Step("leave", (rank,)) for rank in leave), *lone(sized)], size)

    return st.builds(made, few(traits), leaving, steps, whole)


def _as_stale() -> st.SearchStrategy[Step]:
    """Messages that one from before the failure could be taken for."""
    return st.builds(lambda source, hop: Step("message", (source, hop, NBYTES)), RANKS, RANKS)


def _play_rebuilt(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    left = {int(step.args[0]) for step in found.steps if step.op == "leave"}
    stale = call(bench, group, "isend")
    yield from outcome(bench, stale, "a message that nobody receives")
    if bench.rank in left:
        return
    survivors = [rank for rank in range(bench.size) if rank not in left]
    group.rebuild(survivors)
    place = (group.rank, group.size)
    due = (survivors.index(bench.rank), len(survivors))
    demand("E9", place == due, f"rank {bench.rank} is rank {place[0]} of {place[1]}, not {due}")
    transfers = []
    for number, step in enumerate(found.steps):
        yield NEXT
        if step.op != "leave":
            transfers.append(issue(bench, group, step, number))
    yield from land(bench, transfers, "E9")


PROPERTIES = (
    Property(
        name="what-nobody-answers-fails-its-communicator-by-name-and-no-other",
        clauses=("X3", "P3", "E1", "E2", "C8"),
        family=FAMILY,
        claim="Every rank's wait ends with an error that names operation and purpose.",
        programs=_lonely_programs,
        play=_play_lonely,
        needs=company,
        ranks=Ranks.GROUP,
        pace=Pace.BRISK,
    ),
    Property(
        name="a-rebuilt-communicator-carries-only-what-came-after",
        clauses=("E9",),
        family=FAMILY,
        claim="After a failure the survivors rebuild, and no older message ever arrives.",
        programs=_rebuilt_programs,
        play=_play_rebuilt,
        needs=_rebuilds,
        ranks=Ranks.GROUP,
        pace=Pace.BRISK,
    ),
    *GIVING_UP,
    *FAILED_WAITS,
    *ENDS,
)
