"""Strategies that several families draw from."""

from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st

from equipoise.hal.conformance.collectives import SUMS, name_of
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Traits

COMMON_SIZES = (2, 4)
SCHEDULE = 48
"""Choices that are drawn at most; whatever comes after them is eager."""
STEERED = 4 * SCHEDULE
"""The same for a device whose every small step is a choice."""


def a_step(
    op: str, *args: st.SearchStrategy[int] | st.SearchStrategy[str]
) -> st.SearchStrategy[Step]:
    """A step with these arguments, on every rank."""
    return st.tuples(*args).map(lambda given: Step(op, given))


def programs_of(*kinds: st.SearchStrategy[Step], most: int) -> st.SearchStrategy[Program]:
    """Programs of one rank, of any steps of these kinds in any order."""
    return st.lists(st.one_of(kinds), min_size=1, max_size=most).map(program)


def schedules(most: int = SCHEDULE) -> st.SearchStrategy[bytes]:
    """Who moves next: long ones as often as short ones, which are five bytes on average."""
    short = st.binary(max_size=most)
    long = st.binary(min_size=most // 3, max_size=most)
    return st.one_of(short, long).map(lambda choices: choices.rstrip(b"\0"))


def common(traits: Traits) -> list[int]:
    """Group sizes without peculiarities; group sizes as such have a property of their own (S5)."""
    return [size for size in traits.sizes if size in COMMON_SIZES] or [max(traits.sizes)]


def few(traits: Traits) -> st.SearchStrategy[int]:
    """One of the `common` group sizes."""
    return st.sampled_from(common(traits))


def by_size(
    sizes: Sequence[int], programs: Callable[[int], st.SearchStrategy[Program]]
) -> st.SearchStrategy[Program]:
    """Programs for one of these group sizes.

    Made once a size: `flatmap` would make, and validate, every strategy again in every case, which
    costs several times what playing the case does.
    """
    return st.one_of([programs(size) for size in sizes])


def movable(traits: Traits) -> list[torch.dtype]:
    """Declared dtypes, the simplest first."""
    return sorted(traits.groups.dtypes, key=lambda dtype: (dtype != torch.uint8, str(dtype)))


def summable(traits: Traits) -> list[torch.dtype]:
    """Dtypes whose sum is declared and means something."""
    reductions = traits.groups.reductions & traits.groups.dtypes - {torch.bool}
    return sorted(reductions, key=lambda dtype: (dtype != torch.int32, str(dtype)))


def call(
    op: str, dtypes: Sequence[torch.dtype], shapes: st.SearchStrategy[str], sources: int = 1
) -> st.SearchStrategy[Step]:
    """One collective of this kind, of units of these dtypes and shapes.

    A broadcast comes from one of the first `sources` ranks.
    """
    source = st.integers(0, sources - 1) if op == "broadcast" else st.just(0)
    names = st.sampled_from([name_of(dtype) for dtype in dtypes])
    return st.builds(lambda *args: Step(op, args), names, shapes, source)


def calling(
    traits: Traits, shapes: st.SearchStrategy[str], ops: Sequence[str], sources: int = 1
) -> st.SearchStrategy[Step]:
    """One collective of these kinds, of any dtype that it is declared for."""
    moved, summed = movable(traits), summable(traits)
    return st.one_of([call(op, summed if op in SUMS else moved, shapes, sources) for op in ops])
