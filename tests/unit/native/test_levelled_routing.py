"""Native levelled routing against the torch reference, bit for bit, and what it refuses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise import _native
from equipoise.hal import routing
from equipoise.hal.levelled_routing import GroupCounts, group_rows, route_levelled

UNHURRIED = settings(deadline=None)
WORD = st.integers(0, 2**31 - 1)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[routing.RoutingTable, int]:
    """A table, and the number of ranks; an expert may be several times on a rank."""
    experts, ranks = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    per_rank = -(-experts // ranks) + draw(st.integers(0, 3))
    spare = per_rank * ranks - experts
    extra = draw(st.lists(st.integers(0, experts - 1), min_size=spare, max_size=spare))
    placement = draw(st.permutations([*range(experts), *extra]))
    shares = [65536 * (placement.index(expert) == slot) for slot, expert in enumerate(placement)]
    first, second = (torch.tensor(part, dtype=torch.int32) for part in (placement, shares))
    return routing.build_table(first, second, experts), ranks


@UNHURRIED
@given(layouts(), WORD, WORD, st.data())
def test_native_levelled_routing_equals_reference(
    layout: tuple[routing.RoutingTable, int], rank: int, layer: int, data: st.DataObject
) -> None:
    table, ranks = layout
    padding = st.sampled_from([-1, -(2**31), table.experts, 2**31 - 1])
    inside = st.integers(0, table.experts - 1)
    drawn = data.draw(st.lists(st.one_of(inside, inside, inside, padding), max_size=60))
    ids = torch.tensor(drawn * data.draw(st.sampled_from([1, 7, 40])), dtype=torch.int32)
    sums = st.lists(st.integers(0, 500), min_size=table.experts, max_size=table.experts)
    group = None
    if data.draw(st.booleans()):
        total, before = (torch.tensor(data.draw(sums), dtype=torch.int32) for _ in range(2))
        group = GroupCounts(total, before)
    slots = torch.full_like(ids, -7)
    counts = torch.full((table.experts,), -7, dtype=torch.int32)
    summed = () if group is None else (group.total, group.before)
    _native.route_levelled(
        ids, table.start, table.replicas, ranks, rank, layer, slots, counts, *summed
    )
    expected = route_levelled(ids, table, ranks, rank, layer, group)
    assert slots.tolist() == expected[0].tolist()
    assert counts.tolist() == expected[1].tolist()


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("ranks", "group", "message"),
    [
        (2, (), "a positive divisor of 3 slots"),
        (3, (int32(1, 1), None), "only one of them"),
        (3, (int32(1), int32(1, 1)), "2 elements"),
        (3, (int32(1, 1), int32(0, -1)), "counts of a group"),
    ],
)
def test_native_levelled_routing_refuses_arguments_that_do_not_fit(
    ranks: int, group: tuple[torch.Tensor | None, ...], message: str
) -> None:
    slots, counts = int32(-7), int32(-7, -7)
    with pytest.raises(ValueError, match=message):
        _native.route_levelled(
            int32(0), int32(0, 2, 3), int32(0, 2, 1), ranks, 0, 0, slots, counts, *group
        )
    assert slots.tolist() == [-7]
    assert counts.tolist() == [-7, -7]


def test_native_levelled_routing_refuses_counts_in_memory_of_the_group() -> None:
    total, before, slots = int32(1, 1), int32(0, 0), int32(-7)
    for counts in (total, before):
        with pytest.raises(ValueError, match="memory of its own"):
            _native.route_levelled(
                int32(0), int32(0, 2, 3), int32(0, 2, 1), 3, 0, 0, slots, counts, total, before
            )


@UNHURRIED
@given(layouts(), st.integers(0, 2**20), st.booleans(), st.data())
def test_levelled_rows_equal_the_rows_of_routed_batches(
    layout: tuple[routing.RoutingTable, int], layer: int, groups: bool, data: st.DataObject
) -> None:
    table, ranks = layout
    batch = st.lists(st.integers(0, 60), min_size=table.experts, max_size=table.experts)
    counts = torch.tensor(data.draw(st.lists(batch, min_size=1, max_size=4)), dtype=torch.int32)
    rows = torch.full((table.slots,), -7, dtype=torch.int64)
    _native.levelled_rows(counts, table.start, table.replicas, ranks, layer, groups, rows)
    expected = torch.zeros_like(rows)
    for number, total in enumerate(counts):
        ids = torch.arange(table.experts, dtype=torch.int32).repeat_interleave(total)
        group = GroupCounts(total, torch.zeros_like(total)) if groups else None
        slots, _ = route_levelled(ids, table, ranks, number, layer, group)
        expected += torch.bincount(slots, minlength=table.slots)
    assert rows.tolist() == expected.tolist()


def test_levelled_rows_refuse_counts_of_other_experts() -> None:
    table = routing.build_table(int32(0, 1), int32(65536, 65536), 2)
    rows = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="counts columns: expected 2 elements, got 3"):
        _native.levelled_rows(
            torch.zeros(1, 3, dtype=torch.int32), table.start, table.replicas, 1, 0, False, rows
        )


@UNHURRIED
@given(layouts(), WORD, WORD, st.data())
def test_native_group_rows_equal_reference(
    layout: tuple[routing.RoutingTable, int], number: int, layer: int, data: st.DataObject
) -> None:
    table, ranks = layout
    count = st.one_of(st.integers(0, 9), st.integers(0, 2**24))
    member = st.lists(count, min_size=table.experts, max_size=table.experts)
    members = data.draw(st.lists(member, min_size=1, max_size=5))
    counts = torch.tensor(members, dtype=torch.int32)
    rows = torch.full((len(members), table.slots), -7, dtype=torch.int64)
    layers = table.start, table.replicas
    _native.levelled_group_rows(counts, *layers, ranks, number, layer, rows)
    assert rows.tolist() == group_rows(counts, table, ranks, number, layer).tolist()


@pytest.mark.parametrize(
    ("counts", "rows", "message"),
    [
        ([[1, 2, 3]], (1, 3), "counts columns: expected 2 elements, got 3"),
        ([[1, -1]], (1, 3), "counts: expected 0 to 2147483647"),
        ([[2**31 - 1, 0], [0, 1]], (2, 3), "sum of counts: expected 0 to 2147483647"),
        ([[1, 2]], (2, 3), "rows rows: expected 1 elements, got 2"),
        ([[1, 2]], (1, 2), "rows columns: expected 3 elements, got 2"),
    ],
)
def test_native_group_rows_refuse_arguments_that_do_not_fit(
    counts: list[list[int]], rows: tuple[int, int], message: str
) -> None:
    out = torch.full(rows, -7, dtype=torch.int64)
    batches = torch.tensor(counts, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        _native.levelled_group_rows(batches, int32(0, 2, 3), int32(0, 2, 1), 3, 0, 0, out)
    assert (out == -7).all()
