"""Lists of replicas keep the shares, whole and in every piece."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balancer.experts.layout import even_shares
from equipoise.balancer.experts.list_tables import STEPS, share_lists, share_maps
from equipoise.balancer.experts.logical_maps import ABSENT, logical_maps
from equipoise.balancer.experts.placement import SHARE_ONE, Placement, Shares
from equipoise.hal.errors import PlacementError
from equipoise.hal.routing_rules import KNUTH32

UNHURRIED = settings(deadline=None)
WIDTHS = st.sampled_from(sorted(STEPS))
LARGEST_MISS = {64: 2.5, 128: 3.0}
"""Entries by which a piece of a round may miss what a replica should take."""
Layers = tuple[Placement, Shares, int]


@st.composite
def layers(draw: st.DrawFn) -> Layers:
    """Any shares, also none at all, of up to nine replicas; a few layers; how many experts."""
    experts, spare = draw(st.integers(1, 4)), draw(st.integers(0, 8))
    extra = st.lists(st.integers(0, experts - 1), min_size=spare, max_size=spare)
    rows = [
        draw(st.permutations([*range(experts), *draw(extra)]))
        for _ in range(draw(st.integers(1, 2)))
    ]
    placement = np.array(rows, dtype=np.int32)
    shares = np.zeros_like(placement)
    for row, held in zip(shares, placement, strict=True):
        for expert in range(experts):
            slots = np.flatnonzero(held == expert)
            size = len(slots) - 1
            cuts = draw(st.lists(st.integers(0, SHARE_ONE), min_size=size, max_size=size))
            row[slots] = np.diff([0, *sorted(cuts), SHARE_ONE])
    return placement, shares, experts


@UNHURRIED
@given(layers(), WIDTHS)
def test_share_lists_are_within_one_entry_of_shares(made: Layers, width: int) -> None:
    placement, shares, experts = made
    lists = share_lists(placement, shares, experts, width)
    assert lists.shape == (len(placement), experts, width)
    for layer, held in enumerate(placement):
        for expert in range(experts):
            entries = np.bincount(lists[layer, expert], minlength=len(held))
            own = held == expert
            assert entries[~own].sum() == 0
            off = entries[own] * SHARE_ONE - shares[layer, own].astype(np.int64) * width
            assert (np.abs(off) < SHARE_ONE).all()


@UNHURRIED
@given(layers(), WIDTHS, st.integers(1, 128), st.integers(0, 127))
def test_share_lists_divide_evenly_under_any_stride(
    made: Layers, width: int, stride: int, first: int
) -> None:
    placement, shares, experts = made
    lists = share_lists(placement, shares, experts, width)
    visits = width // np.gcd(stride, width)
    seen = (first + stride * np.arange(visits)) % width
    for row in lists.reshape(-1, width):
        slots = placement.shape[1]
        whole, part = (np.bincount(row[at], minlength=slots) for at in (np.arange(width), seen))
        assert (np.abs(part * width - whole * visits) < width).all()


@pytest.mark.parametrize("width", sorted(STEPS))
def test_share_list_steps_have_smallest_error(width: int) -> None:
    """A list in which n entries of the line stand together is any replica's; n and place vary."""
    hashed = KNUTH32 % width
    worst = {
        step: max(largest_miss(width, step), largest_miss(width, step * hashed))
        for step in range(1, width, 2)
    }
    assert worst[STEPS[width]] == min(worst.values()) == LARGEST_MISS[width]


def largest_miss(width: int, stride: int) -> float:
    """Over all pieces of a round by `stride` on the line, and all runs of equal entries there."""
    places = np.arange(width)
    visited = np.zeros((width, 2 * width), dtype=np.int64)
    visited[places, places * stride % width] = 1
    visited[:, width:] = visited[:, :width]
    inside = np.pad(visited.cumsum(0).cumsum(1), ((0, 0), (1, 0)))
    due = (places[:, None] + 1) / width
    # Where the round begins makes no difference: another start turns the line.
    return max(
        float(np.abs(inside[:, n : n + width] - inside[:, :width] - n * due).max())
        for n in range(1, width)
    )


@UNHURRIED
@given(layers(), WIDTHS)
def test_share_maps_of_even_shares_equal_vllm_maps(made: Layers, width: int) -> None:
    placement, _, experts = made
    maps = share_maps(placement, even_shares(placement, experts), experts, width)
    due = logical_maps(placement, experts)
    assert maps.slots.tolist() == due.slots.tolist()
    assert maps.counts.tolist() == due.counts.tolist()


@UNHURRIED
@given(layers(), WIDTHS)
def test_share_maps_hold_each_replica_once_or_the_share_list(made: Layers, width: int) -> None:
    placement, shares, experts = made
    maps = share_maps(placement, shares, experts, width)
    lists = share_lists(placement, shares, experts, width)
    assert maps.slots.shape[2] == maps.counts.max()
    assert maps.slots.dtype == maps.counts.dtype == np.int64
    for layer, held in enumerate(placement):
        for expert in range(experts):
            slots, count = maps.slots[layer, expert], int(maps.counts[layer, expert])
            own = np.flatnonzero(held == expert)
            parts = shares[layer, own]
            assert (slots[count:] == ABSENT).all()
            even = parts.max() - parts.min() <= 1
            due = own if even else lists[layer, expert]
            assert slots[:count].tolist() == due.tolist()


def test_share_maps_keep_shares_under_vllm_row_hash() -> None:
    placement = np.zeros((1, 3), dtype=np.int32)
    shares = np.array([[6554, 19661, 39321]], dtype=np.int32)
    maps = share_maps(placement, shares, 1, 64)
    rows = torch.arange(6400)
    turns = ((rows * KNUTH32) & (2**32 - 1)) % int(maps.counts[0, 0])
    taken = np.bincount(maps.slots[0, 0][turns.numpy()], minlength=3)
    # 6.4, 19.2 and 38.4 entries: the largest remainder is that of the first.
    assert taken.tolist() == [700, 1900, 3800]


def test_share_maps_list_more_replicas_than_width_when_even() -> None:
    placement = np.zeros((2, 70), dtype=np.int32)
    shares = even_shares(placement, 1)
    shares[1] = 0
    shares[1, 3] = SHARE_ONE
    maps = share_maps(placement, shares, 1, 64)
    assert maps.counts.tolist() == [[70], [64]]
    assert maps.slots[0, 0].tolist() == list(range(70))
    assert maps.slots[1, 0].tolist() == [3] * 64 + [ABSENT] * 6


@pytest.mark.parametrize(
    ("placement", "shares", "width", "message"),
    [
        ([0, 1], [65536, 65536], 63, "a list has 64 or 128 entries, not 63"),
        ([0, 0], [1, 65535], 64, "a slot for every expert, got none for expert 1 of row 0"),
        ([0, 1], [65536, 65535], 64, "a sum of 65536 .* expert 1 of row 0"),
        ([0, 2], [65536, 65536], 64, "placement: expected 0 to 1, got 2"),
    ],
)
def test_share_lists_refuse_malformed_input(
    placement: list[int], shares: list[int], width: int, message: str
) -> None:
    held, parts = (np.array([row], dtype=np.int32) for row in (placement, shares))
    with pytest.raises(PlacementError, match=message):
        share_lists(held, parts, 2, width)
