import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.placement import Shape, check, contiguous, digest
from equipoise.hal.errors import PlacementError


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    ranks = draw(st.integers(1, 6))
    per_rank = draw(st.integers(1, 6))
    slots = ranks * per_rank
    return Shape(draw(st.integers(1, 4)), draw(st.integers(1, slots)), slots, ranks)


@given(shapes())
def test_the_start_layout_gives_every_expert_a_slot(shape: Shape) -> None:
    start = contiguous(shape)
    check(start, shape)
    assert all(set(row) == set(range(shape.experts)) for row in start.tolist())


def test_without_spare_slots_the_start_layout_is_contiguous() -> None:
    row = contiguous(Shape(1, 8, 8, 4))[0]
    assert row.tolist() == list(range(8))


def test_spare_slots_repeat_the_experts_that_come_next() -> None:
    row = contiguous(Shape(1, 4, 6, 2))[0]
    assert row.tolist() == [0, 1, 2, 2, 3, 0]


@pytest.mark.parametrize(
    ("layers", "experts", "slots", "ranks", "says"),
    [
        (1, 8, 7, 1, "cannot hold"),
        (1, 4, 6, 4, "do not divide"),
        (0, 4, 4, 1, "positive"),
    ],
)
def test_numbers_that_cannot_fit_are_refused(
    layers: int, experts: int, slots: int, ranks: int, says: str
) -> None:
    with pytest.raises(PlacementError, match=says):
        Shape(layers, experts, slots, ranks)


def test_a_homeless_expert_is_named_with_its_layer() -> None:
    shape = Shape(2, 3, 4, 2)
    placement = contiguous(shape)
    placement[1] = [0, 1, 1, 0]
    with pytest.raises(PlacementError, match=r"layer 1 has no slot for expert\(s\) \[2\]"):
        check(placement, shape)


def test_an_unknown_expert_is_refused() -> None:
    shape = Shape(1, 2, 2, 1)
    with pytest.raises(PlacementError, match="outside"):
        check(np.array([[0, 2]], dtype=np.int32), shape)


def test_a_digest_sees_placement_and_shares() -> None:
    placement = np.array([[0, 1, 1, 0]], dtype=np.int32)
    shares = np.array([[65536, 32768, 32768, 0]], dtype=np.int32)
    other = np.array([[32768, 32768, 32768, 32768]], dtype=np.int32)
    digests = {digest(placement, shares), digest(placement, other), digest(shares, placement)}
    assert len(digests) == 3
    assert digest(placement.copy(), shares.copy()) == digest(placement, shares)
