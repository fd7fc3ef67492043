"""Strategies that several families draw from."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from equipoise.hal.conformance.collectives import SUMS, name_of
from equipoise.hal.conformance.program import Step
from equipoise.hal.conformance.property import Traits

COMMON_SIZES = (2, 4)


def few(traits: Traits) -> st.SearchStrategy[int]:
    """Group sizes without peculiarities; group sizes as such have a property of their own (S5)."""
    common = [size for size in traits.sizes if size in COMMON_SIZES]
    return st.sampled_from(common or [max(traits.sizes)])


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
