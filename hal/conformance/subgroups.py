"""Part of family *shapes*: groups of any size, and groups among some of the ranks."""

from hypothesis import strategies as st

from equipoise.hal.communicator import Communicator
from equipoise.hal.conformance.bench import Bench, Play, demand
from equipoise.hal.conformance.collectives import Plain, calls_of, expect, fly, text_of
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Ranks, Traits
from equipoise.hal.conformance.strategies import by_size, calling

MOST_CALLS = 5
OPS = ("all_gather", "broadcast", "all_to_all", "shift", "all_reduce", "reduce_scatter")


def _programs(traits: Traits) -> st.SearchStrategy[Program]:
    """Calls, each among the members it names; the same members use one communicator."""

    def sized(size: int) -> st.SearchStrategy[Program]:
        call = st.tuples(calling(traits, st.just("3"), OPS), _members(size))
        drawn = st.lists(call.map(_step), min_size=1, max_size=MOST_CALLS)
        return drawn.map(lambda steps: program(filter(_possible, steps), size))

    return by_size(traits.sizes, sized)


def _members(size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Everybody, or some in any order."""
    some = st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True)
    return st.just(tuple(range(size))) | some.map(tuple)


def _step(drawn: tuple[Step, tuple[int, ...]]) -> Step:
    call, members = drawn
    return Step(call.op, (*call.args, text_of(members)))


def _possible(step: Step) -> bool:
    """A group of one has nobody to send to."""
    return step.op != "shift" or "x" in str(step.args[3])


def _play(bench: Bench, found: Program) -> Play:
    groups: dict[str, Communicator] = {}
    for call, step in zip(calls_of(found), found.steps, strict=True):
        names = str(step.args[3])
        members = [int(name) for name in names.split("x")]
        if bench.rank not in members:
            continue
        if names not in groups:
            groups[names] = yield from bench.communicator(f"among {names}", members)
        group = groups[names]
        place = (members.index(bench.rank), len(members))
        here = f"rank {bench.rank} among {members}"
        demand("S5", (group.rank, group.size) == place, f"{here} is {group.rank} of {group.size}")
        flights = yield from fly(bench, group, [call], Plain(bench))
        expect("S5", group, flights)


SUBGROUPS = (
    Property(
        name="groups-of-any-size-and-members-work",
        family="shapes",
        clauses=("S5",),
        claim="Collectives work in groups of every size, and among any of the ranks in any order.",
        programs=_programs,
        play=_play,
        ranks=Ranks.GROUP,
    ),
)
