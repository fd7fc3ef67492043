"""Placements and batches of any shape, for the models of engines' balancers."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from equipoise.balancer.experts.placement import ExpertShape, Load, Placement
from equipoise.report.replay.engine_model import Ids, WindowLoad


class ReplayCase(NamedTuple):
    """A load, a placement of the same shape that does not come from it, and a batch.

    Attributes:
        shape: numbers.
        load: (layers, experts), with ties and zeros.
        placement: every expert is in it.
        ids: (tokens, top_k), some -1.
        sources: (tokens,), ascending.
    """

    shape: ExpertShape
    load: Load
    placement: Placement
    ids: Ids
    sources: Ids


@st.composite
def replay_cases(draw: st.DrawFn) -> ReplayCase:
    """Any case of few experts."""
    ranks, layers = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    experts = draw(st.integers(1, 24))
    slots = ranks * (-(-experts // ranks) + draw(st.integers(0, 3)))
    shape = ExpertShape(layers, experts, slots, ranks)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    load = rng.integers(0, draw(st.sampled_from([1, 4, 1000])), (layers, experts))
    tokens = draw(st.integers(0, 40))
    ids = rng.integers(-1, experts, (tokens, draw(st.integers(1, 3)))).astype(np.int32)
    sources = np.sort(rng.integers(0, ranks, tokens)).astype(np.int32)
    return ReplayCase(shape, load, drawn_placement(shape, rng), ids, sources)


def drawn_placement(shape: ExpertShape, rng: np.random.Generator) -> Placement:
    """Every expert, and others in the slots that are left, in any order."""
    extra = rng.integers(0, shape.experts, (shape.layers, shape.slots - shape.experts))
    every = np.tile(np.arange(shape.experts), (shape.layers, 1))
    return rng.permuted(np.concatenate([every, extra], axis=1), axis=1).astype(np.int32)


def window(load: Load, shape: ExpertShape) -> WindowLoad:
    """A window of that load; rows of slots are not read by the planners that take it."""
    return WindowLoad(load, np.zeros((shape.layers, shape.slots), dtype=np.int64), 1)


def part_of_expert(
    values: npt.NDArray[np.floating], placement: Placement, shape: ExpertShape
) -> npt.NDArray[np.float64]:
    """(layers, experts): sum over the slots of each expert."""
    sums = np.zeros((shape.layers, shape.experts))
    np.add.at(sums, (np.arange(shape.layers)[:, None], placement), values)
    return sums


def one_row_each(shape: ExpertShape, copies: int = 1) -> tuple[Ids, Ids]:
    """Every rank sends so many rows of every expert, as ids (tokens, 1) and sources (tokens,)."""
    ids = np.tile(np.repeat(np.arange(shape.experts), copies), shape.ranks)
    sources = np.repeat(np.arange(shape.ranks), shape.experts * copies)
    return ids[:, None].astype(np.int32), sources.astype(np.int32)
