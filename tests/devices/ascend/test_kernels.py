"""Kernels of the NPU against the reference: clauses D4, G1 to G6, G13."""

from typing import Any

import pytest
import torch
from helpers.watchdog import WATCHDOG
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.backends.ascend import BACKEND, hashing, npu_runtime
from equipoise.backends.ascend.accelerator import AscendAccelerator
from equipoise.backends.ascend.host_functions import MIN_CAPACITY
from equipoise.backends.ascend.lookup_tables import replica_tables_of
from equipoise.backends.devices.stream import DeviceStream
from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.errors import KernelError, StreamFailed, StreamTimeout
from equipoise.hal.kernels import Salt, Tables, TableUpdate
from equipoise.hal.levelled_routing import GroupCounts, route_levelled
from equipoise.hal.routing import (
    RoutingTable,
    build_table,
    count_experts,
    mix32,
    route_apportioned,
    route_hashed,
    solve_cumulative,
)
from equipoise.hal.routing_rules import BlockTurns, RowHash, route_by_rule
from equipoise.hal.stream import Role

BRIEF = 0.05
EXPERTS, SLOTS, RANKS, LAYERS = 5, 8, 2, 2
ANY_SHARES = st.lists(st.integers(0, 65536), min_size=SLOTS, max_size=SLOTS)
ANY_IDS = st.lists(st.integers(-2, EXPERTS + 1), max_size=80)
ANY_GROUP = st.none() | st.lists(st.integers(0, 99), min_size=2 * EXPERTS, max_size=2 * EXPERTS)
"""Counts of the ranks before, then of those after; or no group."""


@pytest.fixture(scope="module")
def open_npu() -> AscendAccelerator:
    """Stays open: hypothesis plays many examples on it."""
    return BACKEND.open(0)


def table(weights: list[int]) -> RoutingTable:
    """Experts over the slots in turn; the first replica takes what the weights leave over."""
    placement = torch.arange(SLOTS, dtype=torch.int32) % EXPERTS
    shares = torch.zeros(SLOTS, dtype=torch.int32)
    for expert in range(EXPERTS):
        slots = (placement == expert).nonzero().flatten().tolist()
        for slot in slots[1:]:
            shares[slot] = weights[slot] // len(slots)
        shares[slots[0]] = 65536 - int(shares[slots].sum())
    return build_table(placement, shares, EXPERTS)


def shares_at_first_replicas(placement: Tensor) -> Tensor:
    """For tables whose shares are not read."""
    shares = torch.zeros(SLOTS, dtype=torch.int32)
    for expert in range(EXPERTS):
        shares[int((placement == expert).nonzero()[0])] = 65536
    return shares


def update(layer: int, rows: RoutingTable) -> TableUpdate:
    return TableUpdate((layer,), rows.start[None], rows.replicas[None], rows.cumulative[None])


def on(npu: AscendAccelerator, values: Tensor) -> Tensor:
    copy = values.to(npu.device)
    npu_runtime.npu().current_stream().synchronize()
    return copy


def fresh(npu: AscendAccelerator) -> Tables:
    tables = Tables.empty(LAYERS, EXPERTS, SLOTS, RANKS, npu.device)
    npu_runtime.npu().current_stream().synchronize()
    return tables


def outputs(npu: AscendAccelerator, tokens: int) -> tuple[Tensor, Tensor]:
    buffers = (on(npu, torch.full((n,), -1, dtype=torch.int32)) for n in (tokens, EXPERTS))
    return next(buffers), next(buffers)


@settings(max_examples=20)
@given(ANY_IDS, ANY_SHARES, st.integers(0, 3), st.sampled_from((0, 7, 2**32 - 1)))
def test_routing_equals_the_reference(
    open_npu: AscendAccelerator, drawn_ids: list[int], weights: list[int], rank: int, step: int
) -> None:
    npu, stream = open_npu, open_npu.stream(Role.COMPUTE)
    routing, ids, live = table(weights), torch.tensor(drawn_ids, dtype=torch.int32), fresh(npu)
    npu.kernels.commit_tables(update(1, routing), live, stream)
    slots, counts = outputs(npu, ids.numel())
    npu.kernels.route_and_count(on(npu, ids), live, Salt(rank, 1, step), slots, counts, stream)
    stream.synchronize(WATCHDOG)
    assert slots.tolist() == route_hashed(ids, routing, rank, 1, step)[0].tolist()
    assert counts.tolist() == count_experts(ids, EXPERTS).tolist()
    slots, counts = outputs(npu, ids.numel())
    shares = on(npu, routing.cumulative)
    npu.kernels.route_apportioned(
        on(npu, ids), live, shares, Salt(rank, 1, step), slots, counts, stream
    )
    stream.synchronize(WATCHDOG)
    assert slots.tolist() == route_apportioned(ids, routing, rank, 1)[0].tolist()
    assert counts.tolist() == count_experts(ids, EXPERTS).tolist()


@settings(max_examples=20)
@given(ANY_IDS, st.sampled_from((1, 40)), st.integers(0, 5), st.sampled_from((0, 7, 2**31 - 1)))
def test_route_by_rule_equals_the_reference(
    open_npu: AscendAccelerator, drawn_ids: list[int], repeat: int, number: int, rows: int
) -> None:
    npu, stream = open_npu, open_npu.stream(Role.COMPUTE)
    routing, ids, live = table([0] * SLOTS), torch.tensor(drawn_ids * repeat).int(), fresh(npu)
    npu.kernels.commit_tables(update(1, routing), live, stream)
    real_rows = torch.tensor([rows], dtype=torch.int32)
    turns = BlockTurns(number)
    for rule, reference in (
        (turns, turns),
        (RowHash(number + 1, on(npu, real_rows)), RowHash(number + 1, real_rows)),
    ):
        slots, counts = outputs(npu, ids.numel())
        npu.kernels.route_by_rule(rule, on(npu, ids), live, 1, slots, counts, stream)
        stream.synchronize(WATCHDOG)
        expected = route_by_rule(ids, routing, reference)
        assert slots.tolist() == expected[0].tolist()
        assert counts.tolist() == expected[1].tolist()


@settings(max_examples=20)
@given(st.lists(st.integers(0, 1 << 24), min_size=EXPERTS, max_size=EXPERTS), st.booleans())
def test_solve_shares_equals_the_reference_on_any_stream(
    open_npu: AscendAccelerator, load: list[int], other: bool
) -> None:
    npu, stream = open_npu, open_npu.stream(Role.AUX if other else Role.COMPUTE)
    routing, live = table([30000] * SLOTS), fresh(npu)
    npu.kernels.commit_tables(update(0, routing), live, stream)
    out = on(npu, torch.zeros(SLOTS, dtype=torch.int32))
    npu.kernels.solve_shares(on(npu, torch.tensor(load)), live, 0, out, stream)
    stream.synchronize(WATCHDOG)
    assert out.tolist() == solve_cumulative(torch.tensor(load), routing, RANKS).tolist()


@settings(max_examples=20)
@given(ANY_IDS, st.sampled_from((1, 40)), ANY_GROUP, st.integers(0, 3), st.booleans())
def test_route_levelled_equals_the_reference_on_any_stream(
    open_npu: AscendAccelerator,
    drawn_ids: list[int],
    repeat: int,
    others: list[int] | None,
    rank: int,
    other: bool,
) -> None:
    """Forty times a batch takes memory of other sizes, which examples share."""
    npu, stream = open_npu, open_npu.stream(Role.AUX if other else Role.COMPUTE)
    routing, ids, live = table([0] * SLOTS), torch.tensor(drawn_ids * repeat).int(), fresh(npu)
    npu.kernels.commit_tables(update(1, routing), live, stream)
    group = here = None
    if others is not None:
        before, after = torch.tensor(others, dtype=torch.int32).split(EXPERTS)
        group = GroupCounts(before + count_experts(ids, EXPERTS) + after, before)
        here = GroupCounts(on(npu, group.total), on(npu, group.before))
    slots, counts = outputs(npu, ids.numel())
    npu.kernels.route_levelled(on(npu, ids), live, Salt(rank, 1, 0), here, slots, counts, stream)
    stream.synchronize(WATCHDOG)
    expected = route_levelled(ids, routing, RANKS, rank, 1, group)
    assert slots.tolist() == expected[0].tolist()
    assert counts.tolist() == expected[1].tolist()


@settings(max_examples=20)
@given(st.binary(max_size=70), st.integers(0, 3))
def test_checksums_equal_the_reference(
    open_npu: AscendAccelerator, data: bytes, offset: int
) -> None:
    npu, stream = open_npu, open_npu.stream(Role.COPY)
    values = torch.tensor([0] * offset + list(data), dtype=torch.uint8)
    out = on(npu, torch.zeros(1, dtype=torch.int64))
    npu.kernels.checksum(on(npu, values)[offset:], out, stream)
    stream.synchronize(WATCHDOG)
    assert out.tolist() == [as_int64(checksum(values[offset:]))]


def test_checksum_of_large_data_is_chunked(
    npu: AscendAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "CHUNK", 3)
    data = torch.arange(50, dtype=torch.uint8)
    assert int(hashing.device_checksum(on(npu, data))) == as_int64(checksum(data))


def test_mix32_equals_the_reference(npu: AscendAccelerator) -> None:
    index = torch.tensor([0, 1, 2**16, 2**32 - 1])
    hashes = hashing.mix32(on(npu, index), 3, -1, 2**40 + 5)
    assert hashes.tolist() == mix32(index, 3, -1, 2**40 + 5).tolist()


def test_checksum_refuses_strided_data(npu: AscendAccelerator) -> None:
    data = on(npu, torch.zeros(8, dtype=torch.uint8))[::2]
    with pytest.raises(KernelError, match="C-contiguous"):
        npu.kernels.checksum(data, on(npu, torch.zeros(1)), npu.stream(Role.COPY))


def test_commit_tables_fills_idle_set_of_its_layers_only(
    npu: AscendAccelerator,
) -> None:
    stream, live = npu.stream(Role.COMPUTE), fresh(npu)
    first, second = table([0] * SLOTS), table([65536] * SLOTS)
    both = TableUpdate(
        (1, 0),
        torch.stack([first.start, second.start]),
        torch.stack([first.replicas, second.replicas]),
        torch.stack([first.cumulative, second.cumulative]),
    )
    npu.kernels.commit_tables(both, live, stream)
    npu.kernels.commit_tables(update(1, second), live, stream)
    stream.synchronize(WATCHDOG)
    assert live.generation.tolist() == [1, 2]
    assert live.cumulative[1, 0].tolist() == second.cumulative.tolist()
    assert live.cumulative[1, 1].tolist() == first.cumulative.tolist()
    assert live.cumulative[0, 1].tolist() == second.cumulative.tolist()
    assert live.replicas[0, 0].tolist() == [0] * SLOTS


def test_commit_tables_writes_generation_last(npu: AscendAccelerator) -> None:
    """Order on the stream is order of the calls."""
    live, pointers = fresh(npu), list[int]()

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.__name__.startswith("index_copy_"):
                pointers.append(args[0].untyped_storage().data_ptr())
            return func(*args, **(kwargs or {}))

    stream = npu.stream(Role.COMPUTE)
    derived = replica_tables_of(live, stream)
    with Watching():
        npu.kernels.commit_tables(update(0, table([1] * SLOTS)), live, stream)
    sets = (
        live.start,
        live.replicas,
        live.cumulative,
        derived.replicas,
        derived.runs,
        derived.slots,
    )
    parts = (*sets, derived.words, live.generation)
    assert pointers == [part.untyped_storage().data_ptr() for part in parts]


def test_commit_tables_copies_update_at_call(npu: AscendAccelerator) -> None:
    stream, live, lock = npu.stream(Role.COMPUTE), fresh(npu), npu.stream_lock(WATCHDOG)
    routing = table([1] * SLOTS)
    expected = routing.cumulative.tolist()
    lock.acquire(stream)
    npu.kernels.commit_tables(update(0, routing), live, stream)
    routing.cumulative.fill_(-1)
    lock.signal(0)
    stream.synchronize(WATCHDOG)
    assert live.cumulative[1, 0].tolist() == expected


def test_commit_tables_refuses_duplicate_layer(npu: AscendAccelerator) -> None:
    routing = table([1] * SLOTS)
    twice = TableUpdate(
        (0, 0),
        routing.start.expand(2, -1),
        routing.replicas.expand(2, -1),
        routing.cumulative.expand(2, -1),
    )
    with pytest.raises(KernelError, match="each once"):
        npu.kernels.commit_tables(twice, fresh(npu), npu.stream(Role.COMPUTE))


def launch_all(npu: AscendAccelerator, stream: DeviceStream, live: Tables) -> dict[object, Tensor]:
    """Every kernel, on fresh outputs."""
    ids = on(npu, torch.arange(16, dtype=torch.int32) % EXPERTS)
    slots, counts = outputs(npu, 16)
    load, shares = on(npu, torch.arange(EXPERTS)), on(npu, torch.zeros(SLOTS, dtype=torch.int32))
    total = on(npu, torch.zeros(1, dtype=torch.int64))
    rule = RowHash(2, on(npu, torch.tensor([3], dtype=torch.int32)))
    ruled, turned, levelled = outputs(npu, 16), outputs(npu, 16), outputs(npu, 16)
    npu.kernels.solve_shares(load, live, 0, shares, stream)
    npu.kernels.route_apportioned(ids, live, shares, Salt(0, 0, 0), slots, counts, stream)
    npu.kernels.route_by_rule(rule, ids, live, 0, *ruled, stream)
    npu.kernels.route_by_rule(BlockTurns(1), ids, live, 0, *turned, stream)
    npu.kernels.route_levelled(ids, live, Salt(0, 0, 0), None, *levelled, stream)
    npu.kernels.checksum(slots, total, stream)
    results: dict[object, Tensor] = {
        "shares": shares,
        "slots": slots,
        "counts": counts,
        "total": total,
    }
    return results | dict(enumerate((*ruled, *turned, *levelled)))


def test_kernels_never_block_host_and_can_be_captured(npu: AscendAccelerator) -> None:
    stream, live = npu.stream(Role.COMPUTE), fresh(npu)
    npu.kernels.commit_tables(update(0, table([9] * SLOTS)), live, stream)
    eager = launch_all(npu, stream, live)
    stream.synchronize(WATCHDOG)
    expected = {name: tensor.tolist() for name, tensor in eager.items()}
    lock, graph, captured = npu.stream_lock(WATCHDOG), npu.graph(), dict[object, Tensor]()
    lock.acquire(stream)
    launched = launch_all(npu, stream, live)
    graph.capture(stream, lambda: captured.update(launch_all(npu, stream, live)))
    graph.replay(stream)
    with pytest.raises(StreamTimeout):
        stream.synchronize(BRIEF)
    lock.signal(0)
    stream.synchronize(WATCHDOG)
    for results in (launched, captured):
        assert {name: tensor.tolist() for name, tensor in results.items()} == expected


def test_captured_solve_shares_reads_load_at_replay(npu: AscendAccelerator) -> None:
    stream, live, graph = npu.stream(Role.COMPUTE), fresh(npu), npu.graph()
    routing = table([9] * SLOTS)
    npu.kernels.commit_tables(update(0, routing), live, stream)
    load, out = on(npu, torch.zeros(EXPERTS).long()), on(npu, torch.zeros(SLOTS).int())
    graph.capture(stream, lambda: npu.kernels.solve_shares(load, live, 0, out, stream))
    for heaviest in range(EXPERTS):
        rows = torch.ones(EXPERTS, dtype=torch.int64)
        rows[heaviest] = 1000
        load.copy_(rows)
        npu_runtime.npu().current_stream().synchronize()
        graph.replay(stream)
        stream.synchronize(WATCHDOG)
        assert out.tolist() == solve_cumulative(rows, routing, RANKS).tolist()


def test_captured_route_levelled_follows_ids_and_commits(npu: AscendAccelerator) -> None:
    stream, live, graph = npu.stream(Role.COMPUTE), fresh(npu), npu.graph()
    forwards = torch.arange(SLOTS, dtype=torch.int32) % EXPERTS
    tables = [
        build_table(placement, shares_at_first_replicas(placement), EXPERTS)
        for placement in (forwards, forwards.flip(0))
    ]
    ids, out = on(npu, torch.zeros(9).int()), outputs(npu, 9)
    npu.kernels.commit_tables(update(1, tables[0]), live, stream)
    graph.capture(
        stream, lambda: npu.kernels.route_levelled(ids, live, Salt(2, 1, 0), None, *out, stream)
    )
    for step in range(4):
        batch = (torch.arange(9) * (step + 1) % (EXPERTS + 1)).int()
        ids.copy_(batch)
        npu_runtime.npu().current_stream().synchronize()
        npu.kernels.commit_tables(update(1, tables[step % 2]), live, stream)
        graph.replay(stream)
        stream.synchronize(WATCHDOG)
        expected = route_levelled(batch, tables[step % 2], RANKS, 2, 1)
        assert [part.tolist() for part in out] == [part.tolist() for part in expected]


@pytest.fixture
def callbacks(npu: AscendAccelerator, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The argument of each callback that torch_npu was given, all of which it keeps."""
    arguments, real = list[object](), npu_runtime.npu()._launch_host_func
    monkeypatch.setattr(
        npu_runtime.npu(),
        "_launch_host_func",
        lambda *args: (arguments.append(args[2]), real(*args)),
    )
    return arguments


def test_captured_solve_shares_has_own_memory(
    npu: AscendAccelerator, callbacks: list[object]
) -> None:
    """A graph may be replayed on any stream, beside what others solve."""
    stream, live = npu.stream(Role.COMPUTE), fresh(npu)
    npu.kernels.commit_tables(update(0, table([9] * SLOTS)), live, stream)
    load, out = on(npu, torch.ones(EXPERTS).long()), on(npu, torch.zeros(SLOTS).int())
    npu.kernels.solve_shares(load, live, 0, out, stream)
    for graph in (npu.graph(), npu.graph()):
        graph.capture(stream, lambda: npu.kernels.solve_shares(load, live, 0, out, stream))
    stream.synchronize(WATCHDOG)
    assert len(set(map(id, callbacks))) == 3


def test_solve_shares_error_fails_its_stream(npu: AscendAccelerator) -> None:
    """The first expert has no slot."""
    stream, out = npu.stream(Role.COMPUTE), on(npu, torch.zeros(SLOTS, dtype=torch.int32))
    load, live = on(npu, torch.ones(EXPERTS, dtype=torch.int64)), fresh(npu)
    malformed = update(0, table([9] * SLOTS))
    malformed.start[0, 1] = 0
    npu.kernels.commit_tables(malformed, live, stream)
    npu.kernels.solve_shares(load, live, 0, out, stream)
    with pytest.raises(StreamFailed) as error:
        stream.synchronize(WATCHDOG)
    assert isinstance(error.value.__cause__, ValueError)


def test_route_levelled_error_fails_its_stream(npu: AscendAccelerator) -> None:
    """The first expert has no slot. What was launched after it still finds slots that exist."""
    stream, live, ids = npu.stream(Role.COMPUTE), fresh(npu), on(npu, torch.arange(4).int())
    npu.kernels.commit_tables(update(0, table([9] * SLOTS)), live, stream)
    malformed = update(0, table([9] * SLOTS))
    malformed.start[0, 1] = 0
    slots, counts = outputs(npu, 4)
    npu.kernels.route_levelled(ids, live, Salt(0, 0, 0), None, slots, counts, stream)
    npu.kernels.commit_tables(malformed, live, stream)
    npu.kernels.route_levelled(ids, live, Salt(0, 0, 0), None, slots, counts, stream)
    with pytest.raises(StreamFailed) as error:
        stream.synchronize(WATCHDOG)
    assert isinstance(error.value.__cause__, ValueError)
    assert slots.tolist() == [0] * 4


def test_solve_shares_launches_host_callback_once(
    npu: AscendAccelerator, callbacks: list[object]
) -> None:
    """torch_npu keeps what it needs of a launched callback for ever."""
    stream, live = npu.stream(Role.COMPUTE), fresh(npu)
    npu.kernels.commit_tables(update(0, table([9] * SLOTS)), live, stream)
    load, out = on(npu, torch.ones(EXPERTS).long()), on(npu, torch.zeros(SLOTS).int())
    for _ in range(5):
        npu.kernels.solve_shares(load, live, 0, out, stream)
    stream.synchronize(WATCHDOG)
    assert len(callbacks) == 1


def test_route_levelled_batches_of_many_sizes_share_callbacks(
    npu: AscendAccelerator, callbacks: list[object]
) -> None:
    """None waits for the one before, and a small batch comes after a large one."""
    stream, live, routing = npu.stream(Role.COMPUTE), fresh(npu), table([9] * SLOTS)
    npu.kernels.commit_tables(update(0, routing), live, stream)
    sizes = (MIN_CAPACITY + 1, 2 * MIN_CAPACITY, MIN_CAPACITY, 7, 0, MIN_CAPACITY - 1)
    batches = [torch.arange(size).int() % (EXPERTS + 1) for size in sizes]
    outs = [outputs(npu, size) for size in sizes]
    for batch, out in zip(batches, outs, strict=True):
        ids = on(npu, batch)
        npu.kernels.route_levelled(ids, live, Salt(0, 0, 0), None, *out, stream)
    stream.synchronize(WATCHDOG)
    assert len(callbacks) == 2
    for batch, out in zip(batches, outs, strict=True):
        expected = route_levelled(batch, routing, RANKS, 0, 0)
        assert [part.tolist() for part in out] == [part.tolist() for part in expected]


def test_host_functions_take_memory_made_in_inference_mode(npu: AscendAccelerator) -> None:
    """An engine launches in that mode first; the callback's thread is not in it."""
    stream, live, routing = npu.stream(Role.COMPUTE), fresh(npu), table([9] * SLOTS)
    load, shares = on(npu, torch.ones(EXPERTS).long()), on(npu, torch.ones(SLOTS).int())
    with torch.inference_mode():
        npu.kernels.solve_shares(load, live, 0, shares, stream)
    npu.kernels.commit_tables(update(0, routing), live, stream)
    npu.kernels.solve_shares(load, live, 0, shares, stream)
    stream.synchronize(WATCHDOG)
    assert shares.tolist() == solve_cumulative(torch.ones(EXPERTS).long(), routing, RANKS).tolist()
