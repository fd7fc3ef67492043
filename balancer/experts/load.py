"""Integer loads: counted on the device, summed over ranks one sub-window at a time."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.balancer.experts.placement import Load, Shape
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
        deadline: seconds that a sum may take.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        communicator: Communicator,
        shape: Shape,
        sub_window: int,
        window: int,
        deadline: float,
    ) -> None:
        if window % sub_window:
            raise ValueError(f"a window of {window} steps is not made of {sub_window}-step parts")
        self._accelerator = accelerator
        self._communicator = communicator
        self._every = sub_window
        self._deadline = deadline
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
    def total(self) -> Load:
        """(layers, experts): rows over the window and all ranks."""
        total: Load = np.stack(self.sums).sum(axis=0)
        return total

    @property
    def latest(self) -> Load:
        """(layers, experts): rows over the last summed sub-window and all ranks."""
        return self.sums[-1]

    def advance(self, step: int) -> bool:
        """Before `step`: take the sum that is due, then close the sub-window that ends here.

        Returns:
            Whether a new sum was taken.
        """
        taken = self._take()
        if step and step % self._every == 0:
            self._close()
        return taken

    def drain(self) -> None:
        """Wait for a sum that is still under way; its numbers are dropped."""
        self._take()

    def _take(self) -> bool:
        match self._state:
            case Idle():
                return False
            case Summing(counts, work):
                work.result(self._deadline)
                self.sums.append(counts.cpu().numpy())
                self._state = Idle()
                return True

    def _close(self) -> None:
        compute = self._accelerator.stream(Role.COMPUTE)
        counts = torch.empty(self.counters.shape, dtype=torch.int64, device=self.counters.device)

        def program() -> None:
            counts.copy_(self.counters)
            self.counters.zero_()

        compute.launch(program)
        if not self._communicator.capabilities.stream_ordered:
            compute.synchronize(self._deadline)
        with compute.current():
            self._state = Summing(counts, self._communicator.all_reduce(counts))
