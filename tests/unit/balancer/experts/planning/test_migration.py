"""Shipments: which slots move, from where, in which lots and rounds, and through which buffers."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from helpers.strategies.shipment_routes import (
    Change,
    by_lot,
    changes,
    fewest_sends,
    largest_degree,
    routes,
)
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.placement import ExpertShape, Placement
from equipoise.balancer.experts.planning.migration import (
    MigrationPlan,
    RankTransfers,
    Recv,
    Send,
    plan_migration,
)
from equipoise.hal.errors import PlacementError

pytestmark = pytest.mark.slow


def placement(*layers: tuple[int, ...]) -> Placement:
    return np.array(layers, dtype=np.int32)


def legs(shipment: MigrationPlan, lot: int) -> list[RankTransfers]:
    return [shipment.for_rank(rank, lot) for rank in range(shipment.shape.ranks)]


@given(changes())
def test_shipment_fills_exactly_the_changed_slots(change: Change) -> None:
    shipment = change.ship()
    moves = routes(shipment)
    near = {(m.layer, m.slot, m.expert) for m in moves if m.round < 0}
    far = {(m.layer, m.slot, m.expert) for m in moves if m.round >= 0}
    assert (near, far) == wanted(change)
    assert shipment.total_copies == len(moves) == len(near) + len(far)
    assert shipment.remote_copies == len(far)


Filled = set[tuple[int, int, int]]


def wanted(change: Change) -> tuple[Filled, Filled]:
    """(layer, slot, expert) of what a rank has already, and of what has to travel."""
    near: Filled = set()
    far: Filled = set()
    per = change.shape.slots_per_rank
    for layer, slot in np.argwhere(change.installed != change.proposed).tolist():
        first = slot // per * per
        expert = int(change.proposed[layer, slot])
        held = expert in change.installed[layer, first : first + per]
        (near if held else far).add((layer, slot, expert))
    return near, far


@given(changes())
def test_shipment_reads_from_nearest_source(change: Change) -> None:
    for move in routes(change.ship()):
        assert move.source in change.choices(move.layer, move.slot)
        assert (change.rank(move.source) == change.rank(move.slot)) == (move.round < 0)


@given(changes())
def test_shipment_minimizes_sends_of_busiest_rank(change: Change) -> None:
    sends = Counter(change.rank(m.source) for m in routes(change.ship()) if m.round >= 0)
    assert max(sends.values(), default=0) == fewest_sends(change)


@given(changes())
def test_lots_follow_layer_order_and_fill_half_the_buffers(change: Change) -> None:
    shipment = change.ship()
    lots: list[list[int]] = []
    for layer in change.order:
        half = change.staging // 2
        if lots and max(change.needs([*lots[-1], layer])) <= half:
            lots[-1].append(layer)
        else:
            lots.append([layer])
    assert [list(shipment.layers(k)) for k in range(shipment.chunks)] == lots
    assert shipment.staging_needed.tolist() == [change.needs(lot) for lot in lots]


@given(changes())
def test_lot_has_as_many_rounds_as_its_largest_degree(change: Change) -> None:
    shipment = change.ship()
    for lot, moves in enumerate(by_lot(shipment)):
        assert shipment.rounds(lot) == largest_degree(change, moves)
        assert all(len(leg.rounds) == shipment.rounds(lot) for leg in legs(shipment, lot))


@given(changes())
def test_blob_slots_match_on_sender_and_receiver(change: Change) -> None:
    shipment = change.ship()
    travelled = 0
    for lot in range(shipment.chunks):
        by_rank = legs(shipment, lot)
        for number in range(shipment.rounds(lot)):
            sends = {r: leg.rounds[number].send for r, leg in enumerate(by_rank)}
            receives = {r: leg.rounds[number].receive for r, leg in enumerate(by_rank)}
            ends = {(r, s.peer): s for r, s in sends.items() if s}
            others = {(g.peer, r): g for r, g in receives.items() if g}
            assert ends.keys() == others.keys()
            for pair, send in ends.items():
                assert_a_blob(change, send, others[pair], pair)
                travelled += len(send.slots)
    assert travelled == shipment.remote_copies


def assert_a_blob(change: Change, send: Send, receive: Recv, pair: tuple[int, int]) -> None:
    assert pair[0] != pair[1]
    assert 1 <= len(send.slots) == len(receive.slots) == len(receive.staging) <= change.parcel
    assert list(receive.staging) == list(range(receive.staging[0], receive.staging[-1] + 1))
    assert list(receive.slots) == sorted(receive.slots)
    for read, filled in zip(send.slots, receive.slots, strict=True):
        held = at(change, change.installed, pair[0], read)
        assert held == at(change, change.proposed, pair[1], filled)
        assert read // change.shape.slots_per_rank == filled // change.shape.slots_per_rank


def at(change: Change, placed: Placement, rank: int, local: int) -> int:
    """What a local slot of a rank holds."""
    layer, place = divmod(local, change.shape.slots_per_rank)
    return int(placed[layer, rank * change.shape.slots_per_rank + place])


@given(changes())
def test_commit_copies_every_filled_buffer_to_its_slot(change: Change) -> None:
    shipment = change.ship()
    for lot in range(shipment.chunks):
        for rank, leg in enumerate(legs(shipment, lot)):
            received = [step.receive for step in leg.rounds if step.receive]
            filled = [*zip(leg.local.staging, leg.local.slots, strict=True)]
            for blob in received:
                filled += zip(blob.staging, blob.slots, strict=True)
            assert sorted(leg.copies) == sorted(filled)
            assert len(leg.copies) == shipment.staging_needed[lot, rank]
            assert len({buffer for buffer, _ in leg.copies}) == len(leg.copies)
            for read, slot in zip(leg.local.sources, leg.local.slots, strict=True):
                held = at(change, change.installed, rank, read)
                assert held == at(change, change.proposed, rank, slot)


@given(changes())
def test_lots_alternate_between_first_and_last_buffers(change: Change) -> None:
    shipment = change.ship()
    for lot in range(shipment.chunks):
        for leg, need in zip(
            legs(shipment, lot), shipment.staging_needed[lot].tolist(), strict=True
        ):
            first = (0, change.staging - need)[lot % 2]
            assert [buffer for buffer, _ in leg.copies] == list(range(first, first + need))


@given(changes())
def test_adjacent_lots_fit_together_exactly_when_buffers_suffice(
    change: Change,
) -> None:
    shipment = change.ship()
    for lot in range(shipment.chunks):
        for other in range(shipment.chunks):
            both = [*shipment.layers(lot), *shipment.layers(other)]
            suffice = max(change.needs(both)) <= change.staging
            assert shipment.fits_with(lot, other) == (suffice and abs(lot - other) == 1)


@given(changes())
def test_adjacent_lots_of_several_layers_always_fit_together(change: Change) -> None:
    shipment = change.ship()
    for lot in range(shipment.chunks - 1):
        pair = lot, lot + 1
        several = all(len(shipment.layers(k)) > 1 for k in pair)
        assert shipment.fits_with(*pair) or not several


@given(changes())
def test_shipment_is_deterministic(change: Change) -> None:
    copied = replace(change, installed=change.installed.copy(), proposed=change.proposed.copy())
    first, second = change.ship(), copied.ship()
    assert routes(first) == routes(second)
    for lot in range(first.chunks):
        assert legs(first, lot) == legs(second, lot)


def test_lots_follow_given_layer_order() -> None:
    shape = ExpertShape(3, 2, 2, 2)
    before, after = placement(*[(0, 1)] * 3), placement(*[(1, 0)] * 3)
    shipment = plan_migration(before, after, (2, 0, 1), shape, staging=4, slots_per_message=1)
    assert [shipment.layers(k) for k in range(shipment.chunks)] == [(2, 0), (1,)]
    assert shipment.rounds(0) == 2


def test_lot_may_hold_layer_without_moves() -> None:
    before = placement((0, 1), (0, 1))
    shipment = plan_migration(
        before, before, (1,), ExpertShape(2, 2, 2, 2), staging=1, slots_per_message=1
    )
    assert (shipment.chunks, shipment.layers(0), shipment.total_copies) == (1, (1,), 0)
    assert shipment.for_rank(0, 0) == shipment.for_rank(1, 0)


def test_shipment_of_nothing_has_no_lot() -> None:
    before = placement((0, 1))
    shipment = plan_migration(
        before, before, (), ExpertShape(1, 2, 2, 2), staging=1, slots_per_message=1
    )
    assert (shipment.chunks, shipment.total_copies) == (0, 0)


def test_swap_within_a_rank_uses_staging_and_no_link() -> None:
    shipment = plan_migration(
        placement((0, 1)),
        placement((1, 0)),
        (0,),
        ExpertShape(1, 2, 2, 1),
        staging=2,
        slots_per_message=1,
    )
    leg = shipment.for_rank(0, 0)
    assert (leg.rounds, shipment.remote_copies, shipment.total_copies) == ((), 0, 2)
    assert (leg.local.sources, leg.local.slots) == ((1, 0), (0, 1))
    assert leg.copies == ((0, 0), (1, 1))


BEFORE = placement((0, 1, 2, 3, 1, 1), (0, 0, 1, 2, 3, 1), (1, 2, 1, 2, 0, 3))
AFTER = placement((0, 1, 2, 3, 0, 0), (0, 0, 0, 0, 3, 1), (0, 0, 0, 2, 0, 3))
"""Rank 0 has to send two copies, then it or rank 1 two, then rank 4 has to send three."""


def test_lot_is_balanced_while_busiest_sender_stays_the_same() -> None:
    """Else rank 1, which has sent least, would send both of its lot."""
    shipment = plan_migration(
        BEFORE, AFTER, (0, 1, 2), ExpertShape(3, 4, 6, 6), staging=1, slots_per_message=1
    )
    assert [shipment.rounds(k) for k in range(3)] == [2, 1, 3]


def test_lot_balancing_creates_no_busier_sender() -> None:
    shipment = plan_migration(
        BEFORE[:2], AFTER[:2], (0, 1), ExpertShape(2, 4, 6, 6), staging=1, slots_per_message=1
    )
    assert [shipment.rounds(k) for k in range(2)] == [2, 2]
    sends = Counter(move.source for move in routes(shipment))
    assert sends == {0: 2, 1: 2}


def small(**changed: object) -> dict[str, object]:
    right: dict[str, object] = {
        "installed": placement((0, 1, 2, 0), (0, 1, 2, 0)),
        "proposed": placement((0, 1, 2, 1), (0, 1, 2, 0)),
        "order": (0,),
        "shape": ExpertShape(2, 3, 4, 2),
        "nodes": 1,
        "staging": 2,
        "parcel": 1,
    }
    return right | changed


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "layer too large": (
        small(proposed=placement((0, 1, 2, 0), (0, 1, 0, 2)), order=(1,), staging=1),
        "layer 1 fills 2 slots of rank 1, which has 1 staging buffers",
    ),
    "rows": (small(installed=placement((0, 1, 2, 0))), r"installed: expected \(2, 4\), got \(1, 4"),
    "proposed": (small(proposed=placement((0, 1, 2, 0))), "proposed rows: expected 2"),
    "dtype": (small(proposed=np.zeros((2, 4))), "proposed: expected int32"),
    "stranger": (small(proposed=placement((0, 1, 2, 3), (0, 1, 2, 0))), "proposed: .* got 3"),
    "negative": (small(installed=placement((0, 1, 2, -2), (0, 1, 2, 0))), "installed: .* got -2"),
    "nobody holds it": (
        small(installed=placement((0, 1, 1, 0), (0, 1, 2, 0))),
        "no slot of layer 0 holds expert 2",
    ),
    "missing": (small(order=()), "order: layer 0 changes and is missing"),
    "twice": (small(order=(0, 1, 0)), "order: layer 0 stands twice"),
    "no such layer": (small(order=(0, 2)), "order: expected 0 to 1, got 2"),
    "huge layer": (small(order=(0, 2**40)), "order: a layer is beyond 32 bits"),
    "nodes": (small(nodes=3), "nodes: expected 1 to 2, got 3"),
    "no nodes": (small(nodes=0), "nodes: expected 1 to 2, got 0"),
    "staging": (small(staging=0), "staging: expected 1 to .*, got 0"),
    "parcel": (small(slots_per_message=0), "parcel: expected 1 to .*, got 0"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_ship_refuses_bad_arguments_in_one_line(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PlacementError, match=message) as caught:
        plan_migration(**arguments)  # type: ignore[arg-type]
    assert str(caught.value)
    assert "\n" not in str(caught.value)


def test_ship_requires_equal_ranks_per_node() -> None:
    six = placement((0, 1, 2, 3, 4, 5))
    with pytest.raises(PlacementError, match="ranks % nodes"):
        plan_migration(
            six, six, (), ExpertShape(1, 6, 6, 6), nodes=4, staging=1, slots_per_message=1
        )


ASKED: dict[str, tuple[Callable[[MigrationPlan], object], str]] = {
    "leg of no rank": (lambda s: s.for_rank(2, 0), "rank: expected 0 to 1, got 2"),
    "leg of the last rank": (lambda s: s.for_rank(-1, 0), "rank: .* got -1"),
    "transfers of no chunk": (lambda s: s.for_rank(0, 1), "chunk: expected 0 to 0, got 1"),
    "layers": (lambda s: s.layers(-1), "chunk: .* got -1"),
    "rounds": (lambda s: s.rounds(1), "chunk: .* got 1"),
    "beside": (lambda s: s.fits_with(0, -1), "chunk: .* got -1"),
}


@pytest.mark.parametrize(("ask", "message"), ASKED.values(), ids=ASKED)
def test_shipment_refuses_unknown_rank_or_lot(
    ask: Callable[[MigrationPlan], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ask(plan_migration(**small()))  # type: ignore[arg-type]


@given(changes(), st.data())
def test_shipment_moves_are_read_only(change: Change, data: st.DataObject) -> None:
    moves = change.ship().moves
    name = data.draw(st.sampled_from(["layer", "slot", "expert", "source", "staging", "round"]))
    with pytest.raises(ValueError, match="read-only"):
        getattr(moves, name)[:] = 0
