"""Routing and counting on the device against the reference: clauses G1, G4, G5, G6, G8, G13."""

import pytest
import torch
from helpers.harnesses.kernel_checks import (
    check_apportioned,
    check_count,
    check_hashed,
    check_levelled,
    check_rule,
    check_turns,
)
from helpers.strategies.hypothesis_examples import few
from helpers.strategies.routing_kernel_cases import (
    MAX_REPLICAS,
    WORD,
    Shape,
    World,
    batches,
    groups,
    installed,
    int32,
    tables,
    worlds,
)
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from helpers.harnesses.kernel_launchers import REAL, Launchers, is_clean, on_device

from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.levelled_routing import GroupCounts, route_levelled
from equipoise.hal.routing import (
    RoutingTable,
    build_table,
    draw_positions,
    route_apportioned,
    route_hashed,
    window_begin,
)
from equipoise.hal.routing_rules import BlockTurns, RowHash

pytestmark = pytest.mark.slow

KERNELS = Launchers(REAL)
BLOCKS = st.sampled_from(((16, 32), (32, 16)))


@st.composite
def worlds_and_batches(draw: st.DrawFn) -> tuple[World, torch.Tensor]:
    world = draw(worlds())
    return world, draw(batches(world.table.experts))


@few(12)
@given(st.sampled_from((1, 5, 32, 40)), st.data(), BLOCKS)
def test_count_equals_the_reference(
    experts: int, data: st.DataObject, blocks: tuple[int, int]
) -> None:
    ids = data.draw(batches(experts))
    with KERNELS.small_blocks(*blocks):
        check_count(KERNELS, ids, experts)


@few(12)
@given(worlds_and_batches(), WORD, WORD, BLOCKS)
def test_hashed_routing_equals_the_reference(
    case: tuple[World, torch.Tensor], rank: int, step: int, blocks: tuple[int, int]
) -> None:
    with KERNELS.small_blocks(*blocks):
        check_hashed(KERNELS, *case, rank, step)


@few(12)
@given(worlds_and_batches(), WORD, st.sampled_from((0, 32, 64, 1000)), st.sampled_from((2, 4)))
def test_apportioned_routing_equals_the_reference(
    case: tuple[World, torch.Tensor], rank: int, small: int, rows: int
) -> None:
    with KERNELS.small_numbering(32, small, rows):
        check_apportioned(KERNELS, *case, rank)


@st.composite
def levelled_cases(draw: st.DrawFn) -> tuple[World, torch.Tensor, GroupCounts | None]:
    world, ids = draw(worlds_and_batches())
    return world, ids, draw(st.none() | groups(ids, world.table.experts))


@few(10)
@given(levelled_cases(), WORD, st.sampled_from((0, 64, 128)))
def test_levelled_routing_equals_the_reference(
    case: tuple[World, torch.Tensor, GroupCounts | None], rank: int, small: int
) -> None:
    world, ids, group = case
    with KERNELS.small_numbering(32, small, 2):
        check_levelled(KERNELS, world, ids, rank, group)


@few(12)
@given(worlds_and_batches(), st.integers(1, 9), st.integers(0, 40), BLOCKS)
def test_row_hash_routing_equals_the_reference(
    case: tuple[World, torch.Tensor], top_k: int, rows: int, blocks: tuple[int, int]
) -> None:
    with KERNELS.small_blocks(*blocks):
        check_rule(KERNELS, *case, RowHash(top_k, int32([rows])))


@few(12)
@given(worlds_and_batches(), st.sampled_from((0, 1, 5, 2**31 - 1)), st.sampled_from((32, 64)))
def test_block_turns_routing_equals_the_reference(
    case: tuple[World, torch.Tensor], offset: int, turns: int
) -> None:
    with KERNELS.small_numbering(32, 32, 2):
        check_turns(KERNELS, *case, offset, turns)


def skewed_ids(size: int, experts: int) -> torch.Tensor:
    """Popular experts and unpopular ones, and a little padding; always the same."""
    source = torch.Generator().manual_seed(size)
    samples = torch.rand(size, generator=source) ** 2 * (experts + 1)
    return samples.int() - 1


@pytest.mark.parametrize("size", [0, 1, 255, 257, 1023, 1025, 2500])
def test_routing_with_default_blocks_equals_the_reference(size: int) -> None:
    placement = int32([*range(12), *range(4)])
    table = build_table(placement, shares_of_two(placement, 12), 12)
    world, ids = installed(table, 4), skewed_ids(size, 12)
    check_count(KERNELS, ids, 12)
    check_hashed(KERNELS, world, ids, 1, 3)
    check_apportioned(KERNELS, world, ids, 1)
    check_rule(KERNELS, world, ids, RowHash(8, int32([100])))
    check_rule(KERNELS, world, ids, BlockTurns(3))


@pytest.mark.parametrize("size", [0, 257, 1025])
def test_levelled_routing_with_default_blocks_equals_the_reference(size: int) -> None:
    world = installed(table_of(int32([*range(6), 0, 5]), 6), 4)
    check_levelled(KERNELS, world, skewed_ids(size, 6), 1)


def shares_of_two(placement: torch.Tensor, experts: int) -> torch.Tensor:
    """A third and two thirds where there are two replicas."""
    shares = torch.zeros_like(placement)
    for expert in range(experts):
        slots = (placement == expert).nonzero().flatten()
        shares[slots] = int32([21845, 43691] if len(slots) > 1 else [65536])
    return shares


def test_routing_supports_1024_experts() -> None:
    placement = int32([*range(1024), *range(64)])
    table = build_table(placement, shares_of_two(placement, 1024), 1024)
    world, ids = installed(table, 32), skewed_ids(600, 1024)
    check_hashed(KERNELS, world, ids, 1, 3)
    with KERNELS.small_numbering(256, 256, 4):
        check_apportioned(KERNELS, world, ids, 1)


def test_hashed_routing_at_share_boundary_takes_next_replica() -> None:
    ids = torch.zeros(40, dtype=torch.int32)
    positions = draw_positions(torch.arange(40) + window_begin(2, 0, 9))
    draws = sorted({position * 256 + 128 for position in positions.tolist()})
    ends = [*draws, 65536]
    shares = [high - low for low, high in zip([0, *ends], ends, strict=False)]
    table = build_table(torch.zeros(len(shares), dtype=torch.int32), int32(shares), 1)
    check_hashed(KERNELS, installed(table, 1), ids, 2, 9)


@pytest.mark.parametrize(
    ("experts", "slots", "ranks"), [(256, 288, 32), (20, 72, 8), (40, 125, 25), (256, 640, 320)]
)
def test_levelled_routing_of_real_layouts_equals_the_reference(
    experts: int, slots: int, ranks: int
) -> None:
    """Up to 32, 128 and more entries, by which the lanes are spread over warps."""
    source = torch.Generator().manual_seed(slots)
    spare = torch.randint(0, experts, (slots - experts,), generator=source)
    placement = torch.cat([torch.arange(experts), spare])
    placement = placement[torch.randperm(slots, generator=source)].int()
    world = installed(table_of(placement, experts), ranks)
    check_levelled(KERNELS, world, skewed_ids(250, experts), 3)


def table_of(placement: torch.Tensor, experts: int) -> RoutingTable:
    """All of an expert's share is on its first slot: levelled routing does not read shares."""
    shares = torch.zeros_like(placement)
    for expert in range(experts):
        shares[(placement == expert).nonzero()[0]] = 65536
    return build_table(placement, shares, experts)


def test_levelled_routing_takes_rows_beyond_the_quotas_to_the_last_replica() -> None:
    world = installed(table_of(int32([0, 0]), 1), 2)
    group = GroupCounts(int32([2]), int32([5]))
    check_levelled(KERNELS, world, torch.zeros(3, dtype=torch.int32), 0, group)


@few(7)
@given(tables(), st.integers(0, 20))
def test_apportioned_routing_rounds_quotas_of_few_elements(
    table_and_shape: tuple[RoutingTable, Shape], rank: int
) -> None:
    """With as many elements as replicas every quota is 0, 1 or 2, and rounding decides."""
    table, shape = table_and_shape
    ids = torch.arange(table.experts, dtype=torch.int32).repeat(3)
    check_apportioned(KERNELS, installed(table, shape.ranks), ids, rank)


@pytest.mark.parametrize("copies", [2, 3, 4, 5, 16, 17, MAX_REPLICAS])
def test_routing_searches_replica_runs_of_any_length(copies: int) -> None:
    shares = [65536 // copies] * copies
    shares[-1] += 65536 - sum(shares)
    table = build_table(int32([1, *([0] * copies)]), int32([65536, *shares]), 2)
    ids = int32([0] * 200)
    check_hashed(KERNELS, installed(table, 1), ids, 0, 1)
    check_apportioned(KERNELS, installed(table, 1), ids, 1)


def test_workspace_serves_batches_of_all_sizes() -> None:
    table = build_table(int32([0, 1, 0, 2]), int32([30000, 65536, 35536, 65536]), 3)
    world = installed(table, 2)
    with KERNELS.small_blocks(16, 32), KERNELS.small_numbering(32, 64, 2):
        workspace = KERNELS.workspace(3, 4, 2, 400)
        for turn, size in enumerate([100, 0, 400, 5, 33, 200, 64, 128]):
            ids, slots = skewed_ids(size, 3), torch.empty(size, dtype=torch.int32)
            out = (on_device(slots), on_device(torch.empty(3, dtype=torch.int32)))
            salt = Salt(1, 0, turn)
            KERNELS.route_hashed(on_device(ids), world.tables, salt, *out, workspace)
            expected = route_hashed(ids, table, 1, 0, turn)
            assert [part.tolist() for part in out] == [part.tolist() for part in expected]
            shares = on_device(table.cumulative)
            KERNELS.route_apportioned(on_device(ids), world.tables, shares, salt, *out, workspace)
            expected = route_apportioned(ids, table, 1, 0)
            assert [part.tolist() for part in out] == [part.tolist() for part in expected]
    assert is_clean(workspace)


def test_levelled_routing_finds_nothing_of_the_table_before() -> None:
    """Experts and slots that had several replicas have one in the next table, and the reverse."""
    workspace, ids = KERNELS.workspace(3, 8, 4, 60), skewed_ids(60, 3)
    slots, counts = on_device(torch.empty_like(ids)), on_device(int32([0, 0, 0]))
    for placement in ([0, 0, 0, 1, 1, 2, 0, 1], [2, 1, 2, 2, 2, 0, 2, 2], [0, 2, 1, 1, 0, 0, 0, 0]):
        world = installed(table_of(int32(placement), 3), 4)
        out = (slots, counts, workspace)
        KERNELS.route_levelled(on_device(ids), world.tables, Salt(1, 0, 0), None, *out)
        expected = route_levelled(ids, world.table, 4, 1, 0)
        assert [slots.tolist(), counts.tolist()] == [part.tolist() for part in expected]


def test_routing_with_uncommitted_tables_is_harmless() -> None:
    tables = Tables.empty(1, 3, 4, 2, on_device(torch.empty(0)).device)
    workspace = KERNELS.workspace(3, 4, 2, 50)
    ids = on_device(torch.arange(50, dtype=torch.int32) % 5 - 1)
    slots, counts = torch.full_like(ids, -7), ids.new_full((3,), -7)
    shares = tables.cumulative[0, 0]
    salt, outputs = Salt(0, 0, 0), (slots, counts, workspace)

    def take_slot_ids() -> set[int]:
        slot_ids = set(slots.tolist())
        slots.fill_(-7)
        return slot_ids

    KERNELS.route_hashed(ids, tables, salt, *outputs)
    assert take_slot_ids() == {0, 4}
    KERNELS.route_apportioned(ids, tables, shares, salt, *outputs)
    assert take_slot_ids() == {0, 4}
    KERNELS.route_levelled(ids, tables, salt, None, *outputs)
    assert take_slot_ids() == {0, 4}
    for rule in (BlockTurns(1), RowHash(2, ids.new_ones(1))):
        KERNELS.route_by_rule(rule, ids, tables, 0, *outputs)
        assert take_slot_ids() == {0, 4}


def test_routing_refuses_batch_beyond_workspace() -> None:
    world = installed(build_table(int32([0]), int32([65536]), 1), 1)
    ids = on_device(torch.zeros(300, dtype=torch.int32))
    for launch in (KERNELS.route_apportioned, KERNELS.route_levelled):
        with pytest.raises(ValueError, match="ids: expected at most 256, got 300"):
            launch(
                ids, world.tables, None, Salt(0, 0, 0), ids, ids, KERNELS.workspace(1, 1, 1, 256)
            )


def test_levelled_routing_refuses_workspace_of_other_tables() -> None:
    world, ids = installed(table_of(int32([0, 1]), 2), 2), on_device(int32([0]))
    with pytest.raises(ValueError, match="tables: expected those of"):
        KERNELS.route_levelled(
            ids, world.tables, Salt(0, 0, 0), None, ids, ids, KERNELS.workspace(2, 2, 1)
        )


def test_block_turns_refuse_offset_beyond_int32() -> None:
    world = installed(build_table(int32([0]), int32([65536]), 1), 1)
    ids = on_device(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="offset: expected at most 2147483647"):
        KERNELS.route_by_rule(
            BlockTurns(2**31), ids, world.tables, 0, ids, ids, KERNELS.workspace()
        )
