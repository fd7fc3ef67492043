"""Integer loads: counted on the device, summed over ranks one sub-window at a time."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.balancer.experts.jobs import Job
from equipoise.balancer.experts.placement import Load, Shape
from equipoise.balancer.experts.waits import Ended, Reached
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator
from equipoise.hal.stream import Role
from equipoise.hal.work import Work


@dataclass(frozen=True)
class Idle:
    """No sum is under way."""


@dataclass(frozen=True)
class Summing:
    """A sub-window's sum over ranks is under way; due at the next boundary."""

    counts: Tensor
    work: Work


class LoadWindow:
    """The last few sub-windows of global load.

    Every rank closes a sub-window before the same step and takes its sum before the next one, so
    all ranks see the same integers at the same step.

    Args:
        accelerator: where the counters live.
        communicator: used for nothing else.
        shape: how many of everything.
        sub_window: steps in a sub-window.
        window: steps in a window, a multiple of `sub_window`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        communicator: Communicator,
        shape: Shape,
        sub_window: int,
        window: int,
    ) -> None:
        if window % sub_window:
            raise ValueError(f"a window of {window} steps is not made of {sub_window}-step parts")
        self._accelerator = accelerator
        self._communicator = communicator
        self._every = sub_window
        self.sums: deque[Load] = deque(maxlen=window // sub_window)
        """Global rows of the last sub-windows, oldest first."""
        self._state: Idle | Summing = Idle()
        zeros = torch.zeros((shape.layers, shape.experts), dtype=torch.int32)
        self.counters = zeros.to(accelerator.device)
        """This rank's rows in the open sub-window; routing adds to it on the compute stream."""

    @property
    def full(self) -> bool:
        """Whether the window has all its sub-windows."""
        return len(self.sums) == self.sums.maxlen

    @property
    def windows(self) -> Load:
        """(sub-windows, layers, experts): rows of each over all ranks, oldest first."""
        return np.stack(self.sums)

    @property
    def total(self) -> Load:
        """(layers, experts): rows over the window and all ranks."""
        total: Load = self.windows.sum(axis=0)
        return total

    @property
    def latest(self) -> Load:
        """(layers, experts): rows over the last summed sub-window and all ranks."""
        return self.sums[-1]

    def due(self, step: int) -> int:
        """The first boundary behind that of `step` at which there is something to do."""
        if isinstance(self._state, Summing):
            return step + 1
        return (step // self._every + 1) * self._every

    def advance(self, step: int) -> Job[bool]:
        """Before `step`: take the sum that is due, then close the sub-window that ends here.

        Returns whether a new sum was taken.
        """
        taken = yield from self.drain()
        if step and step % self._every == 0:
            yield from self._close()
        return taken

    def drain(self) -> Job[bool]:
        """Take a sum that is under way; whether there was one."""
        if not isinstance(self._state, Summing):
            return False
        yield Ended(self._state.work)
        self.sums.append(self._state.counts.cpu().numpy())
        self._state = Idle()
        return True

    def _close(self) -> Job[None]:
        compute = self._accelerator.stream(Role.COMPUTE)
        counts = torch.empty(self.counters.shape, dtype=torch.int64, device=self.counters.device)

        def program() -> None:
            counts.copy_(self.counters)
            self.counters.zero_()

        compute.launch(program)
        if not self._communicator.capabilities.stream_ordered:
            closed = self._accelerator.event()
            compute.record(closed)
            yield Reached(closed)
        with compute.current():
            self._state = Summing(counts, self._communicator.all_reduce(counts))
