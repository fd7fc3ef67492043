"""Part of family *control*: the store goes away while every rank is still there."""

from collections.abc import Callable

from hypothesis import strategies as st

from equipoise.hal.conformance.ballots import plane
from equipoise.hal.conformance.bench import NEXT, Bench, End, Play, attempt, demand
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Pace, Property, Ranks, Traits
from equipoise.hal.conformance.strategies import by_size, common
from equipoise.hal.errors import ControlError, ControlLost

QUESTIONS: dict[str, Callable[[Bench, str], object]] = {
    "cast": lambda bench, question: plane(bench).cast(question, b"a"),
    "look": lambda bench, question: plane(bench).collect(question, 0.0),
    "wait": lambda bench, question: plane(bench).collect(question, bench.patience),
    "decide": lambda bench, question: plane(bench).decide(question, b"a"),
    "forget": lambda bench, question: plane(bench).forget(question),
}
"""What nobody can be told any more."""
OTHERS = ("lost", "leave")
"""What ends all the same: one has nothing to tell, the other nobody."""
MOST_STEPS = 6


def _programs(traits: Traits) -> st.SearchStrategy[Program]:
    def sized(size: int) -> st.SearchStrategy[Program]:
        rank, how = st.integers(0, size - 1), st.sampled_from([end.value for end in End])
        one = st.builds(lambda r, op: Step(op, (), r), rank, st.sampled_from([*QUESTIONS, *OTHERS]))
        drawn = st.lists(one, min_size=1, max_size=MOST_STEPS)
        return st.builds(lambda steps, end: program(steps, size, {"store": end}), drawn, how)

    return by_size(common(traits), sized)


def _play(bench: Bench, found: Program) -> Play:
    """Every rank takes the store away, so that none has to be told that another one did."""
    bench.surroundings.lose_store(End(str(found.setting("store"))))
    for number, step in enumerate(found.of(bench.rank)):
        yield NEXT
        if step.op == "lost":
            _nobody_is_accused(bench)
        elif step.op == "leave":
            plane(bench).leave("without a store")
        else:
            _refused(bench, step.op, f"question {number}")


def _refused(bench: Bench, op: str, question: str) -> None:
    told: list[object] = []
    error = attempt(lambda: told.append(QUESTIONS[op](bench, question)), ControlError)
    outcome = repr(error) if error is not None else f"{told}"
    what = f"rank {bench.rank}: {op} without a store ended with {outcome}, not with ControlLost"
    demand("C6", isinstance(error, ControlLost), what)


def _nobody_is_accused(bench: Bench) -> None:
    found = []
    attempt(lambda: found.append(plane(bench).lost(0.0)), ControlLost)
    demand("C5", found in ([], [None]), f"rank {bench.rank} is told {found}; the store is lost")


LOST_STORE = Property(
    name="a-lost-store-is-said-to-be",
    family="control",
    clauses=("C6", "C5", "R1"),
    claim="Once the store is gone or silent every question ends with ControlLost, in time.",
    programs=_programs,
    play=_play,
    where=lambda traits: traits.expendable,
    ranks=Ranks.GROUP,
    pace=Pace.BRISK,
    loses=lambda _: frozenset(),
    takes_store=True,
)
