"""What packs and unpacks is captured once, and replayed with other contents (clauses B7, G3)."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from exploration.exchange import oracle
from exploration.exchange.case import PLAIN, Case, Grid
from exploration.exchange.in_process_wire import Table, TableWire
from helpers.rank_programs.tensor_patterns import same
from helpers.watchdog import WATCHDOG
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.backends.cpu import BACKEND
from equipoise.backends.virtual.backend import VirtualBackend
from equipoise.hal.accelerator import Accelerator, Backend
from equipoise.hal.errors import ExchangeError
from equipoise.hal.stream import Role, Stream
from equipoise.pipeline.all_to_all.fixed_capacity import (
    FixedCapacityExchange,
    FixedCombineHandle,
    FixedDispatchHandle,
)
from equipoise.pipeline.all_to_all.formats import Batch, ReceivedRows
from equipoise.pipeline.all_to_all.kernels import BufferSet, CapturedKernels
from equipoise.pipeline.all_to_all.status import StepFitted, StepOverflowed, read_outcome
from equipoise.pipeline.all_to_all.torch_kernels import TorchKernels, device_allocator

BACKENDS: tuple[Backend, ...] = (BACKEND, VirtualBackend())


class Captured:
    """A rank whose device parts are three graphs over persistent tensors.

    Args:
        accelerator: of all ranks; a sequence of launches in one stream.
        case: one batch a step, of equally many tokens in each.
        table: where messages meet.
        rank: its number.
        make: makes its kernels.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        case: Case,
        table: Table,
        rank: int,
        make: type[TorchKernels] = TorchKernels,
    ) -> None:
        form = case.form()
        self.case, self.rank = case, rank
        self.stream = accelerator.stream(Role.COMPUTE)
        self.kernels = make(form, TableWire(table, rank), device_allocator(accelerator.device))
        self.room = self.kernels.buffer_sets[1]
        self.tokens = len(case.steps[0][0][rank])
        self.batch = Batch(
            torch.zeros(self.tokens, case.top_k, dtype=torch.int32),
            tuple(torch.zeros(self.tokens, *r.shape, dtype=r.dtype) for r in form.payloads),
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(case.experts, dtype=torch.int32),
        )
        self.rows = torch.zeros(form.max_entries, *form.result.shape, dtype=form.result.dtype)
        parts: tuple[Callable[[], None], ...] = (self._pack, self._between, self._unpack)
        self.graphs = [accelerator.graph() for _ in parts]
        for graph, part in zip(self.graphs, parts, strict=True):
            graph.capture(self.stream, part)

    def fill(self, step: int) -> None:
        """Other contents at the same addresses."""
        case, batch = self.case, self.batch
        grid = torch.tensor(case.steps[step][0][self.rank]).view(-1, case.top_k)
        payloads = [oracle.payload(case, step, 0, self.rank, n) for n in range(len(case.payloads))]
        contents = [grid, *payloads, torch.tensor([7]), oracle.loads(case, step, 0, self.rank)]
        buffers = [batch.slots, *batch.payloads, batch.generation, batch.loads]
        for tensor, values in zip(buffers, contents, strict=True):
            self.stream.launch(partial(tensor.copy_, values))

    def replay(self, part: int) -> None:
        self.graphs[part].replay(self.stream)

    def carry(self, part: int) -> None:
        carry = (self.kernels.send_rows, self.kernels.send_results)[part]
        carry(self.room, self.stream).wait(self.stream)

    def _pack(self) -> None:
        self.kernels.pack_rows(self.batch, self.room, self.stream)

    def _between(self) -> None:
        self.kernels.unpack_rows(self.room, self.stream)
        self.stream.launch(partial(self.compute, self.room.received))
        self.kernels.pack_results(self.rows, self.room, self.stream)

    def compute(self, arrivals: ReceivedRows) -> None:
        payloads = [arrivals.gather_payload(n) for n in range(len(self.case.payloads))]
        slots = arrivals.entry_slots + self.rank * self.case.per_rank
        self.rows.copy_(oracle.expert(payloads, self.case.experts_of(slots), self.case.result))

    def _unpack(self) -> None:
        self.kernels.unpack_results(self.tokens, self.room, self.stream)


@st.composite
def steps(draw: st.DrawFn) -> list[list[list[Grid]]]:
    """Three steps of a batch each, in which every rank has as many tokens as in the others."""
    tokens = [draw(st.integers(0, 3)) for _ in range(3)]
    ids = st.integers(0, 7)
    return [
        [
            [
                draw(st.lists(st.lists(ids, min_size=2, max_size=2), min_size=n, max_size=n))
                for n in tokens
            ]
        ]
        for _ in range(3)
    ]


class EagerKernels(TorchKernels):
    """Sorts when it is asked to, not when the stream comes to it."""

    def pack_rows(self, batch: Batch, buffer_set: BufferSet, stream: Stream) -> None:
        early_batch = replace(batch, slots=batch.slots.clone())
        super().pack_rows(early_batch, buffer_set, stream)


def differences(backend: Backend, case: Case, make: type[TorchKernels] = TorchKernels) -> list[str]:
    """What differs from the dense reference, step by step."""
    accelerator, table = backend.open(0), Table(case.size)
    ranks = [Captured(accelerator, case, table, rank, make) for rank in range(case.size)]
    messages: list[str] = []
    for step in range(len(case.steps)):
        for rank in ranks:
            rank.fill(step)
        for part in range(3):
            for rank in ranks:
                rank.replay(part)
            for rank in ranks if part < 2 else ():
                rank.carry(part)
        accelerator.synchronize(WATCHDOG)
        messages += [what for rank in ranks for what in _differences(case, step, rank)]
    accelerator.close()
    return messages


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@settings(max_examples=40)
@given(steps=steps(), capacity=st.integers(1, 3))
def test_exchange_graph_replay_matches_dense_reference(
    backend: Backend, steps: list[list[list[Grid]]], capacity: int
) -> None:
    assert (
        differences(backend, replace(PLAIN, steps=steps, capacity=capacity, result_capacity=6))
        == []
    )


def test_exchange_kernels_that_sort_off_stream_are_rejected() -> None:
    grids = [[[0, 3]], [[2, 5]], [[4, 1]]]
    case = replace(PLAIN, steps=[[grids], [grids[::-1]]])
    assert differences(BACKEND, case) == []
    assert differences(BACKEND, case, EagerKernels) != []


def _differences(case: Case, step: int, rank: Captured) -> list[str]:
    over, fits = oracle.excess(case, step), oracle.excess(case, step) == oracle.Excess(0, 0)
    expected = StepFitted(0) if fits else StepOverflowed(over.rows, over.results)
    messages = [f"step {step}: words"] * (read_outcome([rank.room.status.tolist()]) != expected)
    rank.room.status.zero_()
    if fits:
        results = rank.room.results[: rank.tokens].contiguous()
        messages += ["results"] * (not same(results, oracle.dense(case, step, 0, rank.rank)))
        loads = [oracle.loads(case, step, 0, peer) for peer in range(case.size)]
        messages += ["loads"] * (not torch.equal(rank.room.received.loads, torch.stack(loads)))
    return messages


class CapturedRank:
    """A rank of an exchange whose kernels capture themselves; batch and results are persistent."""

    def __init__(self, accelerator: Accelerator, case: Case, table: Table, rank: int) -> None:
        self.inner = Captured(accelerator, case, table, rank)
        self.kernels = CapturedKernels(self.inner.kernels, accelerator.graph, MOST)
        self.exchange = FixedCapacityExchange(case.form(), self.kernels, accelerator)

    def dispatch(self, step: int) -> FixedDispatchHandle:
        self.inner.fill(step)
        return self.exchange.dispatch(self.inner.batch, self.inner.stream)

    def combine(self, handle: FixedDispatchHandle) -> FixedCombineHandle:
        rank, stream = self.inner, self.inner.stream
        arrivals = handle.wait(stream)
        stream.launch(lambda: rank.compute(arrivals))
        return handle.combine(rank.rows, stream)

    def take(self, back: FixedCombineHandle, into: list[Tensor]) -> None:
        stream = self.inner.stream
        results = back.wait(stream)
        stream.launch(lambda: into.append(results.clone()))
        back.release(stream)


MOST = 8
"""Graphs of a rank: four launches in two buffer sets."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@settings(max_examples=20)
@given(steps=steps())
def test_captured_exchange_reuses_graphs_of_first_steps(
    backend: Backend, steps: list[list[list[Grid]]]
) -> None:
    case = replace(PLAIN, steps=[*steps, *steps])
    accelerator, table = backend.open(0), Table(case.size)
    ranks = [CapturedRank(accelerator, case, table, rank) for rank in range(case.size)]
    for step in range(len(case.steps)):
        results: list[Tensor] = []
        dispatches = [rank.dispatch(step) for rank in ranks]
        combines = [rank.combine(s) for rank, s in zip(ranks, dispatches, strict=True)]
        for rank, b in zip(ranks, combines, strict=True):
            rank.take(b, results)
        accelerator.synchronize(WATCHDOG)
        dense = [oracle.dense(case, step, 0, rank) for rank in range(case.size)]
        assert all(same(f, d) for f, d in zip(results, dense, strict=True))
    assert [rank.kernels.num_graphs for rank in ranks] == [MOST] * case.size
    accelerator.close()


def test_captured_kernels_refuse_more_graphs_than_limit() -> None:
    case = replace(PLAIN, size=1, steps=[[[[[0, 1]]]]])
    accelerator = BACKEND.open(0)
    inner = Captured(accelerator, case, Table(1), 0)
    kernels = CapturedKernels(inner.kernels, accelerator.graph, 2)
    for _ in range(2):
        kernels.pack_rows(replace(inner.batch), kernels.buffer_sets[0], inner.stream)
    with pytest.raises(ExchangeError, match="2 graphs are not enough"):
        kernels.pack_rows(replace(inner.batch), kernels.buffer_sets[0], inner.stream)
    assert kernels.num_graphs == 2
    accelerator.close()
