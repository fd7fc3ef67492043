"""The engine of one process, on routing that was recorded: who gets which rows, step by step.

Everything but the model is the shipped code: router, counters, sums over a communicator, and the
rule by which lagged shares are renewed. One rank stands for all: it routes the tokens of every
rank, and its slots hold one byte each. No epoch opens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt
import torch

from equipoise.balancer.experts.assembly import BY_BOUNDARY, Means, assemble
from equipoise.balancer.experts.balancer import ExpertBalancer
from equipoise.balancer.experts.config import EngineConfig, ShareMode
from equipoise.balancer.experts.layout import Layout
from equipoise.balancer.experts.members import Members
from equipoise.balancer.experts.placement import Shape
from equipoise.balancer.experts.staff import threads
from equipoise.hal import registry
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric, Rendezvous
from equipoise.hal.slots import Segment, SlotLayout, SlotStore
from equipoise.hal.stream import Role

DEADLINE = 20.0
ALONE = Members((0,), 0)
NEVER = 1 << 20
"""Windows between epochs."""
Ids = npt.NDArray[np.int32]
Batches = Sequence[Sequence[Ids]]
"""For every step and layer the expert of each row, of any shape."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cadence:
    """Steps of the window that `layout` was planned on, and of a part that is summed at a time."""

    window: int
    sub_window: int


@dataclass
class Rig:
    """A device, and a group of one."""

    accelerator: Accelerator
    fabric: Fabric
    runs: Iterator[int]

    def imbalance(
        self, batches: Batches, layout: Layout, shape: Shape, mode: ShareMode, cadence: Cadence
    ) -> Floats:
        """(steps, layers): max/mean - 1 of the ranks' rows, from `layout` on, in one share mode."""
        config = EngineConfig(
            label=f"rig{next(self.runs)}",
            shares=mode,
            window_size=cadence.window,
            step_interval=NEVER * cadence.window,
            sub_window=cadence.sub_window,
            deadline=DEADLINE,
        )
        store = _store(self.accelerator, shape)
        balancer = self.balancer(store, shape, layout, config)
        found = [self._step(balancer, step, layers) for step, layers in enumerate(batches)]
        balancer.close()
        return np.stack(found)

    def balancer(
        self, store: SlotStore, shape: Shape, layout: Layout, config: EngineConfig
    ) -> ExpertBalancer:
        """Of one rank that stands for all of the shape: opened, it would want the others."""
        means = Means(
            self.accelerator, self.fabric, store, config, BY_BOUNDARY, threads(config), ALONE
        )
        return ExpertBalancer(means, shape, assemble(means, shape, layout))

    def _step(self, balancer: ExpertBalancer, step: int, layers: Sequence[Ids]) -> Floats:
        balancer.boundary(step)
        compute = self.accelerator.stream(Role.COMPUTE)
        told = [
            balancer.router.route(layer, step, torch.from_numpy(ids).reshape(-1, 1))
            for layer, ids in enumerate(layers)
        ]
        compute.synchronize(DEADLINE)
        shape = balancer.shape
        slots = np.stack([np.bincount(t.view(-1), minlength=shape.slots) for t in told])
        ranks = slots.reshape(shape.layers, shape.ranks, -1).sum(axis=2)
        found: Floats = ranks.max(axis=1) / ranks.mean(axis=1) - 1.0
        return found


@contextmanager
def rig() -> Iterator[Rig]:
    """Open the processor as a device, and the group."""
    backend = registry.communicator("gloo")
    host = backend.host()
    name, port = host.address
    fabric = backend.connect(Rendezvous(rank=0, size=1, host=name, port=port, deadline=DEADLINE))
    accelerator = registry.accelerator("cpu").open(0)
    try:
        yield Rig(accelerator, fabric, count())
    finally:
        fabric.close()
        accelerator.close()
        host.close()


def _store(accelerator: Accelerator, shape: Shape) -> SlotStore:
    bytes_ = torch.zeros(shape.layers * shape.slots_per_rank, 1, dtype=torch.uint8)
    return accelerator.slot_store(SlotLayout(tuple((Segment("none", row),) for row in bytes_), 0))
