"""Family *shapes*: every dtype, shape, address and group size that is declared or required."""

from hypothesis import strategies as st

from equipoise.hal.conformance.bench import Bench, Play, demand
from equipoise.hal.conformance.collectives import (
    MOVES,
    SUMS,
    Fenced,
    Plain,
    calls_of,
    dtype_of,
    expect,
    fly,
    text_of,
)
from equipoise.hal.conformance.large_collectives import SHAPES as SIZES
from equipoise.hal.conformance.layouts import LAYOUTS
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Ranks, Traits
from equipoise.hal.conformance.rejections import REJECTIONS
from equipoise.hal.conformance.strategies import by_size, calling, common
from equipoise.hal.conformance.subgroups import SUBGROUPS
from equipoise.hal.conformance.uneven import UNEVEN

FAMILY = "shapes"
MOST_CALLS = 4
OPS = (*MOVES, *SUMS)
OFFSETS = (1, 2, 4)


def _plain(traits: Traits) -> st.SearchStrategy[Program]:
    """Rows of 2 to 5 elements; other shapes have properties of their own."""
    rows = st.integers(2, 5).map(str)
    return by_size(common(traits), lambda size: _lists(calling(traits, rows, OPS, size), size))


def _shaped(traits: Traits) -> st.SearchStrategy[Program]:
    """Up to four dimensions, each of 0 to 3: also empty ones, and single bytes."""
    any_shape = st.lists(st.integers(0, 3), max_size=4).map(text_of)
    shapes = st.sampled_from(("1", "", "0")) | any_shape
    return by_size(common(traits), lambda size: _lists(calling(traits, shapes, OPS), size))


def _lists(calls: st.SearchStrategy[Step], size: int) -> st.SearchStrategy[Program]:
    drawn = st.lists(calls, min_size=1, max_size=MOST_CALLS)
    return drawn.map(lambda steps: program(steps, size))


def _misaligned(traits: Traits) -> st.SearchStrategy[Program]:
    """At every distance that is whole elements: no address of an element may be odd for it."""
    calls = st.lists(
        calling(traits, st.integers(2, 5).map(str), OPS), min_size=1, max_size=MOST_CALLS
    )

    def sized(size: int) -> st.SearchStrategy[Program]:
        return st.builds(
            lambda offset, steps: program(
                (s for s in steps if offset % dtype_of(s.args[0]).itemsize == 0),
                size,
                {"offset": offset},
            ),
            st.sampled_from(OFFSETS),
            calls,
        )

    return by_size(common(traits), sized)


def _play_plain(bench: Bench, found: Program) -> Play:
    """All of them in flight at once."""
    group = yield from bench.communicator()
    flights = yield from fly(bench, group, calls_of(found), Plain(bench))
    expect("X4", group, flights)


def _play_shaped(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    for call in calls_of(found):
        expect("S1", group, (yield from fly(bench, group, [call], Plain(bench))))


def _play_misaligned(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    for call in calls_of(found):
        buffers = Fenced(bench, found.number("offset"))
        expect("S4", group, (yield from fly(bench, group, [call], buffers)))
        what = f"rank {bench.rank}: {call} changed bytes beside its buffers"
        demand("A4", buffers.intact(), what)


PROPERTIES = (
    Property(
        name="every-collective-equals-its-definition",
        family=FAMILY,
        clauses=("X4",),
        claim="Every collective gives what its definition says, on every declared dtype.",
        programs=_plain,
        play=_play_plain,
        ranks=Ranks.GROUP,
    ),
    Property(
        name="every-shape-travels",
        family=FAMILY,
        clauses=("S1",),
        claim="Every dtype travels at zero to four dimensions, empty, and as a single byte.",
        programs=_shaped,
        play=_play_shaped,
        ranks=Ranks.GROUP,
    ),
    Property(
        name="misaligned-buffers-arrive-and-their-neighbours-stay",
        family=FAMILY,
        clauses=("S4", "A4"),
        claim="Addresses 1, 2 and 4 bytes off work, and nothing beside a buffer is written.",
        programs=_misaligned,
        play=_play_misaligned,
        ranks=Ranks.GROUP,
    ),
    *SIZES,
    *LAYOUTS,
    *UNEVEN,
    *SUBGROUPS,
    *REJECTIONS,
)
