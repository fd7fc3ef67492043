"""Part of family *control*: what somebody forgets is gone, and nothing else is."""

from functools import partial

from hypothesis import strategies as st

from equipoise.hal.conformance.ballots import gather, meet, plane
from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Ranks, Traits
from equipoise.hal.conformance.strategies import by_size, common
from equipoise.hal.errors import BallotIncomplete, EquipoiseError

CLAUSE = "C9"
NAMES = ("q", "q/0", "q/0/1")
"""Each goes on where the one before ends, as keys are put together in a store."""
MOST_STEPS = 6
FIRST, ANEW = b"first", b"anew"


def _programs(traits: Traits) -> st.SearchStrategy[Program]:
    """Who forgets what: several ranks may, and over and over."""

    def sized(size: int) -> st.SearchStrategy[Program]:
        rank, name = st.integers(0, size - 1), st.sampled_from(NAMES)
        forget = st.builds(lambda r, q: Step("forget", (q,), r), rank, name)
        drawn = st.lists(forget, min_size=1, max_size=MOST_STEPS)
        return drawn.map(lambda steps: program(steps, size))

    return by_size(common(traits), sized)


def _play(bench: Bench, found: Program) -> Play:
    """All say something, some forget, all look; then what is gone is asked once more."""
    control, prefix = plane(bench), (yield from bench.communicator()).purpose
    gone = {str(step.args[0]) for step in found.steps}
    for name in NAMES:
        control.cast(f"{prefix}/{name}", FIRST)
        control.decide(f"{prefix}/{name}", FIRST)
    yield from meet(bench, f"{prefix}: all have said")
    for step in found.of(bench.rank):
        _forget(bench, f"{prefix}/{step.args[0]}")
        yield NEXT
    yield from meet(bench, f"{prefix}: all have forgotten")
    for name in NAMES:
        _look(bench, f"{prefix}/{name}", name in gone)
    yield from meet(bench, f"{prefix}: all have looked")
    yield from _ask_anew(bench, prefix, gone)


def _forget(bench: Bench, question: str) -> None:
    error = attempt(lambda: plane(bench).forget(question), EquipoiseError, KeyError)
    demand(CLAUSE, error is None, f"rank {bench.rank} cannot forget {question}: {error!r}")


def _look(bench: Bench, question: str, gone: bool) -> None:
    """No ballot is there, or every one is."""
    who = f"rank {bench.rank}, {question}, {'forgotten' if gone else 'not forgotten'}"
    everybody = set(range(bench.size))
    try:
        ballots = plane(bench).collect(question, 0.0)
    except BallotIncomplete as error:
        missing = set(error.missing)
        demand(CLAUSE, missing == (everybody if gone else set()), f"{who}: {missing} are missing")
        return
    demand(CLAUSE, not gone and set(ballots) == {FIRST}, f"{who}: reads {ballots}")


def _ask_anew(bench: Bench, prefix: str, gone: set[str]) -> Play:
    """Of what is forgotten the name is free; what is not was settled before."""
    control = plane(bench)
    for name in NAMES:
        question, due = f"{prefix}/{name}", ANEW if name in gone else FIRST
        who = f"rank {bench.rank}, {question}"
        told = control.decide(question, ANEW)
        demand(CLAUSE, told == due, f"{who}: is told {told!r} where {due!r} was due")
        error = attempt(partial(control.cast, question, due), EquipoiseError)
        demand(CLAUSE, error is None, f"{who}: cannot cast {due!r}: {error!r}")
        read = yield from gather(bench, question)
        demand(CLAUSE, set(read) == {due}, f"{who}: reads {read}, {due!r} was cast")


FORGETTING = Property(
    name="what-is-forgotten-was-never-asked",
    family="control",
    clauses=(CLAUSE,),
    claim="Whoever forgets a question, it is gone for all, its name is free, and others stay.",
    programs=_programs,
    play=_play,
    ranks=Ranks.GROUP,
)
