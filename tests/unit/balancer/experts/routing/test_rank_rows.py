"""Rows by rank from counts alone, against the references that route every row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    BatchCounts,
    ExpertShape,
    Layout,
    even_shares,
)
from equipoise.balancer.experts.routing.drawn_rows import drawn_rank_rows
from equipoise.balancer.experts.routing.rank_rows import even_rank_rows, levelled_rank_rows
from equipoise.hal.levelled_routing import GroupCounts, route_levelled
from equipoise.hal.routing import RoutingTable, build_table, route_hashed

UNHURRIED = settings(deadline=None)
COUNT = st.one_of(st.integers(0, 9), st.integers(0, 90))


@st.composite
def cases(
    draw: st.DrawFn, batches: st.SearchStrategy[int]
) -> tuple[BatchCounts, Layout, ExpertShape]:
    """Counts of batches, a layout with any shares, and its shape."""
    ranks, per_rank, layers = draw(st.tuples(*[st.integers(1, 4)] * 2, st.integers(1, 2)))
    slots = ranks * per_rank
    experts = draw(st.integers(1, min(slots, 6)))
    placement = np.empty((layers, slots), dtype=np.int32)
    weights = np.empty((layers, slots), dtype=np.int64)
    for layer in range(layers):
        extra = st.lists(
            st.integers(0, experts - 1), min_size=slots - experts, max_size=slots - experts
        )
        placement[layer] = draw(st.permutations([*range(experts), *draw(extra)]))
        weights[layer] = draw(st.lists(st.integers(0, 5), min_size=slots, max_size=slots))
    shape = ExpertShape(layers, experts, slots, ranks)
    counts = [
        draw(st.lists(COUNT, min_size=layers * experts, max_size=layers * experts))
        for _ in range(draw(batches))
    ]
    array = np.array(counts, dtype=np.int32).reshape(-1, layers, experts)
    return array, Layout(placement, shares_of(placement, weights, experts)), shape


def shares_of(placement: np.ndarray, weights: np.ndarray, experts: int) -> np.ndarray:
    """Shares in proportion to weights, of which some are 0; the rest to an expert's first slot."""
    shares = even_shares(placement, experts)
    for layer, expert in np.ndindex(len(placement), experts):
        slots = np.flatnonzero(placement[layer] == expert)
        total = weights[layer, slots].sum()
        if total:
            shares[layer, slots] = weights[layer, slots] * SHARE_ONE // total
            shares[layer, slots[0]] += SHARE_ONE - shares[layer, slots].sum()
    return shares


def table(layout: Layout, layer: int, experts: int) -> RoutingTable:
    placement, shares = layout.placement[layer], layout.shares[layer]
    return build_table(torch.from_numpy(placement), torch.from_numpy(shares), experts)


def ids_of(counts: np.ndarray) -> torch.Tensor:
    """Each expert as often as counted, in no order."""
    ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return torch.from_numpy(np.random.default_rng(0).permutation(ids))


def by_rank(slots: torch.Tensor, shape: ExpertShape) -> list[int]:
    return torch.bincount(slots // shape.slots_per_rank, minlength=shape.ranks).tolist()


@UNHURRIED
@given(cases(st.integers(1, 3)))
def test_levelled_rank_rows_are_those_of_batches_by_themselves(
    case: tuple[BatchCounts, Layout, ExpertShape],
) -> None:
    counts, layout, shape = case
    expected = np.zeros((shape.layers, shape.ranks), dtype=np.int64)
    for place, layer in np.ndindex(counts.shape[:2]):
        parts = table(layout, layer, shape.experts), shape.ranks, place, layer
        expected[layer] += by_rank(route_levelled(ids_of(counts[place, layer]), *parts)[0], shape)
    assert levelled_rank_rows(counts, layout, shape).tolist() == expected.tolist()


@UNHURRIED
@given(cases(st.sampled_from((2, 4))), st.sampled_from((1, 2)))
def test_levelled_rank_rows_of_groups_are_those_of_their_batches_as_one(
    case: tuple[BatchCounts, Layout, ExpertShape], groups: int
) -> None:
    counts, layout, shape = case
    size = len(counts) // groups
    expected = np.zeros((shape.layers, shape.ranks), dtype=np.int64)
    for place, layer in np.ndindex(counts.shape[:2]):
        number = place // size
        total, before = (
            torch.from_numpy(counts[number * size : end, layer].sum(axis=0, dtype=np.int32))
            for end in ((number + 1) * size, place)
        )
        parts = table(layout, layer, shape.experts), shape.ranks, number, layer
        group = GroupCounts(total, before)
        slots, _ = route_levelled(ids_of(counts[place, layer]), *parts, group)
        expected[layer] += by_rank(slots, shape)
    assert levelled_rank_rows(counts, layout, shape, groups).tolist() == expected.tolist()


@UNHURRIED
@given(cases(st.integers(1, 3)), st.integers(0, 9))
def test_drawn_and_even_rank_rows_keep_rows_with_their_experts(
    case: tuple[BatchCounts, Layout, ExpertShape], step: int
) -> None:
    counts, layout, shape = case
    drawn = drawn_rank_rows(counts, layout, shape, step)
    assert drawn.tolist() == drawn_rank_rows(counts, layout, shape, step).tolist()
    for rank_rows in (drawn, even_rank_rows(counts, layout, shape)):
        assert rank_rows.sum(axis=1).tolist() == counts.sum(axis=(0, 2)).tolist()
        for layer, rank in np.ndindex(rank_rows.shape):
            homes = layout.placement[layer].reshape(shape.ranks, -1)
            here, elsewhere = set(homes[rank]), set(np.delete(homes, rank, axis=0).ravel())
            total = counts[:, layer].sum(axis=0)
            assert sum(total[list(here - elsewhere)]) <= rank_rows[layer, rank]
            assert rank_rows[layer, rank] <= sum(total[list(here)])


def test_even_rank_rows_differ_by_one_row_at_most() -> None:
    placement = np.array([[0, 1, 0, 0]], dtype=np.int32)
    layout, shape = Layout(placement, even_shares(placement, 2)), ExpertShape(1, 2, 4, 4)
    counts = np.array([[[5, 7]], [[6, 0]]], dtype=np.int32)
    assert even_rank_rows(counts, layout, shape).tolist() == [[4, 7, 4, 3]]


def test_drawn_rank_rows_are_as_uneven_as_hashed_routing() -> None:
    """In the mean and in the spread: the expectation alone would be level here."""
    placement = np.array([[0, 1, 0, 1, 0, 1, 0, 1]], dtype=np.int32)
    layout, shape = Layout(placement, even_shares(placement, 2)), ExpertShape(1, 2, 8, 4)
    counts = np.array([[[20, 12]]] * 4, dtype=np.int32)
    expected, drawn = [], []
    for step in range(300):
        slots = [
            route_hashed(ids_of(counts[rank, 0]), table(layout, 0, 2), rank, 0, step)[0]
            for rank in range(4)
        ]
        expected.append(max(by_rank(torch.cat(slots), shape)))
        drawn.append(int(drawn_rank_rows(counts, layout, shape, step).max()))
    assert np.mean(drawn) == pytest.approx(np.mean(expected), rel=0.02)
    assert np.std(drawn) == pytest.approx(np.std(expected), rel=0.15)
