"""Proposals with slots that are filled at once: over many layers, half written ones among them."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.choices import Split
from equipoise.balancer.experts.config import Aims
from equipoise.balancer.experts.drafting import Limits, Room, draft
from equipoise.balancer.experts.layout import Layout, Retired, even_shares
from equipoise.balancer.experts.placement import Load, Shape
from equipoise.balancer.experts.planner import Freight, Shipped, by_ship
from equipoise.balancer.experts.shipment import DIRECT, Leg

pytestmark = pytest.mark.slow

Place = tuple[int, int]
"""Layer and slot."""


@dataclass(frozen=True)
class Case:
    """What is planned, and what comes of it.

    Attributes:
        installed: with slots that an abort has left retired.
        shape: how many of everything.
        room: of a rank.
        proposal: by rank 0.
    """

    installed: Layout
    shape: Shape
    room: Room
    proposal: Shipped

    @property
    def gone(self) -> Retired:
        """Slots that hold nothing while they are filled."""
        return self.installed.retired | self.proposal.draft.retired

    def fills(self, rank: int, lot: int) -> dict[Place, int]:
        """The buffer by which each slot of a rank is filled in a lot."""
        leg, per = self.proposal.shipment.leg(rank, lot), self.shape.slots_per_rank
        pairs = [*zip(leg.local.staging, leg.local.slots, strict=True)]
        for part in leg.rounds:
            if part.receive is not None:
                pairs += zip(part.receive.staging, part.receive.slots, strict=True)
        return {(slot // per, rank * per + slot % per): buffer for buffer, slot in pairs}

    def buffers(self, rank: int, lot: int) -> list[int]:
        """That a rank fills in a lot, to be committed."""
        return [buffer for buffer, _ in self.proposal.shipment.leg(rank, lot).copies]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Shape, Layout]:
    ranks, per = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    slots = ranks * per
    shape = Shape(draw(st.integers(1, 5)), draw(st.integers(1, slots)), slots, ranks)
    extra = st.lists(
        st.integers(0, shape.experts - 1), min_size=slots - shape.experts, max_size=slots
    )
    rows = [
        draw(st.permutations([*range(shape.experts), *draw(extra)][:slots]))
        for _ in range(shape.layers)
    ]
    placement, retired = np.array(rows, dtype=np.int32), set()
    for layer, expert in np.ndindex(shape.layers, shape.experts):
        run = np.flatnonzero(placement[layer] == expert).tolist()
        gone = draw(st.lists(st.sampled_from(run), max_size=len(run) - 1, unique=True))
        retired |= {(layer, slot) for slot in gone}
    return shape, Layout(placement, even_shares(placement, shape.experts), frozenset(retired))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape, installed = draw(layouts())
    room = Room.of(draw(st.integers(1, shape.slots_per_rank + 2)), shape)
    counts = st.lists(
        st.sampled_from([1, 100, 1000]), min_size=shape.experts, max_size=shape.experts
    )
    load: Load = np.array([[draw(counts) for _ in range(shape.layers)]], dtype=np.int64)
    limits = Limits(hysteresis=0, room=room, aims=Aims(), nodes=1, split=Split.LEVEL)
    freight = Freight(parcel=draw(st.integers(1, 3)), nodes=1, staging=room.lots, rank=0)
    drafted = draft(load, installed, shape, limits)
    return Case(installed, shape, room, by_ship(drafted, installed, shape, freight))


def lots_and_ranks(case: Case) -> list[tuple[int, int]]:
    return [*np.ndindex(case.proposal.shipment.lots, case.shape.ranks)]


@given(cases())
def test_proposal_fills_each_changed_or_retired_slot_once(case: Case) -> None:
    held = replace(case.installed, retired=case.gone).held
    filled = [place for lot, rank in lots_and_ranks(case) for place in case.fills(rank, lot)]
    due = np.argwhere(held != case.proposal.layout.placement).tolist()
    assert sorted(filled) == sorted(map(tuple, due))
    assert case.installed.retired <= {*filled}
    assert case.proposal.layout.retired == frozenset()


@given(cases())
def test_proposal_stages_every_slot_except_retired_ones(case: Case) -> None:
    shipment = case.proposal.shipment
    for lot, rank in lots_and_ranks(case):
        fills, buffers = case.fills(rank, lot), case.buffers(rank, lot)
        assert {place for place, buffer in fills.items() if buffer == DIRECT} == {
            place for place in fills if place in case.gone
        }
        assert sorted(buffers) == sorted({b for b in fills.values() if b != DIRECT})
        assert all(0 <= buffer < case.room.lots for buffer in buffers)
        assert shipment.needs[lot, rank] == len(buffers)


@given(cases())
def test_adjacent_lots_in_flight_share_no_buffer(case: Case) -> None:
    shipment = case.proposal.shipment
    for one, other in pairwise(range(shipment.lots)):
        if shipment.fits_beside(one, other):
            for rank in range(case.shape.ranks):
                assert not {*case.buffers(rank, one)} & {*case.buffers(rank, other)}


@given(cases())
def test_proposal_never_reads_a_retired_slot(case: Case) -> None:
    held, moves = replace(case.installed, retired=case.gone).held, case.proposal.shipment.moves
    assert held[moves.layer, moves.source].tolist() == moves.expert.tolist()


@given(cases())
def test_shipment_counts_staged_and_direct_copies(case: Case) -> None:
    shipment, travelled = case.proposal.shipment, [0]
    for lot in range(shipment.lots):
        legs = [shipment.leg(rank, lot) for rank in range(case.shape.ranks)]
        travelled.append(travelled[-1] + sum(map(received, legs)))
    assert [shipment.travelled(lots) for lots in range(shipment.lots + 1)] == travelled
    assert shipment.travelling == travelled[-1]
    for rank in range(case.shape.ranks):
        filled = sum(len(case.fills(rank, lot)) for lot in range(shipment.lots))
        assert shipment.arriving(rank) == filled


def received(leg: Leg) -> int:
    """Slots that come to a rank from others."""
    return sum(len(part.receive.slots) for part in leg.rounds if part.receive is not None)


@given(cases())
def test_retirements_come_with_the_lot_that_fills_them(
    case: Case,
) -> None:
    proposal = case.proposal
    for lot, retirement in enumerate(proposal.retirements):
        layers = proposal.shipment.layers(lot)
        new = {place for place in proposal.draft.retired if place[0] in layers}
        assert (retirement is None) == (not new)
        if retirement is not None:
            assert retirement.retired == {p for p in case.gone if p[0] in retirement.layers}


@given(cases())
def test_proposal_includes_every_half_written_layer(case: Case) -> None:
    order = case.proposal.draft.order
    assert {layer for layer, _ in case.installed.retired} <= {*order}
    assert len(set(order)) == len(order)
