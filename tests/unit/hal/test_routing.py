"""The routing reference against its clauses, element by element."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal import routing

UNHURRIED = settings(deadline=None)
WORD = st.integers(0, 2**31 - 1)
MASK = 2**32 - 1


def slow_mix(index: int, rank: int, layer: int, step: int) -> int:
    state = 0
    for word in (step, layer, rank, index):
        x = ((state ^ word) + 0x9E3779B9) & MASK
        x ^= x >> 16
        x = x * 0x99F0736B & MASK
        x ^= x >> 15
        x = x * 0xCEDA5629 & MASK
        state = x ^ x >> 16
    return state


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], int, list[int]]:
    """Placement, shares, experts, ids."""
    experts = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, experts - 1), max_size=5))
    placement = draw(st.permutations([*range(experts), *extra]))
    shares = [0] * len(placement)
    for expert in range(experts):
        slots = [slot for slot, occupant in enumerate(placement) if occupant == expert]
        size = len(slots) - 1
        cuts = sorted(draw(st.lists(st.integers(0, 65536), min_size=size, max_size=size)))
        ends = [0, *cuts, 65536]
        for slot, low, high in zip(slots, ends[:-1], ends[1:], strict=True):
            shares[slot] = high - low
    ids = draw(st.lists(st.integers(-1, experts), max_size=40))
    return placement, shares, experts, ids


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@given(WORD, WORD, WORD, WORD)
def test_mix32_equals_its_definition(index: int, rank: int, layer: int, step: int) -> None:
    word = routing.mix32(torch.tensor([index]), rank, layer, step)
    assert word.tolist() == [slow_mix(index, rank, layer, step)]


@UNHURRIED
@given(batches(), WORD, WORD, WORD)
def test_route_hashed_takes_first_replica_above_draw(
    batch: tuple[list[int], list[int], int, list[int]], rank: int, layer: int, step: int
) -> None:
    placement, shares, experts, ids = batch
    table = routing.build_table(int32(placement), int32(shares), experts)
    slots, counts = routing.route_hashed(int32(ids), table, rank, layer, step)
    for j, (expert, slot) in enumerate(zip(ids, slots.tolist(), strict=True)):
        if not 0 <= expert < experts:
            assert slot == len(placement)
            continue
        below = sum(s for at, s in enumerate(shares) if placement[at] == expert and at < slot)
        assert placement[slot] == expert
        begin = slow_mix(0, rank, layer, step) % 2**18
        draw = (slow_mix(begin + j, 0, 0, 0) >> 24) * 256 + 128
        assert below <= draw < below + shares[slot]
    assert counts.tolist() == [ids.count(expert) for expert in range(experts)]


@UNHURRIED
@given(batches(), WORD, WORD)
def test_route_apportioned_follows_quota_intervals(
    batch: tuple[list[int], list[int], int, list[int]], rank: int, layer: int
) -> None:
    placement, shares, experts, ids = batch
    table = routing.build_table(int32(placement), int32(shares), experts)
    slots, counts = routing.route_apportioned(int32(ids), table, rank, layer)
    for j, (expert, slot) in enumerate(zip(ids, slots.tolist(), strict=True)):
        if not 0 <= expert < experts:
            assert slot == len(placement)
            continue
        below = sum(s for at, s in enumerate(shares) if placement[at] == expert and at < slot)
        dither, n = slow_mix(expert, rank, layer, 0) >> 16, ids.count(expert)
        first, last = ((c * n + dither) // 65536 for c in (below, below + shares[slot]))
        assert placement[slot] == expert
        assert first <= ids[:j].count(expert) < last
    assert counts.tolist() == [ids.count(expert) for expert in range(experts)]


@given(batches())
def test_build_table_lists_slots_and_cumulative_shares(
    batch: tuple[list[int], list[int], int, list[int]],
) -> None:
    placement, shares, experts, _ = batch
    table = routing.build_table(int32(placement), int32(shares), experts)
    assert (table.experts, table.slots) == (experts, len(placement))
    for expert in range(experts):
        run = slice(int(table.start[expert]), int(table.start[expert + 1]))
        slots = [slot for slot, occupant in enumerate(placement) if occupant == expert]
        assert table.replicas[run].tolist() == slots
        sums = int32([shares[slot] for slot in slots]).cumsum(0)
        assert table.cumulative[run].tolist() == sums.tolist()


def halves() -> routing.RoutingTable:
    return routing.build_table(int32([0, 0]), int32([32768, 32768]), 1)


def test_route_hashed_differs_by_step_layer_and_rank() -> None:
    ids = torch.zeros(64, dtype=torch.int32)
    salts = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    routes = {tuple(routing.route_hashed(ids, halves(), *salt)[0].tolist()) for salt in salts}
    assert len(routes) == len(salts)


@given(st.integers(0, 65536))
def test_position_counts_are_positions_whose_middle_is_below(cumulative: int) -> None:
    below = [p for p in range(256) if p * 256 + 128 < cumulative]
    assert int(routing.position_counts(torch.tensor(cumulative))) == len(below)


def test_window_begin_spreads_ranks_layers_and_steps() -> None:
    """2,048 windows among 2**18 places: some 8 pairs begin alike, by the birthday problem."""
    begins = [routing.window_begin(*salt) for salt in product(range(16), range(16), range(8))]
    assert all(0 <= begin < 2**18 for begin in begins)
    assert len(set(begins)) > len(begins) - 24


def test_route_hashed_follows_shares() -> None:
    table = routing.build_table(int32([0, 0, 0]), int32([6554, 19661, 39321]), 1)
    ids = torch.zeros(100_000, dtype=torch.int32)
    slots, _ = routing.route_hashed(ids, table, 3, 5, 7)
    frequencies = torch.bincount(slots, minlength=3) / len(ids)
    # Five standard deviations of a fair draw; the draw is fixed, so this holds or does not.
    assert (frequencies - torch.tensor([0.1, 0.3, 0.6])).abs().max() < 5 * 0.5 / len(ids) ** 0.5


def test_route_apportioned_rounds_differently_by_rank() -> None:
    one = torch.zeros(1, dtype=torch.int32)
    slots = [int(routing.route_apportioned(one, halves(), rank, 0)[0]) for rank in range(200)]
    assert 60 < sum(slots) < 140


def test_solve_shares_levels_rank_loads() -> None:
    counts = torch.tensor([[30, 10, 20]])
    shares = routing.solve_shares(counts, int32([0, 1, 0, 2])[None], 2)
    assert shares.tolist() == [[43691, 65536, 21845, 65536]]


@pytest.mark.parametrize(
    ("placement", "shares", "message"),
    [
        ([0, 0], [1, 65535], "placement: expected a slot for every expert, none for 1"),
        ([0, 2], [65536, 65536], "placement: expected experts 0 to 1"),
        ([0, 1], [65536, 65535], "shares: expected a sum of 65536 for expert 1, got 65535"),
        ([0, 1, 1], [65536, 65537, -1], "shares: expected 0 to 65536, got -1"),
        ([0, 1], [65536], "shares: expected 2 elements, got 1"),
    ],
)
def test_build_table_refuses_inconsistent_shares(
    placement: list[int], shares: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        routing.build_table(int32(placement), int32(shares), 2)


@pytest.mark.parametrize(
    ("wrong_tensors", "message"),
    [
        ({"start": torch.zeros(2)}, "start: expected int32"),
        ({"start": int32([0])}, "start: expected at least 2 elements, got 1"),
        ({"replicas": int32([0])[None]}, r"replicas: expected int32 \[n\]"),
        ({"cumulative": int32([1, 65536])}, "cumulative: expected 1 elements"),
        ({"cumulative": int32([1]).to("meta")}, "cumulative: expected on cpu, got meta"),
    ],
)
def test_routing_table_refuses_wrong_shapes(wrong_tensors: dict[str, Tensor], message: str) -> None:
    valid_tensors = {"start": int32([0, 1]), "replicas": int32([0]), "cumulative": int32([65536])}
    with pytest.raises(ValueError, match=message):
        routing.RoutingTable(**(valid_tensors | wrong_tensors))


@pytest.mark.parametrize(
    ("placement", "ranks", "message"),
    [
        ([0, 1, 1], 2, "ranks: expected a positive divisor of 3 slots, got 2"),
        ([0, 0, 0], 1, "placement: expected a slot for every expert, none for 1"),
    ],
)
def test_solve_shares_refuses_bad_ranks_or_placement(
    placement: list[int], ranks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        routing.solve_shares(torch.tensor([[1, 1]]), int32(placement)[None], ranks)
