"""Routing by tables of replicas: few launches, and the reference's values bit for bit."""

import gc
import os
import weakref
from collections.abc import Callable

import pytest
import torch
from helpers.watchdog import WATCHDOG
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.backends.ascend import BACKEND, lookup_tables, npu_runtime
from equipoise.backends.ascend.accelerator import AscendAccelerator
from equipoise.balancer.experts.placement import ExpertShape
from equipoise.balancer.experts.weights.memory_report import backend_tables
from equipoise.hal.errors import KernelError
from equipoise.hal.kernels import Salt, Tables, TableUpdate
from equipoise.hal.routing import RoutingTable, build_table, count_experts, route_hashed
from equipoise.hal.routing_rules import RowHash, route_by_rule
from equipoise.hal.stream import Role, Stream

LAYERS = 3
HASHED_BAR, RULE_BAR, LEVELLED_BAR, COUNT_BAR = 6, 11, 10, 1
"""Most launches of a pass, per layer; a levelled one has copies and a callback besides."""
FARTHEST = st.sampled_from((-(2**31), -65537, -1, 65536, 2**31 - 1))

needs_counts = pytest.mark.skipif(
    "NPUSIM_SCHEDULE" not in os.environ, reason="only the simulated driver counts its operators"
)


@pytest.fixture(scope="module")
def open_npu() -> AscendAccelerator:
    """Stays open: hypothesis plays many examples on it."""
    return BACKEND.open(0)


def spread(experts: int, slots: int, seed: int) -> RoutingTable:
    """Any placement with any shares, zero included; a few experts have many replicas."""
    random = torch.Generator().manual_seed(seed)
    extra = torch.randint(0, min(experts, 3), (slots - experts,), generator=random)
    order = torch.randperm(slots, generator=random)
    placement = torch.cat([torch.arange(experts), extra])[order].int()
    shares = torch.zeros(slots, dtype=torch.int32)
    for expert in range(experts):
        replicas = (placement == expert).nonzero().flatten()
        cuts = torch.randint(0, 65537, (len(replicas) - 1,), generator=random).sort()[0]
        shares[replicas] = torch.tensor([0, *cuts.tolist(), 65536]).diff().int()
    return build_table(placement, shares, experts)


def update(by_layer: dict[int, RoutingTable]) -> TableUpdate:
    tables = by_layer.values()
    return TableUpdate(
        tuple(by_layer),
        torch.stack([table.start for table in tables]),
        torch.stack([table.replicas for table in tables]),
        torch.stack([table.cumulative for table in tables]),
    )


def on(npu: AscendAccelerator, values: Tensor) -> Tensor:
    copy = values.to(npu.device)
    npu_runtime.npu().current_stream().synchronize()
    return copy


def empty_tables(npu: AscendAccelerator, experts: int, slots: int) -> Tables:
    return Tables.empty(LAYERS, experts, slots, 1, npu.device)


def outputs(npu: AscendAccelerator, tokens: int, experts: int) -> tuple[Tensor, Tensor]:
    """Filled with rubbish, so that what is not written shows."""
    slots, counts = (torch.full((n,), -7, dtype=torch.int32) for n in (tokens, experts))
    return on(npu, slots), on(npu, counts)


def launches(npu: AscendAccelerator, program: Callable[[], object]) -> int:
    """Operators that reach the driver while `program` runs: each is one launch. Views, slices and
    memory are none. What torch makes of a call may be more than one: `index_add` is five here."""
    from npusim.selftest.ops import operators

    stream = npu.stream(Role.COMPUTE)
    stream.synchronize(WATCHDOG)
    before = sum(operators().values())
    program()
    stream.synchronize(WATCHDOG)
    return sum(operators().values()) - before


@needs_counts
@pytest.mark.parametrize(("experts", "slots"), [(256, 288), (257, 300), (5, 8)])
def test_routing_a_layer_takes_few_launches(
    npu: AscendAccelerator, experts: int, slots: int
) -> None:
    """Static and lagged shares are both routed by `route_and_count`; a step of its own each time,
    as where no graph is captured."""
    stream, live = npu.stream(Role.COMPUTE), empty_tables(npu, experts, slots)
    npu.kernels.commit_tables(update({1: spread(experts, slots, 0)}), live, stream)
    ids = on(npu, torch.arange(-2, 2048, dtype=torch.int32) % (experts + 2) - 1)
    out, rule = outputs(npu, ids.numel(), experts), RowHash(8, on(npu, torch.ones(1).int()))

    def hashed(step: int) -> Callable[[], object]:
        salt = Salt(1, 1, step)
        return lambda: npu.kernels.route_and_count(ids, live, salt, *out, stream)

    def ruled() -> None:
        npu.kernels.route_by_rule(rule, ids, live, 1, *out, stream)

    def levelled() -> None:
        npu.kernels.route_levelled(ids, live, Salt(1, 1, 0), None, *out, stream)

    for first in (hashed(0), ruled):
        launches(npu, first)  # sequences are made
    assert [launches(npu, hashed(step)) for step in (1, 2)] == [HASHED_BAR] * 2
    assert launches(npu, ruled) <= RULE_BAR
    assert launches(npu, levelled) <= LEVELLED_BAR
    assert launches(npu, lambda: npu.kernels.count(ids, out[1], stream)) == COUNT_BAR


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int, list[int], list[int]]:
    """Experts, slots, seeds of commits, ids with padding at both ends; also no ids at all."""
    experts = draw(st.sampled_from((1, 2, 5, 24, 257)))
    slots = experts + draw(st.sampled_from((0, 1, 3, 30)))
    seeds = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    inside = st.integers(-2, experts + 1)
    ids = draw(st.lists(st.one_of(inside, inside, inside, FARTHEST), max_size=60))
    return experts, slots, seeds, ids


@settings(max_examples=30)
@given(worlds(), st.integers(0, 40), st.sampled_from((0, 7, 2**32 - 1)), st.integers(0, 9))
def test_passes_of_both_sets_equal_the_reference(
    open_npu: AscendAccelerator,
    world: tuple[int, int, list[int], list[int]],
    rank: int,
    step: int,
    rows: int,
) -> None:
    """Each commit fills the other set; layer 0 has one commit less than layer 2."""
    npu, stream = open_npu, open_npu.stream(Role.COMPUTE)
    experts, slots, seeds, drawn_ids = world
    live, ids = empty_tables(npu, experts, slots), torch.tensor(drawn_ids, dtype=torch.int32)
    real_rows = torch.tensor([rows], dtype=torch.int32)
    here, rule = on(npu, ids), RowHash(3, on(npu, real_rows))
    for turn, seed in enumerate(seeds):
        layers = (2,) if turn == 0 else (2, 0)
        by_layer = {layer: spread(experts, slots, seed + layer) for layer in layers}
        npu.kernels.commit_tables(update(by_layer), live, stream)
        for layer, table in by_layer.items():
            out, ruled = (
                outputs(npu, len(drawn_ids), experts),
                outputs(npu, len(drawn_ids), experts),
            )
            npu.kernels.route_and_count(here, live, Salt(rank, layer, step), *out, stream)
            npu.kernels.route_by_rule(rule, here, live, layer, *ruled, stream)
            stream.synchronize(WATCHDOG)
            expected = route_hashed(ids, table, rank, layer, step)
            assert [part.tolist() for part in out] == [part.tolist() for part in expected]
            expected = route_by_rule(ids, table, RowHash(3, real_rows))
            assert [part.tolist() for part in ruled] == [part.tolist() for part in expected]


@settings(max_examples=10)
@given(worlds())
def test_passes_before_first_commit_stay_inside_the_tables(
    open_npu: AscendAccelerator, world: tuple[int, int, list[int], list[int]]
) -> None:
    """Their slots mean nothing, but padding stays padding and the stream lives."""
    npu, stream = open_npu, open_npu.stream(Role.COMPUTE)
    experts, slots, _, drawn_ids = world
    live, ids = empty_tables(npu, experts, slots), torch.tensor(drawn_ids, dtype=torch.int32)
    out, ruled = outputs(npu, len(drawn_ids), experts), outputs(npu, len(drawn_ids), experts)
    npu.kernels.route_and_count(on(npu, ids), live, Salt(0, 1, 0), *out, stream)
    rows = on(npu, torch.tensor([99], dtype=torch.int32))
    npu.kernels.route_by_rule(RowHash(1, rows), on(npu, ids), live, 1, *ruled, stream)
    stream.synchronize(WATCHDOG)
    for routed, counts in (out, ruled):
        assert routed.tolist() == [0 if 0 <= id < experts else slots for id in drawn_ids]
        assert counts.tolist() == count_experts(ids, experts).tolist()


def test_malformed_tables_stay_inside(npu: AscendAccelerator) -> None:
    """What a pass makes of them is not defined; the stream lives."""
    stream, live = npu.stream(Role.COMPUTE), empty_tables(npu, 4, 6)
    malformed = TableUpdate(
        (0,),
        torch.tensor([[0, 9, -3, 2, 6]], dtype=torch.int32),
        torch.arange(6, dtype=torch.int32)[None],
        torch.tensor([[70000, -5, 65536, 3, 9, 1]], dtype=torch.int32),
    )
    npu.kernels.commit_tables(malformed, live, stream)
    out = outputs(npu, 4, 4)
    ids = on(npu, torch.arange(4, dtype=torch.int32))
    npu.kernels.route_and_count(ids, live, Salt(0, 0, 0), *out, stream)
    stream.synchronize(WATCHDOG)
    assert all(0 <= slot < 6 for slot in out[0].tolist())


def test_captured_pass_follows_commits_and_larger_batches(
    npu: AscendAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is larger than any before is captured all the same; a graph keeps what it reads
    when sequences grow."""
    monkeypatch.setattr(lookup_tables, "MIN_SEQUENCE", 8)
    stream, live, graph = npu.stream(Role.COMPUTE), empty_tables(npu, 5, 9), npu.graph()
    npu.kernels.warm(live, stream)
    ids = torch.arange(-1, 59, dtype=torch.int32) % 7 - 1
    here, out, ruled = on(npu, ids), outputs(npu, 60, 5), outputs(npu, 60, 5)
    rows = torch.tensor([9], dtype=torch.int32)
    rule, salt = RowHash(4, on(npu, rows)), Salt(2, 1, 5)

    def both(here: Tensor, stream: Stream) -> None:
        npu.kernels.route_and_count(here, live, salt, *out, stream)
        npu.kernels.route_by_rule(rule, here, live, 1, *ruled, stream)

    graph.capture(stream, lambda: both(here, stream))
    for seed in range(3):
        table = spread(5, 9, seed)
        npu.kernels.commit_tables(update({1: table}), live, stream)
        graph.replay(stream)
        stream.synchronize(WATCHDOG)
        assert out[0].tolist() == route_hashed(ids, table, 2, 1, 5)[0].tolist()
        expected = route_by_rule(ids, table, RowHash(4, rows))
        assert [part.tolist() for part in ruled] == [part.tolist() for part in expected]
        npu.kernels.count(on(npu, ids.repeat(seed + 2)), out[1], stream)


def test_tables_first_used_in_a_capture_are_refused(npu: AscendAccelerator) -> None:
    stream, live = npu.stream(Role.COMPUTE), empty_tables(npu, 2, 3)
    ids, out = on(npu, torch.zeros(4, dtype=torch.int32)), outputs(npu, 4, 2)
    with pytest.raises(KernelError, match="call `warm` or commit before"):
        npu.graph().capture(
            stream, lambda: npu.kernels.route_and_count(ids, live, Salt(0, 0, 0), *out, stream)
        )


def test_replica_tables_end_with_their_tables(npu: AscendAccelerator) -> None:
    live, stream = empty_tables(npu, 2, 3), npu.stream(Role.COMPUTE)
    derived = weakref.ref(lookup_tables.replica_tables_of(live, stream))
    assert derived() is lookup_tables.replica_tables_of(live, stream)
    del live
    gc.collect()
    assert derived() is None


@pytest.mark.parametrize(
    ("layers", "experts", "slots", "expected_bytes"),
    [(58, 256, 288, 30_960_172), (60, 384, 416, 47_940_724), (94, 128, 144, 25_234_492)],
    ids=["DeepSeek-V3", "Kimi-K2", "Qwen3-235B"],
)
def test_replica_tables_of_published_models_take_stated_bytes(
    npu: AscendAccelerator, layers: int, experts: int, slots: int, expected_bytes: int
) -> None:
    """The figures of docs/ascend.md, and what the memory report counts."""
    live = Tables.empty(layers, experts, slots, 1, npu.device)
    derived = lookup_tables.replica_tables_of(live, npu.stream(Role.COMPUTE))
    buffers = backend_tables(npu, [ExpertShape(layers, experts, slots, 16)])
    assert derived.nbytes == buffers[0].nbytes == expected_bytes
