"""Three ranks rebalance, one of them is killed or stopped in the middle, and two are left."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from support.breakages import (
    FalseLoads,
    FlippedByte,
    LostOnce,
    MuteOnce,
    Slow,
    mirrored,
    negative,
)
from support.breakages import fabric as fabric_of
from support.rebalancing import Break, Parts

from equipoise.balancer.experts.balancer import (
    AtBoundary,
    CommitPath,
    ExpertBalancer,
    UnderLock,
    open_balancer,
)
from equipoise.balancer.experts.change import Change
from equipoise.balancer.experts.config import CommitMode, EngineConfig, ShareMode
from equipoise.balancer.experts.engine import ExpertEngine
from equipoise.balancer.experts.installed import Copies
from equipoise.balancer.experts.layout import Layout, even_shares
from equipoise.balancer.experts.placement import Shape
from equipoise.balancer.experts.writers import StreamWriter, Supply
from equipoise.hal import registry
from equipoise.hal.accelerator import Accelerator, open_for
from equipoise.hal.checksum import checksum
from equipoise.hal.communicator import Fabric
from equipoise.hal.errors import EquipoiseError
from equipoise.hal.slots import Segment, SlotLayout, SlotStore
from equipoise.hal.stream import Role

SHAPE = Shape(layers=2, experts=4, slots=9, ranks=3)
START = np.array([[0, 1, 2, 2, 3, 0, 1, 3, 0], [0, 1, 2, 3, 1, 2, 0, 3, 1]], dtype=np.int32)
LOAD = torch.tensor([[1, 1, 1, 61], [1, 1, 61, 1]], dtype=torch.int32)
STEPS = 30
MORE = 16
"""Steps that those who are left serve by themselves."""
ENDURED = 60
"""Steps beside a rank with which something is wrong."""
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


CONFIG = EngineConfig(
    label="t",
    shares=ShareMode.STATIC,
    window_size=2,
    step_interval=4,
    sub_window=2,
    parcel=1,
    layer_updates_per_iter=1,
    deadline=8.0,
)


class Numbers:
    """Every expert's weights in the host's memory: its number plus one."""

    def view(self, layer: int, expert: int) -> tuple[torch.Tensor, ...]:
        """One segment."""
        return (torch.full((5,), expert + 1.0),)

    def checksum(self, layer: int, expert: int) -> int:
        """Of its bytes."""
        return checksum(self.view(layer, expert)[0])


@dataclass
class Trap:
    """Ends this process where the engine comes to a state, or where it has decided to commit."""

    where: str
    how: str

    def set_in(self, balancer: ExpertBalancer) -> None:
        """Lie in wait for the decision."""
        installed, commit = balancer.installed, balancer.installed.commit

        def deadly(change: Change, copies: Copies) -> None:
            if self.where == "Decided":
                self.snap()
            commit(change, copies)

        installed.commit = deadly  # type: ignore[method-assign]

    def look(self, balancer: ExpertBalancer) -> None:
        """Snap in the state it is set for."""
        engine = balancer.engine
        assert isinstance(engine, ExpertEngine)
        if type(engine.state).__name__ == self.where:
            self.snap()

    def snap(self) -> None:
        """The end, or what looks like one."""
        os.kill(os.getpid(), SIGNALS[self.how])
        signal.pause()


def survive(
    fabric: Fabric, where: str, how: str, commit: str, victim: int, backend: str = "cpu"
) -> Any:
    """Serve until the victim is gone; then go on without it. Returns what was seen."""
    accelerator = open_for(registry.accelerator(backend), fabric.control.rank)
    weights = _weights(fabric.control.rank, accelerator.device)
    store = accelerator.slot_store(weights)
    layout = Layout(START, even_shares(START, SHAPE.experts))
    path = _path(accelerator, store, commit, backend)
    balancer = open_balancer(accelerator, fabric, store, SHAPE, layout, CONFIG, path)
    trap = Trap(where if fabric.control.rank == victim else "nowhere", how)
    trap.set_in(balancer)
    loop = Loop(fabric, accelerator, weights, trap)
    began = time.monotonic()
    with suppress(EquipoiseError):
        loop.run(balancer, (0, 1, 2), range(STEPS))
    lasted = time.monotonic() - began
    first, seen = loop.step + 1, list(loop.sights)
    left = [rank for rank in range(3) if rank != victim]
    smaller = balancer.reconfigure(left, first)
    loop.run(smaller, tuple(left), range(first, first + MORE))
    smaller.close()
    outcomes = [report.outcome for report in smaller.engine.reports]
    accelerator.close()
    return {
        "last": loop.step - MORE,
        "lasted": lasted,
        "before": seen,
        "after": loop.sights[len(seen) :],
        "aborts": dict(balancer.engine.aborts),
        "epochs": outcomes,
    }


BREAKAGES: dict[str, Break] = {
    "planner raises": fabric_of(".loads", lambda inner: FalseLoads(inner, negative)),
    "plan differs": fabric_of(".loads", lambda inner: FalseLoads(inner, mirrored)),
    "bytes corrupted": fabric_of(".moves", FlippedByte),
    "message lost": fabric_of(".moves", LostOnce),
    "ballot lost": fabric_of("control", MuteOnce),
    "slow": fabric_of(".moves", lambda inner: Slow(inner, 0.3)),
}
"""What may be wrong with rank 1, which lives."""


def endure(fabric: Fabric, what: str, backend: str = "cpu") -> Any:
    """Serve beside a rank with which something is wrong. Returns what was seen."""
    accelerator = open_for(registry.accelerator(backend), fabric.control.rank)
    weights = _weights(fabric.control.rank, accelerator.device)
    parts = Parts(fabric.control.rank, fabric, accelerator.slot_store(weights))
    parts = BREAKAGES[what](parts)
    layout = Layout(START, even_shares(START, SHAPE.experts))
    config = replace(CONFIG, patience=24)  # less than a lost message takes to fail
    balancer = open_balancer(accelerator, parts.fabric, parts.store, SHAPE, layout, config)
    loop = Loop(fabric, accelerator, weights, Trap("nowhere", "killed"))
    loop.run(balancer, (0, 1, 2), range(ENDURED))
    balancer.close()
    accelerator.close()
    outcomes = [report.outcome for report in balancer.engine.reports]
    return {"sights": loop.sights, "aborts": dict(balancer.engine.aborts), "epochs": outcomes}


class Loop:
    """Steps that look at slots and tables, then meet."""

    def __init__(
        self, fabric: Fabric, accelerator: Accelerator, weights: SlotLayout, trap: Trap
    ) -> None:
        self._fabric = fabric
        self._accelerator = accelerator
        self._weights = weights
        self._trap = trap
        self.step = -1
        self.sights: list[Any] = []

    def run(self, balancer: ExpertBalancer, ranks: tuple[int, ...], steps: range) -> None:
        """Every step: boundary, look, meet."""
        lockstep = self._fabric.open(f"lockstep{len(ranks)}", ranks)
        for step in steps:
            self.step = step
            balancer.boundary(step)
            time.sleep(0.02)  # so that the work beside comes on
            self.sights.append(self._look(balancer, step))
            self._trap.look(balancer)
            lockstep.barrier().result(30.0)

    def _look(self, balancer: ExpertBalancer, step: int) -> Any:
        compute, installed = self._accelerator.stream(Role.COMPUTE), balancer.installed
        seen: list[Any] = []

        def program() -> None:
            held = []
            for layer in range(SHAPE.layers):
                with balancer.reading(layer, step):
                    held.append(_held(self._weights, layer))
            placement = installed.layout.placement.tolist()
            seen.append([step, installed.tables.generation.tolist(), placement, held])
            balancer.load.counters += LOAD.roll(step // 8, 1).to(balancer.load.counters.device)

        compute.launch(program)
        compute.synchronize(30.0)
        return seen[0]


def _held(weights: SlotLayout, layer: int) -> list[int]:
    per = SHAPE.slots_per_rank
    slots = weights.slots[layer * per : (layer + 1) * per]
    return [int(slot[0].data[0]) - 1 for slot in slots]


def _weights(rank: int, device: torch.device) -> SlotLayout:
    mine = START[:, rank * 3 : rank * 3 + 3]
    stacked = torch.tensor(mine + 1, dtype=torch.float32).reshape(-1, 1).repeat(1, 5)
    slots = stacked.to(device)
    return SlotLayout(tuple((Segment("weight", row),) for row in slots), staging=3)


def _path(accelerator: Accelerator, store: SlotStore, commit: str, backend: str) -> CommitPath:
    supply = Supply(Numbers(), StreamWriter(accelerator, store))
    if CommitMode(commit) is CommitMode.LOCKED:
        return UnderLock(supply, registry.accelerator(backend).capabilities)
    return AtBoundary((supply,))
