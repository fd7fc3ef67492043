"""Every kernel of the backend as the contract calls it, on a device that runs at once."""

import gc
import weakref

import pytest
import torch
from helpers.fakes import synchronous_runtime as immediate
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.backends.cuda import kernel_launcher
from equipoise.backends.cuda.kernel_launcher import CudaKernels, Workspaces, kernel_module
from equipoise.backends.devices import memory
from equipoise.backends.devices.stream import DeviceStream
from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.errors import KernelError, StreamFailed
from equipoise.hal.kernels import Kernels, Salt, Tables, TableUpdate
from equipoise.hal.levelled_routing import GroupCounts, route_levelled
from equipoise.hal.routing import (
    RoutingTable,
    build_table,
    count_experts,
    route_apportioned,
    route_hashed,
    solve_cumulative,
)
from equipoise.hal.routing_rules import BlockTurns, RowHash, route_by_rule

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="compiled kernels take no tensors of the host"
    ),
]
EXPERTS, SLOTS, RANKS, LAYERS = 5, 8, 2, 2
IDS = torch.tensor([0, 4, -1, 3, 3, 5, 1, 2, 0, 0, 4, 1], dtype=torch.int32)


@pytest.fixture
def stream() -> DeviceStream:
    return immediate.stream()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> CudaKernels:
    """On the host: it has no page-locked memory, and no stream is current."""
    monkeypatch.setattr(memory, "pinned", lambda n: torch.empty(n, dtype=torch.uint8))
    return CudaKernels(immediate.DEVICE)


def table(first: int) -> RoutingTable:
    """Shares of which the first replica of each expert takes the more, the greater `first`."""
    placement = torch.arange(SLOTS, dtype=torch.int32) % EXPERTS
    shares = torch.full((SLOTS,), 65536, dtype=torch.int32)
    for slot in range(EXPERTS, SLOTS):
        shares[slot - EXPERTS], shares[slot] = first, 65536 - first
    return build_table(placement, shares, EXPERTS)


def update(layer: int, routing_table: RoutingTable) -> TableUpdate:
    return TableUpdate(
        (layer,),
        routing_table.start[None],
        routing_table.replicas[None],
        routing_table.cumulative[None],
    )


def make_tables(kernels: CudaKernels, stream: DeviceStream) -> tuple[Tables, list[RoutingTable]]:
    """Two layers with tables of their own; the second was committed twice."""
    tables = Tables.empty(LAYERS, EXPERTS, SLOTS, RANKS, immediate.DEVICE.torch)
    kernels.commit_tables(update(0, table(20_000)), tables, stream)
    kernels.commit_tables(update(1, table(1)), tables, stream)
    kernels.commit_tables(update(1, table(50_000)), tables, stream)
    stream.synchronize(WATCHDOG)
    assert tables.generation.tolist() == [1, 2]
    return tables, [table(20_000), table(50_000)]


def outputs() -> tuple[Tensor, Tensor]:
    return torch.full_like(IDS, 99), torch.full((EXPERTS,), 99, dtype=torch.int32)


def test_cuda_kernels_implement_kernels_protocol(kernels: CudaKernels) -> None:
    assert isinstance(kernels, Kernels)


def test_warm_leaves_tables_unchanged(kernels: CudaKernels, stream: DeviceStream) -> None:
    tables, _ = make_tables(kernels, stream)
    before = [part.clone() for part in (tables.start, tables.replicas, tables.cumulative)]
    kernels.warm(tables, stream)
    stream.synchronize(WATCHDOG)
    assert tables.generation.tolist() == [1, 2]
    for part, was in zip((tables.start, tables.replicas, tables.cumulative), before, strict=True):
        assert torch.equal(part, was)


def test_count_equals_the_reference(kernels: CudaKernels, stream: DeviceStream) -> None:
    counts = outputs()[1]
    for _ in range(2):  # the second time in a workspace that was used
        kernels.count(IDS, counts, stream)
        stream.synchronize(WATCHDOG)
        assert counts.tolist() == count_experts(IDS, EXPERTS).tolist()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_route_and_count_equals_the_reference(
    kernels: CudaKernels, stream: DeviceStream, layer: int
) -> None:
    tables, host_tables = make_tables(kernels, stream)
    slots, counts = outputs()
    kernels.route_and_count(IDS, tables, Salt(3, layer, 7), slots, counts, stream)
    stream.synchronize(WATCHDOG)
    expected = route_hashed(IDS, host_tables[layer], 3, layer, 7)
    assert [slots.tolist(), counts.tolist()] == [part.tolist() for part in expected]


def test_route_apportioned_equals_the_reference(kernels: CudaKernels, stream: DeviceStream) -> None:
    tables, host_tables = make_tables(kernels, stream)
    slots, counts = outputs()
    cumulative = solve_cumulative(torch.tensor([9, 1, 1, 1, 4]), host_tables[0], RANKS)
    kernels.route_apportioned(IDS, tables, cumulative, Salt(1, 0, 2), slots, counts, stream)
    stream.synchronize(WATCHDOG)
    routing_table = RoutingTable(host_tables[0].start, host_tables[0].replicas, cumulative)
    expected = route_apportioned(IDS, routing_table, 1, 0)
    assert [slots.tolist(), counts.tolist()] == [part.tolist() for part in expected]


@pytest.mark.parametrize(
    "group", [None, GroupCounts(torch.full((EXPERTS,), 9).int(), torch.full((EXPERTS,), 4).int())]
)
def test_route_levelled_equals_the_reference(
    kernels: CudaKernels, stream: DeviceStream, group: GroupCounts | None
) -> None:
    tables, host_tables = make_tables(kernels, stream)
    slots, counts = outputs()
    kernels.route_levelled(IDS, tables, Salt(1, 0, 2), group, slots, counts, stream)
    stream.synchronize(WATCHDOG)
    expected = route_levelled(IDS, host_tables[0], RANKS, 1, 0, group)
    assert [slots.tolist(), counts.tolist()] == [part.tolist() for part in expected]


@pytest.mark.parametrize("rule", [RowHash(3, torch.tensor([3], dtype=torch.int32)), BlockTurns(1)])
def test_route_by_rule_equals_the_reference(
    kernels: CudaKernels, stream: DeviceStream, rule: RowHash | BlockTurns
) -> None:
    tables, host_tables = make_tables(kernels, stream)
    slots, counts = outputs()
    kernels.route_by_rule(rule, IDS, tables, 1, slots, counts, stream)
    stream.synchronize(WATCHDOG)
    expected = route_by_rule(IDS, host_tables[1], rule)
    assert [slots.tolist(), counts.tolist()] == [part.tolist() for part in expected]


def test_solve_shares_equals_the_reference(kernels: CudaKernels, stream: DeviceStream) -> None:
    tables, host_tables = make_tables(kernels, stream)
    counts, shares = torch.tensor([90, 3, 7, 1, 40]), torch.zeros(SLOTS, dtype=torch.int32)
    kernels.solve_shares(counts, tables, 1, shares, stream)
    stream.synchronize(WATCHDOG)
    assert shares.tolist() == solve_cumulative(counts, host_tables[1], RANKS).tolist()


def test_checksum_equals_the_reference(kernels: CudaKernels, stream: DeviceStream) -> None:
    data, out = torch.arange(41, dtype=torch.int16)[1:], torch.zeros(1, dtype=torch.int64)
    kernels.checksum(data, out, stream)
    stream.synchronize(WATCHDOG)
    assert out.tolist() == [as_int64(checksum(data))]
    with pytest.raises(KernelError, match="C-contiguous"):
        kernels.checksum(data[::2], out, stream)


def test_commit_tables_refuses_duplicate_layer(kernels: CudaKernels, stream: DeviceStream) -> None:
    tables = Tables.empty(LAYERS, EXPERTS, SLOTS, RANKS, immediate.DEVICE.torch)
    routing_table = table(5)
    start, replicas, cumulative = (
        part.expand(2, -1)
        for part in (routing_table.start, routing_table.replicas, routing_table.cumulative)
    )
    with pytest.raises(KernelError, match="each once"):
        kernels.commit_tables(TableUpdate((0, 0), start, replicas, cumulative), tables, stream)
    assert tables.generation.tolist() == [0, 0]


def test_kernel_error_fails_its_stream(
    kernels: CudaKernels, stream: DeviceStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(kernel_module("counting"), "count", fail)
    kernels.count(IDS, outputs()[1], stream)
    with pytest.raises(StreamFailed, match="shared memory"):
        stream.synchronize(WATCHDOG)


def test_workspace_is_per_stream_and_size() -> None:
    spaces, first, second = Workspaces(immediate.DEVICE), immediate.stream(), immediate.stream()
    sizes = kernel_launcher._sizes(EXPERTS, SLOTS, RANKS)
    mine = spaces.get(first, sizes)
    assert spaces.get(first, sizes) is mine
    assert spaces.get(second, sizes) is not mine
    assert spaces.get(first, kernel_launcher._sizes(EXPERTS, SLOTS, 1)) is not mine


def test_workspace_is_freed_with_its_stream() -> None:
    spaces, passing = Workspaces(immediate.DEVICE), immediate.stream()
    space = weakref.ref(spaces.get(passing, kernel_launcher._sizes(EXPERTS, SLOTS, RANKS)))
    assert space() is not None
    del passing
    gc.collect()
    assert space() is None
