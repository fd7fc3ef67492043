"""What routing kernels are tried on: live tables of one layer among several, and batches."""

from dataclasses import dataclass, replace

import torch
from helpers.harnesses.triton_interpreter import DEVICE
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.kernels import Tables
from equipoise.hal.levelled_routing import GroupCounts
from equipoise.hal.routing import RoutingTable, build_table, count_experts

WORD = st.integers(0, 2**32 - 1)
MAX_REPLICAS = 64


@dataclass(frozen=True)
class Shape:
    """Sizes of a table. A device compiles a kernel anew for each: so they are few."""

    layers: int
    experts: int
    ranks: int
    slots: int


SHAPES = (
    Shape(1, 1, 1, 1),
    Shape(2, 1, 5, 5),
    Shape(3, 3, 2, 8),
    Shape(1, 4, 4, 4),
    Shape(2, 5, 3, 15),
    Shape(1, 6, 5, 20),
    Shape(1, 2, 3, MAX_REPLICAS + 2),
)


@dataclass(frozen=True)
class World:
    """A table on the host, and tables on the device in which it is a layer's live one."""

    table: RoutingTable
    tables: Tables
    layer: int


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[int], Shape]:
    """Every expert has a slot; the others are any expert's, or all of one."""
    shape = draw(st.sampled_from(SHAPES))
    rest, one = shape.slots - shape.experts, st.integers(0, shape.experts - 1)
    extra = draw(st.lists(one, min_size=rest, max_size=rest) | one.map(lambda held: [held] * rest))
    return draw(st.permutations([*range(shape.experts), *extra])), shape


@st.composite
def tables(draw: st.DrawFn) -> tuple[RoutingTable, Shape]:
    """A table with any shares."""
    placement, shape = draw(placements())
    experts = shape.experts
    weights = draw(st.lists(st.integers(0, 9), min_size=len(placement), max_size=len(placement)))
    shares = [0] * len(placement)
    for expert in range(experts):
        slots = [slot for slot, slot_expert in enumerate(placement) if slot_expert == expert]
        total = sum(weights[slot] for slot in slots)
        for slot in slots:
            shares[slot] = weights[slot] * 65536 // total if total else 0
        shares[slots[draw(st.integers(0, len(slots) - 1))]] += 65536 - sum(
            shares[slot] for slot in slots
        )
    return build_table(int32(placement), int32(shares), experts), shape


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """The table stands in either set of any layer; elsewhere is what would fit another."""
    table, shape = draw(tables())
    layer, word = draw(st.integers(0, shape.layers - 1)), draw(st.integers(0, 5))
    return installed(table, shape.ranks, shape.layers, layer, word)


def installed(
    table: RoutingTable, ranks: int, layers: int = 1, layer: int = 0, word: int = 1
) -> World:
    host_tables = Tables.empty(layers, table.experts, table.slots, ranks, torch.device("cpu"))
    host_tables.replicas.fill_(table.slots - 1)
    host_tables.cumulative.fill_(1)
    host_tables.generation[layer] = word
    for part in ("start", "replicas", "cumulative"):
        getattr(host_tables, part)[word & 1, layer] = getattr(table, part)
    return World(table, copied_to(host_tables, DEVICE), layer)


def copied_to(tables: Tables, device: torch.device) -> Tables:
    """A copy."""
    return replace(
        tables,
        generation=tables.generation.clone().to(device),
        start=tables.start.clone().to(device),
        replicas=tables.replicas.clone().to(device),
        cumulative=tables.cumulative.clone().to(device),
    )


def batches(experts: int, most: int = 150) -> st.SearchStrategy[Tensor]:
    """Expert ids with padding on both sides; some batches are all of one kind."""
    one = st.integers(-2, experts + 1)
    mixed = st.lists(one, max_size=most).map(int32)
    alike = st.builds(lambda kind, size: int32([kind] * size), one, st.integers(0, most))
    return mixed | alike


def groups(ids: Tensor, experts: int) -> st.SearchStrategy[GroupCounts]:
    """What ranks before this one have, and after it: little, or more than int32 holds of parts."""
    one = st.integers(0, 3) | st.integers(0, 1 << 25)
    others = st.lists(one, min_size=experts, max_size=experts).map(int32)

    def group(before: Tensor, after: Tensor) -> GroupCounts:
        return GroupCounts(before + count_experts(ids, experts) + after, before)

    return st.builds(group, others, others)
