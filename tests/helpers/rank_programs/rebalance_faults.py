"""Three ranks rebalance, and something goes wrong with one of them where a rebalance passes over.

It goes wrong from the moment on at which the engine of that rank comes to a state, or decides.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Any

import numpy as np
import torch
from helpers.harnesses.rebalancing_model import Break, Parts, healthy
from helpers.mutants.balancer_breakages import (
    FalseLoads,
    FlippedByte,
    LostOnce,
    MuteOnce,
    NoExchange,
    NoStore,
    Slow,
    mirrored,
    negative,
    once_come,
)

from equipoise.balancer.experts.balancer import (
    ExpertBalancer,
    InPlaceFromHost,
    StagedFromPeers,
    UpdatePathConfig,
    open_balancer,
)
from equipoise.balancer.experts.config import BalancerConfig, CommitMode, ShareMode
from equipoise.balancer.experts.engine.serving_state import SlotCopies
from equipoise.balancer.experts.placement import ExpertShape, Layout, even_shares
from equipoise.balancer.experts.routing.layer_update import LayerUpdate
from equipoise.balancer.experts.runtime.events import COMMITTED
from equipoise.balancer.experts.transfer.host_writes import HostWeights, StreamWriter
from equipoise.hal import registry
from equipoise.hal.accelerator import Accelerator, open_for_rank
from equipoise.hal.checksum import checksum
from equipoise.hal.communicator import Fabric
from equipoise.hal.errors import EngineError, EquipoiseError
from equipoise.hal.slots import Segment, SlotLayout, SlotStore
from equipoise.hal.stream import Role

SHAPE = ExpertShape(layers=2, experts=4, slots=9, ranks=3)
START = np.array([[0, 1, 2, 2, 3, 0, 1, 3, 0], [0, 1, 2, 3, 1, 2, 0, 3, 1]], dtype=np.int32)
LOAD = torch.tensor([[1, 1, 1, 61], [1, 1, 61, 1]], dtype=torch.int32)
STEPS = 600
"""Steps at most: the fault ends them, so a machine that plans slowly takes more of them."""
MORE = 16
"""Steps that those who are left serve by themselves, at least."""
ENDURED = 60
"""Steps beside a rank with which something is wrong."""
VICTIM = 1
"""The rank with which something goes wrong."""
DEADLINE = 20.0
"""Seconds. On a busy machine a healthy rank may stand still for some; a lost one costs them all."""

CONFIG = BalancerConfig(
    name="t",
    shares=ShareMode.STATIC,
    window_size=2,
    step_interval=4,
    sub_window=2,
    slots_per_message=1,
    layer_updates_per_iter=1,
    timeout=DEADLINE,
)


BREAKAGES: dict[str, Callable[[Event], Break]] = {
    "planner raises": once_come(".loads", lambda inner: FalseLoads(inner, negative)),
    "transfer raises": once_come(".moves", NoExchange),
    "plan differs": once_come(".loads", lambda inner: FalseLoads(inner, mirrored)),
    "bytes corrupted": once_come(".moves", FlippedByte),
    "message lost": once_come(".moves", LostOnce),
    "ballot lost": once_come("control", MuteOnce),
    "slow": once_come("", Slow),
}
"""What a rank lives with."""
CUT_OFF = once_come("control", NoStore)


class Numbers:
    """Every expert's weights in the host's memory: its number plus one.

    Args:
        fault: `writes fail` or `writes are wrong`, once `moment` has come.
    """

    def __init__(self, fault: str, moment: Event) -> None:
        self._fault = fault
        self._moment = moment

    def view(self, layer: int, expert: int) -> tuple[torch.Tensor, ...]:
        """One segment."""
        if not self._moment.is_set():
            return _number(expert)
        if self._fault == "writes fail":
            raise EngineError("the host's memory cannot be read")
        return _number(expert + 1) if self._fault == "writes are wrong" else _number(expert)

    def checksum(self, layer: int, expert: int) -> int:
        """Of its bytes."""
        return checksum(_number(expert)[0])


def _number(expert: int) -> tuple[torch.Tensor, ...]:
    return (torch.full((5,), expert + 1.0),)


@dataclass
class Trap:
    """Acts where the engine comes to a state, or where it has decided to commit."""

    where: str
    action: Callable[[], object]

    def set_in(self, balancer: ExpertBalancer) -> None:
        """Lie in wait for the decision."""
        installed, commit = balancer.serving_state, balancer.serving_state.commit

        def deadly(update: LayerUpdate, copies: SlotCopies) -> None:
            if self.where == "Decided":
                self.action()
            commit(update, copies)

        installed.commit = deadly  # type: ignore[method-assign]

    def look(self, balancer: ExpertBalancer) -> None:
        """Act in the state it is set for."""
        engine = balancer.engine
        if type(engine.state).__name__ == self.where:
            self.action()


def _snap(number: int) -> None:
    """The end, or what looks like one."""
    os.kill(os.getpid(), number)
    signal.pause()


def _raise() -> None:
    raise EngineError("as it was told to")


def _deed(how: str, moment: Event) -> Callable[[], object]:
    deeds: dict[str, Callable[[], object]] = {
        "killed": partial(_snap, signal.SIGKILL),
        "stopped": partial(_snap, signal.SIGSTOP),
        "raises": _raise,
    }
    return deeds.get(how, moment.set)


class Bench:
    """What one rank puts its balancer together from."""

    def __init__(self, fabric: Fabric, backend: str) -> None:
        self.rank = fabric.control.rank
        self.fabric = fabric
        self.backend = registry.accelerator(backend)
        self.accelerator = open_for_rank(self.backend, self.rank)
        self.weights = _weights(self.rank, self.accelerator.device)

    def balancer(
        self, breakage: Break, config: BalancerConfig, commit: str, numbers: Numbers
    ) -> ExpertBalancer:
        """With something wrong with a part."""
        parts = Parts(self.rank, self.fabric, self.accelerator.slot_store(self.weights))
        parts = breakage(parts)
        layout = Layout(START, even_shares(START, SHAPE.experts))
        path = self._path(parts.store, CommitMode(commit), numbers)
        return open_balancer(
            self.accelerator, parts.fabric, parts.store, SHAPE, layout, config, path
        )

    def _path(self, store: SlotStore, commit: CommitMode, numbers: Numbers) -> UpdatePathConfig:
        supply = HostWeights(numbers, StreamWriter(self.accelerator, store))
        if commit is CommitMode.IN_PLACE:
            return InPlaceFromHost(supply, self.backend.capabilities)
        return StagedFromPeers(supply)

    def loop(self, where: str, action: Callable[[], object], balancer: ExpertBalancer) -> "Loop":
        """Steps, with a trap on the rank that is to suffer."""
        trap = Trap(where if self.rank == VICTIM else "nowhere", action)
        trap.set_in(balancer)
        return Loop(self.fabric, self.accelerator, self.weights, trap)


def survive(fabric: Fabric, where: str, how: str, commit: str, backend: str = "cpu") -> Any:
    """Serve until the victim is gone; then go on without it. Returns what was seen.

    A process that cannot serve on ends, as an engine's would: its error is its last word.
    """
    moment, bench = Event(), Bench(fabric, backend)
    numbers = Numbers(how if bench.rank == VICTIM else "none", moment)
    breakage = CUT_OFF(moment) if how == "cut off" else healthy
    balancer = bench.balancer(breakage, CONFIG, commit, numbers)
    loop = bench.loop(where, _deed(how, moment), balancer)
    try:
        loop.run(balancer, (0, 1, 2), range(STEPS))
    except EquipoiseError:
        if bench.rank == VICTIM:
            _snap(signal.SIGKILL)
    first, observations = loop.step + 1, list(loop.observations)
    survivors = [rank for rank in range(3) if rank != VICTIM]
    smaller = balancer.reconfigure(survivors, first)
    loop.run(smaller, tuple(survivors), range(first, first + STEPS), fewest=MORE)
    smaller.close()
    outcomes = [report.outcome for report in smaller.engine.reports]
    bench.accelerator.close()
    return {
        "last": first - 1,
        "before": observations,
        "after": loop.observations[len(observations) :],
        "aborts": dict(balancer.engine.aborts),
        "rebalances": outcomes,
    }


def endure(fabric: Fabric, what: str, where: str, commit: str, backend: str = "cpu") -> Any:
    """Serve beside a rank with which something is wrong. Returns what was seen."""
    moment, bench = Event(), Bench(fabric, backend)
    config = replace(CONFIG, max_stalled_steps=24)  # less than a lost message takes to fail
    balancer = bench.balancer(BREAKAGES[what](moment), config, commit, Numbers("none", moment))
    loop = bench.loop(where, moment.set, balancer)
    loop.run(balancer, (0, 1, 2), range(ENDURED))
    balancer.close()
    bench.accelerator.close()
    outcomes = [report.outcome for report in balancer.engine.reports]
    return {
        "observations": loop.observations,
        "aborts": dict(balancer.engine.aborts),
        "rebalances": outcomes,
    }


class Loop:
    """Steps that look at slots and tables, then meet."""

    def __init__(
        self, fabric: Fabric, accelerator: Accelerator, weights: SlotLayout, trap: Trap
    ) -> None:
        self._fabric = fabric
        self._accelerator = accelerator
        self._weights = weights
        self._trap = trap
        self._loads = [LOAD.roll(by, 1).to(accelerator.device) for by in range(SHAPE.experts)]
        self.step = -1
        self.observations: list[Any] = []

    def run(
        self, balancer: ExpertBalancer, ranks: tuple[int, ...], steps: range, fewest: int = STEPS
    ) -> None:
        """Every step: boundary, look, meet.

        Ends before `steps` do, after `fewest` of them, once every rank has seen a commit: how many
        steps that takes is up to the machine.
        """
        lockstep = self._fabric.open(f"lockstep{len(ranks)}", ranks)
        for step in steps:
            self.step = step
            balancer.before_step(step)
            time.sleep(0.02)  # so that the work beside comes on
            self.observations.append(self._look(balancer, step))
            self._trap.look(balancer)
            has_moved = any(report.outcome == COMMITTED for report in balancer.engine.reports)
            moved_ranks = torch.tensor([has_moved], dtype=torch.int64).to(self._accelerator.device)
            lockstep.all_reduce(moved_ranks).result(30.0)
            if step - steps.start >= fewest - 1 and int(moved_ranks) == len(ranks):
                return

    def _look(self, balancer: ExpertBalancer, step: int) -> Any:
        """Nothing in the step waits for the device: the writer issues its copies after the step,
        and the step stands behind a lock until they are there. So values are read at the end."""
        compute, installed = self._accelerator.stream(Role.COMPUTE), balancer.serving_state
        first_elements: list[torch.Tensor] = []
        snapshot: list[Any] = []

        def program() -> None:
            for layer in range(SHAPE.layers):
                with balancer.reading_slots(layer, step):
                    first_elements.append(_first_elements(self._weights, layer))
            snapshot.extend(
                [installed.tables.generation.clone(), installed.layout.placement.tolist()]
            )
            balancer.load.counters += self._loads[step // 8 % SHAPE.experts]

        compute.launch(program)
        compute.synchronize(30.0)
        generation, placement = snapshot
        experts = [[int(value) - 1 for value in row.tolist()] for row in first_elements]
        return [step, generation.tolist(), placement, experts]


def _first_elements(weights: SlotLayout, layer: int) -> torch.Tensor:
    per = SHAPE.slots_per_rank
    slots = weights.slots[layer * per : (layer + 1) * per]
    return torch.cat([slot[0].data[:1] for slot in slots])


def _weights(rank: int, device: torch.device) -> SlotLayout:
    mine = START[:, rank * 3 : rank * 3 + 3]
    stacked = torch.tensor(mine + 1, dtype=torch.float32).reshape(-1, 1).repeat(1, 5)
    slots = stacked.to(device)
    return SlotLayout(tuple((Segment("weight", row),) for row in slots), staging=3)
