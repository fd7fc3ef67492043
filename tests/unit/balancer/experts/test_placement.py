import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.placement import (
    ExpertShape,
    check_placement,
    initial_placement,
    placement_digest,
)
from equipoise.hal.errors import PlacementError


@st.composite
def shapes(draw: st.DrawFn) -> ExpertShape:
    ranks = draw(st.integers(1, 6))
    per_rank = draw(st.integers(1, 6))
    slots = ranks * per_rank
    return ExpertShape(draw(st.integers(1, 4)), draw(st.integers(1, slots)), slots, ranks)


@given(shapes())
def test_contiguous_placement_gives_every_expert_a_slot(shape: ExpertShape) -> None:
    start = initial_placement(shape)
    check_placement(start, shape)
    assert all(set(row) == set(range(shape.experts)) for row in start.tolist())


def test_contiguous_placement_without_spare_slots_is_in_order() -> None:
    row = initial_placement(ExpertShape(1, 8, 8, 4))[0]
    assert row.tolist() == list(range(8))


def test_contiguous_placement_fills_spare_slots_with_next_experts() -> None:
    row = initial_placement(ExpertShape(1, 4, 6, 2))[0]
    assert row.tolist() == [0, 1, 2, 2, 3, 0]


@pytest.mark.parametrize(
    ("layers", "experts", "slots", "ranks", "message"),
    [
        (1, 8, 7, 1, "cannot hold"),
        (1, 4, 6, 4, "do not divide"),
        (0, 4, 4, 1, "layers must be at least 1, got 0"),
        (1, 0, 4, 1, "experts must be at least 1, got 0"),
        (1, 4, -4, 1, "slots must be at least 1, got -4"),
        (1, 4, 4, 0, "ranks must be at least 1, got 0"),
        (1, 4, 2**31, 1, "slots must be at most 2147483647, got 2147483648"),
    ],
)
def test_shape_refuses_impossible_numbers(
    layers: int, experts: int, slots: int, ranks: int, message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        ExpertShape(layers, experts, slots, ranks)


def test_placement_check_names_missing_expert_and_layer() -> None:
    shape = ExpertShape(2, 3, 4, 2)
    placement = initial_placement(shape)
    placement[1] = [0, 1, 1, 0]
    with pytest.raises(PlacementError, match=r"layer 1 has no slot for expert\(s\) \[2\]"):
        check_placement(placement, shape)


def test_placement_check_refuses_unknown_expert() -> None:
    shape = ExpertShape(1, 2, 2, 1)
    with pytest.raises(PlacementError, match="outside"):
        check_placement(np.array([[0, 2]], dtype=np.int32), shape)


def test_placement_digest_depends_on_placement_and_shares() -> None:
    placement = np.array([[0, 1, 1, 0]], dtype=np.int32)
    shares = np.array([[65536, 32768, 32768, 0]], dtype=np.int32)
    other = np.array([[32768, 32768, 32768, 32768]], dtype=np.int32)
    digests = {
        placement_digest(placement, shares),
        placement_digest(placement, other),
        placement_digest(shares, placement),
    }
    assert len(digests) == 3
    assert placement_digest(placement.copy(), shares.copy()) == placement_digest(placement, shares)
