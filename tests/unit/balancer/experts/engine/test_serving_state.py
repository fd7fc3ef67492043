"""What serves: tables are made together with what reads them."""

from threading import Event, Thread

import numpy as np
import pytest
import torch
from helpers.watchdog import WATCHDOG

from equipoise.backends.cpu import BACKEND
from equipoise.backends.cpu.kernels import CpuKernels
from equipoise.balancer.experts.engine.serving_state import ServingState
from equipoise.balancer.experts.placement import ExpertShape, Layout, even_shares, initial_placement
from equipoise.balancer.experts.routing.layer_update import layer_update
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.kernels import Tables, TableUpdate
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role, Stream

SHAPE = ExpertShape(layers=2, experts=4, slots=4, ranks=1)


def serving_state(cpu: Accelerator) -> ServingState:
    """The serving state of the start placement, with slots of zeros."""
    start = initial_placement(SHAPE)
    slots = torch.zeros(SHAPE.layers * SHAPE.slots, 8)
    layout = SlotLayout(tuple((Segment("w", slot),) for slot in slots), staging=1)
    shares = even_shares(start, SHAPE.experts)
    return ServingState(cpu, cpu.slot_store(layout), SHAPE, Layout(start, shares))


def test_installed_warms_kernels_before_first_table_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the first step, or the first rebalance, stands while they are compiled."""
    calls: list[str] = []
    commit = CpuKernels.commit_tables

    def warm(self: CpuKernels, tables: Tables, stream: Stream) -> None:
        calls.append(f"warm {tables.layers} x {tables.experts}, {tables.slots}")

    def recorded_commit(
        self: CpuKernels, update: TableUpdate, tables: Tables, stream: Stream
    ) -> None:
        calls.append(f"commit {len(update.layers)}")
        commit(self, update, tables, stream)

    monkeypatch.setattr(CpuKernels, "warm", warm)
    monkeypatch.setattr(CpuKernels, "commit_tables", recorded_commit)
    cpu = BACKEND.open(0)
    serving = serving_state(cpu)
    cpu.synchronize(WATCHDOG)
    assert calls == ["warm 2 x 4, 4", "commit 2"]
    assert np.array_equal(serving.layout.placement, initial_placement(SHAPE))
    cpu.close()


def test_stream_attached_during_a_change_reads_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread attaches between what the change asks who reads and what it records."""
    cpu, gate = BACKEND.open(0), Event()
    serving, aux_stream = serving_state(cpu), cpu.stream(Role.AUX)
    attach_thread = Thread(target=lambda: serving.attach(aux_stream))
    commit = CpuKernels.commit_tables
    generations: list[int] = []
    read_done = Event()

    def read_generation() -> None:
        generations.append(serving.generation(0))
        read_done.set()

    def wait_for_gate() -> None:
        gate.wait(WATCHDOG)

    def recorded_commit(
        self: CpuKernels, update: TableUpdate, tables: Tables, stream: Stream
    ) -> None:
        attach_thread.start()
        attach_thread.join(
            0.3
        )  # as far as it comes: to its end, or to where it waits for the change
        stream.launch(wait_for_gate)
        commit(self, update, tables, stream)

    monkeypatch.setattr(CpuKernels, "commit_tables", recorded_commit)
    cpu.synchronize(WATCHDOG)
    serving.commit(layer_update(serving.layout, SHAPE, range(SHAPE.layers)), ())
    attach_thread.join(WATCHDOG)
    aux_stream.launch(read_generation)
    read_done.wait(0.3)  # it would come now, were it not held
    gate.set()
    cpu.synchronize(WATCHDOG)
    assert generations == [serving.generation(0)] == [2]
    cpu.close()
