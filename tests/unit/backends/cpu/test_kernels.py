"""Tables and streams of the native kernels: clauses G1, G2."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers.watchdog import WATCHDOG
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.backends.cpu.kernels import CpuKernels
from equipoise.backends.cpu.stream import CpuStream
from equipoise.hal import routing
from equipoise.hal.errors import KernelError, StreamFailed
from equipoise.hal.kernels import Salt, Tables, TableUpdate
from equipoise.hal.routing import RoutingTable
from equipoise.hal.stream import Role

CPU = torch.device("cpu")
KERNELS = CpuKernels()


class ImmediateStream:
    """A stream that runs everything at once."""

    role = Role.COMPUTE

    def launch(self, program: Callable[[], object]) -> None:
        program()


IMMEDIATE: CpuStream = ImmediateStream()  # type: ignore[assignment]


@dataclass(frozen=True)
class World:
    """Tables after several commits, and for each layer the table that the last one installed."""

    tables: Tables
    installed: list[RoutingTable]
    ids: Tensor


def shares_of(placement: Tensor, experts: int, weights: list[int]) -> Tensor:
    """Shares in the ratio of `weights`; what rounding leaves over goes to the first replica."""
    shares = torch.zeros_like(placement)
    for expert in range(experts):
        slots = (placement == expert).nonzero().flatten().tolist()
        total = sum(weights[slot] for slot in slots)
        for slot in slots:
            shares[slot] = weights[slot] * 65536 // total if total else 65536 // len(slots)
        shares[slots[0]] += 65536 - int(shares[slots].sum())
    return shares


@st.composite
def single_tables(draw: st.DrawFn, experts: int, slots: int) -> RoutingTable:
    extra = draw(
        st.lists(st.integers(0, experts - 1), min_size=slots - experts, max_size=slots - experts)
    )
    placement = torch.tensor(draw(st.permutations([*range(experts), *extra])), dtype=torch.int32)
    weights = draw(st.lists(st.integers(0, 9), min_size=slots, max_size=slots))
    return routing.build_table(placement, shares_of(placement, experts, weights), experts)


def update(layers: tuple[int, ...], new: list[RoutingTable]) -> TableUpdate:
    return TableUpdate(
        layers=layers,
        start=torch.stack([table.start for table in new]),
        replicas=torch.stack([table.replicas for table in new]),
        cumulative=torch.stack([table.cumulative for table in new]),
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    layers, experts, ranks = draw(
        st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
    )
    slots = ranks * draw(st.integers(-(-experts // ranks), -(-experts // ranks) + 2))
    tables = Tables.empty(layers, experts, slots, ranks, CPU)
    one = single_tables(experts, slots)
    installed = [draw(one) for _ in range(layers)]
    KERNELS.commit_tables(update(tuple(range(layers)), installed), tables, IMMEDIATE)
    for layer_ids in draw(
        st.lists(st.lists(st.integers(0, layers - 1), unique=True, min_size=1), max_size=3)
    ):
        new = [draw(one) for _ in layer_ids]
        KERNELS.commit_tables(update(tuple(layer_ids), new), tables, IMMEDIATE)
        for layer, table in zip(layer_ids, new, strict=True):
            installed[layer] = table
    ids = draw(st.lists(st.integers(-2, experts + 1), max_size=40))
    return World(tables, installed, torch.tensor(ids, dtype=torch.int32))


@given(worlds(), st.data())
def test_commit_tables_changes_only_idle_sets_of_its_layers(
    world: World, data: st.DataObject
) -> None:
    tables = world.tables
    layer = data.draw(st.integers(0, tables.layers - 1))
    new = data.draw(single_tables(tables.experts, tables.slots))
    before = [part.clone() for part in (tables.start, tables.replicas, tables.cumulative)]
    words = tables.generation.clone()
    KERNELS.commit_tables(update((layer,), [new]), tables, IMMEDIATE)
    words[layer] += 1
    assert torch.equal(tables.generation, words)
    fresh = int(words[layer]) & 1
    for old, part, name in zip(
        before,
        (tables.start, tables.replicas, tables.cumulative),
        ("start", "replicas", "cumulative"),
        strict=True,
    ):
        old[fresh, layer] = getattr(new, name)
        assert torch.equal(part, old)


class Spy(Tensor):
    """A tensor that writes down, in order, which part of the tables is written."""

    write_log: list[str]
    label: str

    def __setitem__(self, key: Any, value: Any) -> None:
        self.write_log.append(self.label)
        super().__setitem__(key, value)

    def __getitem__(self, key: Any) -> Tensor:
        part = super().__getitem__(key).as_subclass(Spy)
        part.write_log, part.label = self.write_log, self.label
        return part

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Tensor:
        self.write_log.append(self.label)
        return super().copy_(other, non_blocking)


def spy_on(tensor: Tensor, label: str, log: list[str]) -> Tensor:
    spy = tensor.as_subclass(Spy)
    spy.write_log, spy.label = log, label
    return spy


def test_commit_tables_writes_generation_last() -> None:
    log: list[str] = []
    table = routing.build_table(
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([65536, 65536]).int(), 2
    )
    empty = Tables.empty(1, 2, 2, 1, CPU)
    tables = Tables(
        generation=spy_on(empty.generation, "generation", log),
        start=spy_on(empty.start, "start", log),
        replicas=spy_on(empty.replicas, "replicas", log),
        cumulative=spy_on(empty.cumulative, "cumulative", log),
        ranks=empty.ranks,
    )
    KERNELS.commit_tables(update((0,), [table]), tables, IMMEDIATE)
    assert sorted(log[:-1]) == ["cumulative", "replicas", "start"]
    assert log[-1] == "generation"


@pytest.mark.parametrize("part", ["start", "replicas", "cumulative"])
def test_refused_commit_tables_keeps_installed_tables(part: str) -> None:
    table = routing.build_table(
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([65536, 65536]).int(), 2
    )
    tables = Tables.empty(1, 2, 2, 1, CPU)
    KERNELS.commit_tables(update((0,), [table]), tables, IMMEDIATE)
    wrong_parts: dict[str, Any] = {part: torch.zeros(1, 7, dtype=torch.int32)}
    invalid_update = replace(update((0,), [table]), **wrong_parts)
    with pytest.raises(KernelError, match=f"{part}: expected int32"):
        KERNELS.commit_tables(invalid_update, tables, IMMEDIATE)
    assert tables.generation.tolist() == [1]
    assert torch.equal(tables.replicas[1, 0], table.replicas)


def test_checksum_refuses_strided_tensor() -> None:
    with pytest.raises(KernelError, match="C-contiguous"):
        KERNELS.checksum(torch.zeros(3, 2).t(), torch.zeros(1, dtype=torch.int64), IMMEDIATE)


@pytest.fixture
def stream() -> Iterator[CpuStream]:
    cpu_stream = CpuStream(Role.COMPUTE, "test")
    yield cpu_stream
    cpu_stream.close(WATCHDOG)


def test_kernel_error_fails_its_stream(stream: CpuStream) -> None:
    nothing = Tables.empty(1, 2, 2, 1, CPU)  # it has no tables yet
    slots, counts = torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    KERNELS.route_and_count(torch.zeros_like(slots), nothing, Salt(0, 0, 0), slots, counts, stream)
    with pytest.raises(StreamFailed):
        stream.synchronize(WATCHDOG)
