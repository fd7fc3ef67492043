"""What serves: tables are made together with what reads them."""

import numpy as np
import pytest
import torch
from helpers.watchdog import WATCHDOG

from equipoise.backends.cpu import BACKEND
from equipoise.backends.cpu.kernels import CpuKernels
from equipoise.balancer.experts.installed import Installed
from equipoise.balancer.experts.layout import Layout, even_shares
from equipoise.balancer.experts.placement import Shape, contiguous
from equipoise.hal.kernels import Tables, TableUpdate
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Stream

SHAPE = Shape(layers=2, experts=4, slots=4, ranks=1)


def test_installed_warms_kernels_before_first_table_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the first step, or the first epoch, stands while they are compiled."""
    calls: list[str] = []
    commit = CpuKernels.commit_tables

    def warm(self: CpuKernels, tables: Tables, stream: Stream) -> None:
        calls.append(f"warm {tables.layers} x {tables.experts}, {tables.slots}")

    def committed(self: CpuKernels, update: TableUpdate, tables: Tables, stream: Stream) -> None:
        calls.append(f"commit {len(update.layers)}")
        commit(self, update, tables, stream)

    monkeypatch.setattr(CpuKernels, "warm", warm)
    monkeypatch.setattr(CpuKernels, "commit_tables", committed)
    cpu, start = BACKEND.open(0), contiguous(SHAPE)
    slots = torch.zeros(SHAPE.layers * SHAPE.slots, 8)
    layout = SlotLayout(tuple((Segment("w", slot),) for slot in slots), staging=1)
    shares = even_shares(start, SHAPE.experts)
    made = Installed(cpu, cpu.slot_store(layout), SHAPE, Layout(start, shares))
    cpu.synchronize(WATCHDOG)
    assert calls == ["warm 2 x 4, 4", "commit 2"]
    assert np.array_equal(made.layout.placement, start)
    cpu.close()
