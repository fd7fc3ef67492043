"""No token reaches a slot that retires, in any share mode and by any rule."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise import _native
from equipoise.balancer.experts.aliases import aliases
from equipoise.balancer.experts.layout import Layout, imbalance, solve_shares
from equipoise.balancer.experts.placement import Shape
from equipoise.balancer.experts.tables import table_update
from equipoise.hal import routing
from equipoise.hal.errors import PlacementError
from equipoise.hal.routing_rules import BlockTurns, RowHash, route_by_rule

UNHURRIED = settings(deadline=None)
SWEEPS = 16
Routed = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A layout, slots of it that retire, and a batch of one layer."""

    layout: Layout
    shape: Shape
    retired: list[tuple[int, int]]
    ids: Tensor

    def tables(self, layer: int) -> routing.RoutingTable:
        layout = replace(self.layout, retired=frozenset(self.retired))
        made = table_update(layout, self.shape, [layer])
        return routing.RoutingTable(made.start[0], made.replicas[0], made.cumulative[0])

    def gone(self, layer: int) -> set[int]:
        return {slot for at, slot in self.retired if at == layer}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    experts, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    slots = ranks * draw(st.integers(-(-experts // ranks), -(-experts // ranks) + 3))
    shape = Shape(draw(st.integers(1, 2)), experts, slots, ranks)
    extra = st.lists(
        st.integers(0, experts - 1), min_size=slots - experts, max_size=slots - experts
    )
    rows = [draw(st.permutations([*range(experts), *draw(extra)])) for _ in range(shape.layers)]
    placement = np.array(rows, dtype=np.int32)
    loads = st.lists(st.integers(0, 50), min_size=experts, max_size=experts)
    load = np.array([draw(loads) for _ in range(shape.layers)], dtype=np.int64)
    retired = []
    for layer, held in enumerate(placement):
        for expert in range(experts):
            run = np.flatnonzero(held == expert).tolist()
            gone = draw(st.lists(st.sampled_from(run), max_size=len(run) - 1, unique=True))
            retired += [(layer, slot) for slot in gone]
    ids = draw(st.lists(st.integers(-1, experts), max_size=12)) * draw(st.sampled_from((1, 30)))
    layout = Layout(placement, solve_shares(load, placement, shape))
    return Case(layout, shape, draw(st.permutations(retired)), torch.tensor(ids).int())


def outputs(case: Case) -> Routed:
    counts = torch.full((case.shape.experts,), -7, dtype=torch.int32)
    return torch.full_like(case.ids, -7), counts


def by_native_kernels(case: Case, table: routing.RoutingTable) -> Iterator[Routed]:
    """Hashed, apportioned by the table's shares, and by those solved for this very batch."""
    parts = (table.start, table.replicas, table.cumulative)
    found = outputs(case)
    _native.route_hashed(case.ids, *parts, 1, 0, 3, *found)
    yield found
    solved = torch.full_like(table.cumulative, -7)
    counts = routing.count_experts(case.ids, case.shape.experts)
    _native.solve_cumulative(counts, *parts[:2], case.shape.ranks, SWEEPS, solved)
    for cumulative in (table.cumulative, solved):
        found = outputs(case)
        _native.route_apportioned(case.ids, *parts[:2], cumulative, 1, 0, *found)
        yield found


def by_the_reference(case: Case, table: routing.RoutingTable) -> Iterator[Routed]:
    """The same passes, in the same order."""
    yield routing.route_hashed(case.ids, table, 1, 0, 3)
    counts = routing.count_experts(case.ids, case.shape.experts)
    solved = routing.solve_cumulative(counts, table, case.shape.ranks, SWEEPS)
    for cumulative in (table.cumulative, solved):
        given = routing.RoutingTable(table.start, table.replicas, cumulative)
        yield routing.route_apportioned(case.ids, given, 1, 0)


def by_rules(case: Case, table: routing.RoutingTable) -> Iterator[Routed]:
    """By the rules of other engines."""
    everything = torch.tensor([2**31 - 1], dtype=torch.int32)
    yield route_by_rule(case.ids, table, RowHash(2, everything))
    yield route_by_rule(case.ids, table, BlockTurns(1))


@UNHURRIED
@given(cases())
def test_routing_never_reaches_retired_slot(case: Case) -> None:
    for layer in range(case.shape.layers):
        table, held = case.tables(layer), case.layout.placement[layer]
        passes = (by_native_kernels, by_the_reference, by_rules)
        for slots, counts in (found for way in passes for found in way(case, table)):
            for expert, slot in zip(case.ids.tolist(), slots.tolist(), strict=True):
                if 0 <= expert < case.shape.experts:
                    assert slot not in case.gone(layer)
                    assert held[slot] == expert
                else:
                    assert slot == case.shape.slots
            assert counts.tolist() == routing.count_experts(case.ids, table.experts).tolist()


@UNHURRIED
@given(cases())
def test_routing_kernels_equal_reference_on_alias_tables(case: Case) -> None:
    table = case.tables(0)
    native, reference = by_native_kernels(case, table), by_the_reference(case, table)
    for found, due in zip(native, reference, strict=True):
        assert [part.tolist() for part in found] == [part.tolist() for part in due]


@UNHURRIED
@given(cases())
def test_routing_of_experts_without_retired_slots_is_unchanged(case: Case) -> None:
    before = table_update(case.layout, case.shape, [0])
    plain = routing.RoutingTable(before.start[0], before.replicas[0], before.cumulative[0])
    touched = {int(case.layout.placement[0, slot]) for slot in case.gone(0)}
    others = ~torch.isin(case.ids, torch.tensor(sorted(touched), dtype=torch.int32))
    ways = (routing.route_hashed(case.ids, t, 1, 0, 3)[0] for t in (plain, case.tables(0)))
    first, second = ways
    assert torch.equal(first[others], second[others])


@UNHURRIED
@given(cases())
def test_carried_shares_equal_shares_of_alias_tables(case: Case) -> None:
    layout = replace(case.layout, retired=frozenset(case.retired))
    carried = layout.carried(case.shape)
    for layer in range(case.shape.layers):
        table, by_slot = case.tables(layer), [0] * case.shape.slots
        for first, last in pairwise(table.start.tolist()):
            before = 0
            for place in range(first, last):
                by_slot[int(table.replicas[place])] += int(table.cumulative[place]) - before
                before = int(table.cumulative[place])
        assert carried[layer].tolist() == by_slot
    assert layout.held[carried > 0].min() >= 0
    load = np.full((case.shape.layers, case.shape.experts), 60, dtype=np.int64)
    applied = replace(case.layout, shares=carried)
    assert (
        imbalance(load, layout, case.shape).tolist()
        == imbalance(load, applied, case.shape).tolist()
    )


@UNHURRIED
@given(cases())
def test_alias_is_a_live_slot_and_on_same_rank_if_possible(case: Case) -> None:
    shape, found = case.shape, aliases(case.layout.placement, case.retired, case.shape)
    for layer, held in enumerate(case.layout.placement):
        gone = case.gone(layer)
        for slot in range(shape.slots):
            alias = int(found[layer, slot])
            assert (alias == slot) == (slot not in gone)
            assert alias not in gone
            assert held[alias] == held[slot]
            near = [
                other
                for other in np.flatnonzero(held == held[slot]).tolist()
                if other not in gone
                and other // shape.slots_per_rank == slot // shape.slots_per_rank
            ]
            assert not near or alias in near


@given(cases(), st.randoms(use_true_random=False))
def test_aliases_ignore_order_of_retired_slots(case: Case, order: object) -> None:
    shuffled = list(case.retired)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    placement = case.layout.placement
    due = aliases(placement, sorted(case.retired), case.shape)
    assert aliases(placement, shuffled, case.shape).tolist() == due.tolist()


def test_aliases_spread_over_remaining_slots() -> None:
    shape = Shape(layers=1, experts=1, slots=6, ranks=6)
    placement = np.zeros((1, 6), dtype=np.int32)
    found = aliases(placement, [(0, 1), (0, 2), (0, 4), (0, 5)], shape)
    assert found.tolist() == [[0, 0, 3, 3, 0, 3]]


def test_aliases_are_assigned_in_ascending_slot_order() -> None:
    """A set of 8 and 1 gives 8 first."""
    shape = Shape(layers=1, experts=2, slots=10, ranks=10)
    placement = np.array([[0, 0, 1, 0, 1, 1, 1, 1, 0, 1]], dtype=np.int32)
    found = aliases(placement, [(0, 8), (0, 1)], shape)
    assert (found[0, 1], found[0, 8]) == (0, 3)


@pytest.mark.parametrize(
    ("retired", "message"),
    [
        ([(0, 0), (0, 2)], "layer 0: no slot of expert 0 stays when slot 0 retires"),
        ([(0, 1)], "layer 0: no slot of expert 1 stays when slot 1 retires"),
        ([(1, 0)], "layer 1 has no slot 0"),
        ([(0, 3)], "layer 0 has no slot 3"),
        ([(0, -1)], "layer 0 has no slot -1"),
    ],
)
def test_aliases_refuse_to_retire_last_slot_of_an_expert(
    retired: list[tuple[int, int]], message: str
) -> None:
    placement = np.array([[0, 1, 0]], dtype=np.int32)
    with pytest.raises(PlacementError, match=message):
        aliases(placement, retired, Shape(layers=1, experts=2, slots=3, ranks=1))
