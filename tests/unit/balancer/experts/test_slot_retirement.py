"""Slots retire so that a layer goes into the staging there is: no more than have to, and of no
expert the last that serves.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.change import change_of
from equipoise.balancer.experts.group import Group, group_of
from equipoise.balancer.experts.layout import Layout, even_shares
from equipoise.balancer.experts.placement import Placement, Shape
from equipoise.balancer.experts.renewal import renewed
from equipoise.balancer.experts.retirement import retiring
from equipoise.balancer.experts.shipment import DIRECT, ship

ROW = Shape(layers=1, experts=3, slots=6, ranks=2)


def alone(shape: Shape, survive: int = 0) -> Group:
    """On one node."""
    return group_of(shape, 1, survive, None)


@dataclass(frozen=True)
class Case:
    """A layer that is to change, with slots that have retired already."""

    shape: Shape
    layout: Layout
    proposed: Placement
    staging: int

    @property
    def group(self) -> Group:
        return alone(self.shape)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks, per = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    slots = ranks * per
    experts = draw(st.integers(1, slots))
    rows = []
    for _ in range(2):
        extra = draw(st.lists(st.integers(0, experts - 1), min_size=slots, max_size=slots))
        rows.append(draw(st.permutations([*range(experts), *extra][:slots])))
    placement, proposed = (np.array([row], dtype=np.int32) for row in rows)
    retired = []
    for expert in range(experts):
        run = np.flatnonzero(placement[0] == expert).tolist()
        retired += draw(st.lists(st.sampled_from(run), max_size=len(run) - 1, unique=True))
    layout = Layout(
        placement, even_shares(placement, experts), frozenset((0, slot) for slot in retired)
    )
    shape = Shape(1, experts, slots, ranks)
    return Case(shape, layout, proposed, draw(st.integers(0, per)))


def staged(case: Case, retired: frozenset[tuple[int, int]]) -> list[int]:
    """Copies of each rank that go into staging."""
    held = Layout(case.layout.placement, case.layout.shares, case.layout.retired | retired).held[0]
    waits = (held >= 0) & (held != case.proposed[0])
    return [int(count) for count in waits.reshape(case.shape.ranks, -1).sum(axis=1)]


@given(cases())
def test_retiring_frees_just_enough_staging(case: Case) -> None:
    found = retiring(case.layout, case.proposed, 0, case.group, case.staging)
    if found is None:
        return
    before, after = staged(case, frozenset()), staged(case, found)
    assert after == [min(need, case.staging) for need in before]
    assert not found & case.layout.retired


@given(cases())
def test_retiring_leaves_every_expert_a_readable_slot(case: Case) -> None:
    found = retiring(case.layout, case.proposed, 0, case.group, case.staging)
    if found is None:
        return
    layout = Layout(case.layout.placement, case.layout.shares, case.layout.retired | found)
    assert {*range(case.shape.experts)} <= {*layout.held[0].tolist()}
    change_of(layout, case.shape, [0])  # so there are tables for it


@given(cases())
def test_retiring_is_empty_when_staging_holds_the_layer(case: Case) -> None:
    most = max(staged(case, frozenset()))
    assert retiring(case.layout, case.proposed, 0, case.group, most) == frozenset()


@given(cases())
def test_shipment_fills_retired_slots_directly_and_never_reads_them(case: Case) -> None:
    found = retiring(case.layout, case.proposed, 0, case.group, case.staging)
    if found is None:
        return
    layout = Layout(case.layout.placement, case.layout.shares, case.layout.retired | found)
    shipment = ship(
        layout.held, case.proposed, [0], case.shape, staging=max(case.staging, 1), parcel=2
    )
    moves = shipment.moves
    gone = {slot for _, slot in layout.retired}
    direct = moves.staging == DIRECT
    assert {*moves.slot[direct].tolist()} == gone
    assert not gone & {*moves.source.tolist()}
    assert shipment.needs.max(initial=0) <= case.staging
    for rank in range(case.shape.ranks):
        for lot in range(shipment.lots):
            copies = shipment.leg(rank, lot).copies
            assert all(0 <= buffer < max(case.staging, 1) for buffer, _ in copies)


def test_retiring_prefers_most_copies_then_smallest_share() -> None:
    placement = np.array([[0, 0, 1, 2, 0, 1]], dtype=np.int32)
    shares = np.array([[9, 8, 5, 7, 3, 4]], dtype=np.int32)
    proposed = np.array([[1, 1, 0, 2, 0, 1]], dtype=np.int32)
    layout = Layout(placement, shares)
    assert retiring(layout, proposed, 0, alone(ROW), 3) == frozenset()
    assert retiring(layout, proposed, 0, alone(ROW), 2) == frozenset({(0, 1)})
    assert retiring(layout, proposed, 0, alone(ROW), 1) == frozenset({(0, 1), (0, 2)})
    assert retiring(layout, proposed, 0, alone(ROW), 0) == frozenset({(0, 0), (0, 1), (0, 2)})


def test_retiring_returns_none_for_swap_of_single_copies() -> None:
    placement, proposed = (np.array([row], dtype=np.int32) for row in ([0, 1, 2], [1, 0, 2]))
    layout = Layout(placement, even_shares(placement, 3))
    assert retiring(layout, proposed, 0, alone(Shape(1, 3, 3, 1)), 1) is None


def test_retiring_keeps_required_redundancy() -> None:
    shape = Shape(1, 3, 12, 3)
    placement = np.array([[0, 0, 1, 2, 0, 1, 1, 2, 2, 2, 0, 1]], dtype=np.int32)
    proposed = np.roll(placement, 1, axis=1)
    layout = Layout(placement, even_shares(placement, 3))
    for staging in range(4):
        for survive in (0, 1):
            found = retiring(layout, proposed, 0, alone(shape, survive), staging)
            if found is None:
                continue
            held = Layout(placement, layout.shares, found).held
            homes = [{*(np.flatnonzero(held[0] == expert) // 4).tolist()} for expert in range(3)]
            assert min(map(len, homes)) > survive
    twice = np.array([[0, 1, 1, 0]], dtype=np.int32)
    pair, swapped = Layout(twice, even_shares(twice, 2)), np.array([[1, 0, 1, 0]], dtype=np.int32)
    assert retiring(pair, swapped, 0, alone(Shape(1, 2, 4, 2)), 1) == frozenset({(0, 0)})
    assert retiring(pair, swapped, 0, alone(Shape(1, 2, 4, 2), 1), 1) is None


@pytest.mark.parametrize(("planned", "installed"), [({(0, 0)}, set()), (set(), {(0, 0)})])
def test_change_for_other_retired_slots_is_not_installed(
    planned: set[tuple[int, int]], installed: set[tuple[int, int]]
) -> None:
    placement = np.array([[0, 0, 1, 2, 1, 2]] * 2, dtype=np.int32)
    shape = Shape(2, 3, 6, 2)
    shares = even_shares(placement, 3)
    made = Layout(placement, shares, frozenset(planned))
    now = Layout(placement, shares, frozenset(installed))
    fitting = change_of(made, shape, [0, 1]).where_placed(now)
    assert fitting is not None
    assert fitting.layers == (1,)
    assert fitting.on(now).retired == now.retired


def test_renewed_shares_skip_half_written_layer() -> None:
    placement = np.array([[0, 0, 1, 2, 1, 2]] * 2, dtype=np.int32)
    shape, shares = Shape(2, 3, 6, 2), even_shares(placement, 3)
    half = Layout(placement, shares, frozenset({(0, 0)}))
    other = shares.copy()
    other[:, [0, 1]] = [20000, 45536]
    change = renewed(half, Layout(placement, other), shape)
    assert change is not None
    assert change.layers == (1,)
