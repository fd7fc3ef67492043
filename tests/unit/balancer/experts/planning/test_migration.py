"""Migration plans: which slots move, from where, in which chunks and rounds, by which buffers."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from helpers.strategies.migration_routes import (
    Change,
    by_chunk,
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


def rank_transfers(migration: MigrationPlan, chunk: int) -> list[RankTransfers]:
    return [migration.for_rank(rank, chunk) for rank in range(migration.shape.ranks)]


@given(changes())
def test_migration_fills_exactly_the_changed_slots(change: Change) -> None:
    migration = change.plan()
    moves = routes(migration)
    local_fills = {(m.layer, m.slot, m.expert) for m in moves if m.round < 0}
    remote_fills = {(m.layer, m.slot, m.expert) for m in moves if m.round >= 0}
    assert (local_fills, remote_fills) == expected_fills(change)
    assert migration.total_copies == len(moves) == len(local_fills) + len(remote_fills)
    assert migration.remote_copies == len(remote_fills)


Filled = set[tuple[int, int, int]]


def expected_fills(change: Change) -> tuple[Filled, Filled]:
    """(layer, slot, expert) of the local fills and of the remote fills."""
    local_fills: Filled = set()
    remote_fills: Filled = set()
    per = change.shape.slots_per_rank
    for layer, slot in np.argwhere(change.installed != change.proposed).tolist():
        first = slot // per * per
        expert = int(change.proposed[layer, slot])
        is_local = expert in change.installed[layer, first : first + per]
        (local_fills if is_local else remote_fills).add((layer, slot, expert))
    return local_fills, remote_fills


@given(changes())
def test_migration_reads_from_nearest_source(change: Change) -> None:
    for move in routes(change.plan()):
        assert move.source in change.choices(move.layer, move.slot)
        assert (change.rank(move.source) == change.rank(move.slot)) == (move.round < 0)


@given(changes())
def test_migration_minimizes_sends_of_busiest_rank(change: Change) -> None:
    sends = Counter(change.rank(m.source) for m in routes(change.plan()) if m.round >= 0)
    assert max(sends.values(), default=0) == fewest_sends(change)


@given(changes())
def test_chunks_follow_layer_order_and_fill_half_the_buffers(change: Change) -> None:
    migration = change.plan()
    chunks: list[list[int]] = []
    for layer in change.order:
        half = change.staging // 2
        if chunks and max(change.needs([*chunks[-1], layer])) <= half:
            chunks[-1].append(layer)
        else:
            chunks.append([layer])
    assert [list(migration.layers(k)) for k in range(migration.chunks)] == chunks
    assert migration.staging_needed.tolist() == [change.needs(chunk) for chunk in chunks]


@given(changes())
def test_chunk_has_as_many_rounds_as_its_largest_degree(change: Change) -> None:
    migration = change.plan()
    for chunk, moves in enumerate(by_chunk(migration)):
        assert migration.rounds(chunk) == largest_degree(change, moves)
        assert all(
            len(transfers.rounds) == migration.rounds(chunk)
            for transfers in rank_transfers(migration, chunk)
        )


@given(changes())
def test_message_slots_match_on_sender_and_receiver(change: Change) -> None:
    migration = change.plan()
    sent_slots = 0
    for chunk in range(migration.chunks):
        by_rank = rank_transfers(migration, chunk)
        for number in range(migration.rounds(chunk)):
            sends = {r: transfers.rounds[number].send for r, transfers in enumerate(by_rank)}
            receives = {r: transfers.rounds[number].receive for r, transfers in enumerate(by_rank)}
            sends_by_pair = {(r, s.peer): s for r, s in sends.items() if s}
            receives_by_pair = {(g.peer, r): g for r, g in receives.items() if g}
            assert sends_by_pair.keys() == receives_by_pair.keys()
            for pair, send in sends_by_pair.items():
                check_message(change, send, receives_by_pair[pair], pair)
                sent_slots += len(send.slots)
    assert sent_slots == migration.remote_copies


def check_message(change: Change, send: Send, receive: Recv, pair: tuple[int, int]) -> None:
    assert pair[0] != pair[1]
    assert (
        1
        <= len(send.slots)
        == len(receive.slots)
        == len(receive.staging)
        <= change.slots_per_message
    )
    assert list(receive.staging) == list(range(receive.staging[0], receive.staging[-1] + 1))
    assert list(receive.slots) == sorted(receive.slots)
    for source, slot in zip(send.slots, receive.slots, strict=True):
        expert = expert_at(change, change.installed, pair[0], source)
        assert expert == expert_at(change, change.proposed, pair[1], slot)
        assert source // change.shape.slots_per_rank == slot // change.shape.slots_per_rank


def expert_at(change: Change, table: Placement, rank: int, local: int) -> int:
    """The expert in a local slot of a rank."""
    layer, place = divmod(local, change.shape.slots_per_rank)
    return int(table[layer, rank * change.shape.slots_per_rank + place])


@given(changes())
def test_commit_copies_every_filled_buffer_to_its_slot(change: Change) -> None:
    migration = change.plan()
    for chunk in range(migration.chunks):
        for rank, transfers in enumerate(rank_transfers(migration, chunk)):
            received_messages = [step.receive for step in transfers.rounds if step.receive]
            buffer_slots = [*zip(transfers.local.staging, transfers.local.slots, strict=True)]
            for message in received_messages:
                buffer_slots += zip(message.staging, message.slots, strict=True)
            assert sorted(transfers.copies) == sorted(buffer_slots)
            assert len(transfers.copies) == migration.staging_needed[chunk, rank]
            assert len({buffer for buffer, _ in transfers.copies}) == len(transfers.copies)
            for source, slot in zip(transfers.local.sources, transfers.local.slots, strict=True):
                expert = expert_at(change, change.installed, rank, source)
                assert expert == expert_at(change, change.proposed, rank, slot)


@given(changes())
def test_chunks_alternate_between_first_and_last_buffers(change: Change) -> None:
    migration = change.plan()
    for chunk in range(migration.chunks):
        for transfers, buffer_count in zip(
            rank_transfers(migration, chunk), migration.staging_needed[chunk].tolist(), strict=True
        ):
            first = (0, change.staging - buffer_count)[chunk % 2]
            assert [buffer for buffer, _ in transfers.copies] == list(
                range(first, first + buffer_count)
            )


@given(changes())
def test_adjacent_chunks_fit_together_exactly_when_buffers_suffice(
    change: Change,
) -> None:
    migration = change.plan()
    for chunk in range(migration.chunks):
        for other in range(migration.chunks):
            both = [*migration.layers(chunk), *migration.layers(other)]
            is_enough = max(change.needs(both)) <= change.staging
            assert migration.fits_with(chunk, other) == (is_enough and abs(chunk - other) == 1)


@given(changes())
def test_adjacent_chunks_of_several_layers_always_fit_together(change: Change) -> None:
    migration = change.plan()
    for chunk in range(migration.chunks - 1):
        pair = chunk, chunk + 1
        have_several_layers = all(len(migration.layers(k)) > 1 for k in pair)
        assert migration.fits_with(*pair) or not have_several_layers


@given(changes())
def test_migration_is_deterministic(change: Change) -> None:
    change_copy = replace(
        change, installed=change.installed.copy(), proposed=change.proposed.copy()
    )
    first, second = change.plan(), change_copy.plan()
    assert routes(first) == routes(second)
    for chunk in range(first.chunks):
        assert rank_transfers(first, chunk) == rank_transfers(second, chunk)


def test_chunks_follow_given_layer_order() -> None:
    shape = ExpertShape(3, 2, 2, 2)
    before, after = placement(*[(0, 1)] * 3), placement(*[(1, 0)] * 3)
    migration = plan_migration(before, after, (2, 0, 1), shape, staging=4, slots_per_message=1)
    assert [migration.layers(k) for k in range(migration.chunks)] == [(2, 0), (1,)]
    assert migration.rounds(0) == 2


def test_chunk_may_hold_layer_without_moves() -> None:
    before = placement((0, 1), (0, 1))
    migration = plan_migration(
        before, before, (1,), ExpertShape(2, 2, 2, 2), staging=1, slots_per_message=1
    )
    assert (migration.chunks, migration.layers(0), migration.total_copies) == (1, (1,), 0)
    assert migration.for_rank(0, 0) == migration.for_rank(1, 0)


def test_migration_of_nothing_has_no_chunk() -> None:
    before = placement((0, 1))
    migration = plan_migration(
        before, before, (), ExpertShape(1, 2, 2, 2), staging=1, slots_per_message=1
    )
    assert (migration.chunks, migration.total_copies) == (0, 0)


def test_swap_within_a_rank_uses_staging_and_no_link() -> None:
    migration = plan_migration(
        placement((0, 1)),
        placement((1, 0)),
        (0,),
        ExpertShape(1, 2, 2, 1),
        staging=2,
        slots_per_message=1,
    )
    transfers = migration.for_rank(0, 0)
    assert (transfers.rounds, migration.remote_copies, migration.total_copies) == ((), 0, 2)
    assert (transfers.local.sources, transfers.local.slots) == ((1, 0), (0, 1))
    assert transfers.copies == ((0, 0), (1, 1))


BEFORE = placement((0, 1, 2, 3, 1, 1), (0, 0, 1, 2, 3, 1), (1, 2, 1, 2, 0, 3))
AFTER = placement((0, 1, 2, 3, 0, 0), (0, 0, 0, 0, 3, 1), (0, 0, 0, 2, 0, 3))
"""Rank 0 has to send two copies, then it or rank 1 two, then rank 4 has to send three."""


def test_chunk_is_balanced_while_busiest_sender_stays_the_same() -> None:
    """Else rank 1, which has sent least, would send both of its chunk."""
    migration = plan_migration(
        BEFORE, AFTER, (0, 1, 2), ExpertShape(3, 4, 6, 6), staging=1, slots_per_message=1
    )
    assert [migration.rounds(k) for k in range(3)] == [2, 1, 3]


def test_chunk_balancing_creates_no_busier_sender() -> None:
    migration = plan_migration(
        BEFORE[:2], AFTER[:2], (0, 1), ExpertShape(2, 4, 6, 6), staging=1, slots_per_message=1
    )
    assert [migration.rounds(k) for k in range(2)] == [2, 2]
    sends = Counter(move.source for move in routes(migration))
    assert sends == {0: 2, 1: 2}


def migration_arguments(**overrides: object) -> dict[str, object]:
    valid: dict[str, object] = {
        "installed": placement((0, 1, 2, 0), (0, 1, 2, 0)),
        "proposed": placement((0, 1, 2, 1), (0, 1, 2, 0)),
        "order": (0,),
        "shape": ExpertShape(2, 3, 4, 2),
        "nodes": 1,
        "staging": 2,
        "slots_per_message": 1,
    }
    return valid | overrides


BAD_ARGUMENTS: dict[str, tuple[dict[str, object], str]] = {
    "layer too large": (
        migration_arguments(proposed=placement((0, 1, 2, 0), (0, 1, 0, 2)), order=(1,), staging=1),
        "layer 1 fills 2 slots of rank 1, which has 1 staging buffers",
    ),
    "rows": (
        migration_arguments(installed=placement((0, 1, 2, 0))),
        r"installed: expected \(2, 4\), got \(1, 4",
    ),
    "proposed": (
        migration_arguments(proposed=placement((0, 1, 2, 0))),
        "proposed rows: expected 2",
    ),
    "dtype": (migration_arguments(proposed=np.zeros((2, 4))), "proposed: expected int32"),
    "stranger": (
        migration_arguments(proposed=placement((0, 1, 2, 3), (0, 1, 2, 0))),
        "proposed: .* got 3",
    ),
    "negative": (
        migration_arguments(installed=placement((0, 1, 2, -2), (0, 1, 2, 0))),
        "installed: .* got -2",
    ),
    "nobody holds it": (
        migration_arguments(installed=placement((0, 1, 1, 0), (0, 1, 2, 0))),
        "no slot of layer 0 holds expert 2",
    ),
    "missing": (migration_arguments(order=()), "order: layer 0 changes and is missing"),
    "twice": (migration_arguments(order=(0, 1, 0)), "order: layer 0 stands twice"),
    "no such layer": (migration_arguments(order=(0, 2)), "order: expected 0 to 1, got 2"),
    "huge layer": (migration_arguments(order=(0, 2**40)), "order: a layer is beyond 32 bits"),
    "nodes": (migration_arguments(nodes=3), "nodes: expected 1 to 2, got 3"),
    "no nodes": (migration_arguments(nodes=0), "nodes: expected 1 to 2, got 0"),
    "staging": (migration_arguments(staging=0), "staging: expected 1 to .*, got 0"),
    "slots per message": (
        migration_arguments(slots_per_message=0),
        "message_slots: expected 1 to .*, got 0",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_ship_refuses_bad_arguments_in_one_line(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PlacementError, match=message) as error:
        plan_migration(**arguments)  # type: ignore[arg-type]
    assert str(error.value)
    assert "\n" not in str(error.value)


def test_ship_requires_equal_ranks_per_node() -> None:
    six_experts = placement((0, 1, 2, 3, 4, 5))
    with pytest.raises(PlacementError, match="ranks % nodes"):
        plan_migration(
            six_experts,
            six_experts,
            (),
            ExpertShape(1, 6, 6, 6),
            nodes=4,
            staging=1,
            slots_per_message=1,
        )


OUT_OF_RANGE: dict[str, tuple[Callable[[MigrationPlan], object], str]] = {
    "transfers of no rank": (lambda s: s.for_rank(2, 0), "rank: expected 0 to 1, got 2"),
    "transfers of the last rank": (lambda s: s.for_rank(-1, 0), "rank: .* got -1"),
    "transfers of no chunk": (lambda s: s.for_rank(0, 1), "chunk: expected 0 to 0, got 1"),
    "layers": (lambda s: s.layers(-1), "chunk: .* got -1"),
    "rounds": (lambda s: s.rounds(1), "chunk: .* got 1"),
    "beside": (lambda s: s.fits_with(0, -1), "chunk: .* got -1"),
}


@pytest.mark.parametrize(("ask", "message"), OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
def test_migration_refuses_unknown_rank_or_chunk(
    ask: Callable[[MigrationPlan], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ask(plan_migration(**migration_arguments()))  # type: ignore[arg-type]


@given(changes(), st.data())
def test_migration_moves_are_read_only(change: Change, data: st.DataObject) -> None:
    moves = change.plan().moves
    name = data.draw(st.sampled_from(["layer", "slot", "expert", "source", "staging", "round"]))
    with pytest.raises(ValueError, match="read-only"):
        getattr(moves, name)[:] = 0
