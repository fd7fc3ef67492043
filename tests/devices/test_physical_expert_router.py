"""Rows of a layer become slots on the engine's stream, and in the graphs that it captures."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.harnesses.devices import KINDS, backend, current_stream, device_of, fresh_stream
from helpers.watchdog import WATCHDOG
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.backends.cpu import BACKEND as CPU
from equipoise.backends.devices.accelerator import DeviceAccelerator
from equipoise.balancer.experts.model_balancer import LayerRouter
from equipoise.balancer.experts.placement import ExpertShape, even_shares
from equipoise.balancer.experts.routing.layer_update import build_tables
from equipoise.balancer.experts.routing.levelled import LocalShareRouter
from equipoise.balancer.experts.routing.routers import TableRouter
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.kernels import Tables
from equipoise.hal.levelled_routing import route_levelled
from equipoise.hal.routing import build_table
from equipoise.hal.stream import Role, Stream
from equipoise.integrations.vllm.counters import COUNTERS
from equipoise.integrations.vllm.eplb import router
from equipoise.integrations.vllm.eplb.router import (
    PhysicalExpertRouter,
    PrecomputedIndices,
    StepCounter,
)
from equipoise.integrations.vllm.streams import (
    DeviceEngineStreams,
    EngineAccelerator,
    EngineStreams,
    HostEngineStreams,
)

SHAPE = ExpertShape(layers=1, experts=4, slots=6, ranks=3)
PLACEMENT = st.lists(st.integers(0, 3), min_size=2, max_size=2).flatmap(
    lambda extra: st.permutations([*range(SHAPE.experts), *extra])
)
ROWS = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=9)
PLAIN = [0, 1, 2, 3, 0, 1]
SAID_ONCE = "ignore:Cannot create tensor with internal format:UserWarning"
"""What torch_npu says once a process."""
pytestmark = pytest.mark.filterwarnings(SAID_ONCE)
FEW = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


ShareRouter = type[TableRouter] | type[LocalShareRouter]


class OneLayer:
    """A balancer of one layer whose experts can be arranged anew."""

    def __init__(
        self, accelerator: Accelerator, streams: EngineStreams, router_type: ShareRouter
    ) -> None:
        device, sizes = accelerator.device, (SHAPE.layers, SHAPE.experts, SHAPE.slots)
        self.streams = streams
        self.device = device
        self.counters = torch.zeros(SHAPE.layers, SHAPE.experts, dtype=torch.int32).to(device)
        self._kernels = accelerator.kernels
        self._tables = Tables.empty(*sizes, ranks=SHAPE.ranks, device=device)
        self._router = router_type(accelerator, self._tables, 0, self.counters)
        self.graph_inputs: tuple[Tensor, ...] = ()
        self.rows = self.with_indices()

    def with_indices(self) -> PhysicalExpertRouter:
        """With indices of its own."""
        indices = PrecomputedIndices(SHAPE.slots, self.device)
        return PhysicalExpertRouter(cast(LayerRouter, self), StepCounter(), self.streams, indices)

    def route(self, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """As `LayerRouter`."""
        return self._router.route(0, step, ids, on)

    def arrange(self, placement: list[int]) -> None:
        """A boundary at which tables are committed; nobody waits."""
        placements = np.array([placement], dtype=np.int32)
        update = build_tables(placements, even_shares(placements, SHAPE.experts), SHAPE, range(1))
        with self.streams.ordered_section():
            self._kernels.commit_tables(update, self._tables, self.streams.compute_stream)

    def scalar(self, count: int) -> Tensor:
        """An int32 scalar of the device."""
        return torch.tensor(count, dtype=torch.int32).to(self.device)

    def ids(self, rows: list[list[int]]) -> Tensor:
        """int64 [rows, top_k], of the device."""
        return torch.tensor(rows).to(self.device)


@pytest.fixture(params=[TableRouter, LocalShareRouter])
def router_type(request: pytest.FixtureRequest) -> ShareRouter:
    """Static or lagged shares, and local ones: neither waits for another rank."""
    chosen: ShareRouter = request.param
    return chosen


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[DeviceAccelerator]:
    accelerator = backend(request.param).open(0)
    assert isinstance(accelerator, DeviceAccelerator)
    yield accelerator
    accelerator.close()


@pytest.fixture(params=["cpu", *KINDS])
def layer(request: pytest.FixtureRequest, router_type: ShareRouter) -> Iterator[OneLayer]:
    accelerator = CPU.open(0) if request.param == "cpu" else backend(request.param).open(0)
    yield within(accelerator, router_type=router_type)
    accelerator.close()


def within(
    accelerator: Accelerator,
    kind: type[DeviceEngineStreams] = DeviceEngineStreams,
    router_type: ShareRouter = TableRouter,
) -> OneLayer:
    """As a setup has it: on a device the engine's stream is the compute stream."""
    if not isinstance(accelerator, DeviceAccelerator):
        host = HostEngineStreams(accelerator.stream(Role.COMPUTE), WATCHDOG)
        return OneLayer(accelerator, host, router_type)
    streams = kind(accelerator, lambda: current_stream(accelerator))
    return OneLayer(
        cast(Accelerator, EngineAccelerator(accelerator, streams.compute_stream)),
        streams,
        router_type,
    )


def check_slots(
    slots: Tensor, rows: list[list[int]], placement: list[int], num_filled: int
) -> None:
    """Rows with a token went to their experts, and all others to slots in turn."""
    actual = slots.tolist()
    assert [[placement[slot] for slot in row] for row in actual[:num_filled]] == rows[:num_filled]
    turns = [place % SHAPE.slots for place in range(2 * len(rows))]
    assert [slot for row in actual[num_filled:] for slot in row] == turns[2 * num_filled :]


def levelled_slots(rows: list[list[int]], placement: list[int]) -> list[int]:
    """Where the reference sends the rows."""
    experts = torch.tensor(placement, dtype=torch.int32)
    shares = torch.from_numpy(even_shares(experts[None].numpy(), SHAPE.experts))[0]
    table = build_table(experts, shares, SHAPE.experts)
    ids = torch.tensor(rows, dtype=torch.int32).view(-1)
    slots, _ = route_levelled(ids, table, SHAPE.ranks, 0, 0)
    levelled: list[int] = slots.tolist()
    return levelled


def rows_by_expert(rows: list[list[int]]) -> list[int]:
    """Rows by expert."""
    return [sum(row.count(expert) for row in rows) for expert in range(SHAPE.experts)]


def captured(
    layer: OneLayer, device: DeviceAccelerator, rows: list[list[int]]
) -> tuple[Any, Tensor]:
    """A graph, and where a replay leaves the slots; on another stream than home, as engines do.

    What it reads belongs to the layer, and stays.
    """
    runtime, theirs = device_of(device).runtime, fresh_stream(device)
    layer.arrange(PLAIN)
    layer.graph_inputs = ids, num_rows = layer.ids(rows), layer.scalar(len(rows))
    device.synchronize(WATCHDOG)
    with runtime.current(theirs):
        layer.rows.to_slots(ids, num_rows)
        theirs.synchronize()
        graph = runtime.begin_capture()
        slots = layer.rows.to_slots(ids, num_rows)
        runtime.end_capture(graph)
    return graph, slots


@FEW
@given(ROWS, PLACEMENT, st.integers(0, 9))
def test_routed_rows_map_to_experts_and_padding_round_robin(
    layer: OneLayer, rows: list[list[int]], placement: list[int], num_filled: int
) -> None:
    batches, counts = COUNTERS.read()["routed_expert_batches"], layer.counters.cpu().clone()
    layer.arrange(placement)
    slots = layer.rows.to_slots(layer.ids(rows), layer.scalar(num_filled))
    assert slots.dtype == torch.int64
    check_slots(slots, rows, placement, min(num_filled, len(rows)))
    assert (layer.counters.cpu() - counts)[0].tolist() == rows_by_expert(rows[:num_filled])
    assert layer.rows.was_called
    assert COUNTERS.read()["routed_expert_batches"] == batches + 1


@FEW
@given(ROWS, PLACEMENT, st.integers(0, 9))
def test_batches_beyond_resident_places_are_mapped_alike(
    layer: OneLayer, rows: list[list[int]], placement: list[int], num_filled: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "PRECOMPUTED_ELEMENTS", 3)
        layer.rows = layer.with_indices()
        layer.arrange(placement)
        slots = layer.rows.to_slots(layer.ids(rows), layer.scalar(num_filled))
    check_slots(slots, rows, placement, min(num_filled, len(rows)))


@pytest.mark.skipif(
    "NPUSIM_SCHEDULE" not in os.environ, reason="only the simulated driver counts its operators"
)
@pytest.mark.parametrize(("dtype", "bar"), [(torch.int32, 5), (torch.int64, 7)])
def test_routed_rows_take_few_launches_beside_the_router(
    device: DeviceAccelerator, dtype: torch.dtype, bar: int
) -> None:
    """Operators that reach the driver, less those of the router; views are none."""
    from npusim.selftest.ops import operators

    layer = within(device)
    layer.arrange(PLAIN)
    ids, num_filled = layer.ids([[0, 1], [2, -1]]).to(dtype), layer.scalar(1)
    layer.rows.to_slots(ids, num_filled)  # what is made once

    def launches(program: Callable[[], object]) -> int:
        device.synchronize(WATCHDOG)
        before = sum(operators().values())
        program()
        device.synchronize(WATCHDOG)
        return sum(operators().values()) - before

    routed = ids.int().contiguous()
    alone = launches(
        lambda: layer.streams.launch_in_forward(lambda stream: layer.route(0, routed, stream))
    )
    assert launches(lambda: layer.rows.to_slots(ids, num_filled)) - alone == bar


@FEW
@given(ROWS, st.lists(PLACEMENT, min_size=1, max_size=3))
def test_captured_graph_follows_table_commits_at_each_replay(
    device: DeviceAccelerator,
    router_type: ShareRouter,
    rows: list[list[int]],
    placements: list[list[int]],
) -> None:
    layer = within(device, router_type=router_type)
    graph, slots = captured(layer, device, rows)
    base = layer.counters.cpu().clone()
    for turn, placement in enumerate(placements, 1):
        layer.arrange(placement)
        graph.replay()
        check_slots(slots.cpu(), rows, placement, len(rows))
        assert (layer.counters.cpu() - base)[0].tolist() == [turn * n for n in rows_by_expert(rows)]
        if router_type is LocalShareRouter:
            assert slots.view(-1).tolist() == levelled_slots(rows, placement)


@FEW
@given(ROWS, st.lists(PLACEMENT, min_size=1, max_size=3))
def test_routed_rows_follow_engine_that_changes_its_stream(
    device: DeviceAccelerator, rows: list[list[int]], placements: list[list[int]]
) -> None:
    layer = within(device)
    layer.arrange(PLAIN)
    ids, num_rows = layer.ids(rows), layer.scalar(len(rows))
    device.synchronize(WATCHDOG)
    with device_of(device).runtime.current(fresh_stream(device)):
        slots_by_commit = []
        for placement in placements:
            layer.arrange(placement)
            slots_by_commit.append(layer.rows.to_slots(ids, num_rows))
        for placement, slots in zip(placements, slots_by_commit, strict=True):
            check_slots(slots.cpu(), rows, placement, len(rows))
        assert layer.counters.cpu()[0].tolist() == [
            len(placements) * n for n in rows_by_expert(rows)
        ]


def append(number: Tensor, digit: int) -> None:
    """One more digit: tells who ran, and when."""
    number.mul_(10).add_(digit)


class AtHome(DeviceEngineStreams):
    """Broken: what belongs to the forward is launched on the stream of the beginning."""

    def launch_in_forward(self, program: Callable[[Stream], object]) -> None:
        self.compute_stream.launch(lambda: program(self.compute_stream))


class Unordered(DeviceEngineStreams):
    """Broken: what is ours is launched at home, wherever the engine is."""

    @contextmanager
    def ordered_section(self) -> Iterator[None]:
        yield


def test_graph_without_captured_routing_is_rejected(device: DeviceAccelerator) -> None:
    layer, rows, placement = within(device, AtHome), [[0, 1], [2, 3]], [3, 2, 1, 0, 3, 2]
    graph, slots = captured(layer, device, rows)
    layer.arrange(placement)
    graph.replay()
    # Whatever lies there: a place where nobody wrote need not hold a slot at all.
    with pytest.raises((AssertionError, IndexError)):
        check_slots(slots.cpu(), rows, placement, len(rows))


@pytest.mark.parametrize("kind", [DeviceEngineStreams, Unordered])
def test_stream_turn_is_ordered_after_and_before_engine_work(
    device: DeviceAccelerator, kind: type[DeviceEngineStreams]
) -> None:
    streams = kind(device, lambda: current_stream(device))
    number = torch.zeros(1, dtype=torch.int64).to(device.device)
    device.synchronize(WATCHDOG)
    digits = []
    with device_of(device).runtime.current(fresh_stream(device)):
        for digit in (1, 3):
            append(number, digit)
            with streams.ordered_section():
                streams.compute_stream.launch(partial(append, number, digit + 1))
        digits.append(int(number))
        number.fill_(5)
        with streams.ordered_section():
            streams.compute_stream.launch(partial(append, number, 0))
            streams.compute_stream.synchronize(WATCHDOG)
        digits.append(int(number))
    device.synchronize(WATCHDOG)
    if kind is DeviceEngineStreams:
        assert digits == [1234, 50]
    elif os.environ.get("NPUSIM_SCHEDULE") == "lazy":
        # 13 as a rule: what is ours has not run yet. It may have, all of it, behind the engine's.
        assert digits != [1234, 50], "nobody waits for anybody"
