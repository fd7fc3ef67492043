"""Integer loads: counted on the device, summed over ranks one sub-window at a time."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.balancer.experts.placement import ExpertShape, Load
from equipoise.balancer.experts.runtime.jobs import (
    EventDone,
    Job,
    JobDone,
    JobHandle,
    WorkDone,
)
from equipoise.balancer.experts.runtime.workers import Worker
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator
from equipoise.hal.errors import ResultPending
from equipoise.hal.stream import Event, Role
from equipoise.hal.work import Work


@dataclass(frozen=True)
class WindowSchedule:
    """Steps in which load is counted to be summed; all numbers are steps.

    A plan is made from the last window before its boundary. Where nothing else needs loads, only
    the sub-windows of such windows are summed, and what is counted before is forgotten.

    Attributes:
        sub_window: length of a sub-window.
        window_size: length of a window, a multiple of `every`.
        period: from the end of one window to the end of the next, a multiple of `every`; at least
            `window`, and then every sub-window is summed.
        step_offset: windows end this much behind multiples of `period`; a multiple of `every`.
        first_step: the step with which counting begins. A sub-window that began before it is short, and
            not summed: its load would count as that of a whole one.

    Raises:
        ValueError: they are not multiples, or windows overlap.
    """

    sub_window: int
    window_size: int
    period: int
    step_offset: int = 0
    first_step: int = 0

    def __post_init__(self) -> None:
        if (
            self.window_size % self.sub_window
            or self.period % self.sub_window
            or self.step_offset % self.sub_window
        ):
            raise ValueError(
                f"a window of {self.window_size} steps, one in {self.period} at {self.step_offset}, is not "
                f"made of {self.sub_window}-step parts"
            )
        if self.period < self.window_size:
            raise ValueError(f"windows of {self.window_size} steps overlap, one in {self.period}")

    def ends(self, step: int) -> bool:
        """Whether a sub-window that is summed ends before `step`."""
        whole = step % self.sub_window == 0 and step - self.sub_window >= self.first_step
        return whole and self._steps_left(step) < self.window_size

    def starts(self, step: int) -> bool:
        """Whether what is counted from `step` on is summed, and what was counted before is not."""
        left = self._steps_left(step)
        short = step % self.sub_window == 0 and step - self.sub_window < self.first_step < step
        return (short and left < self.window_size) or (
            self.window_size < self.period and left == self.window_size
        )

    def next_event(self, step: int) -> int:
        """The first step behind `step` before which one of both is due."""
        found = (step // self.sub_window + 1) * self.sub_window
        found += max(0, self._steps_left(found) - self.window_size)
        return found if self.ends(found) or self.starts(found) else self.next_event(found)

    def _steps_left(self, step: int) -> int:
        """Steps to the end of the next window."""
        return (self.step_offset - step) % self.period


@dataclass(frozen=True)
class NotReducing:
    """No sum is under way."""


@dataclass(frozen=True)
class Reducing:
    """A sub-window's sum over ranks is under way; due at the next boundary."""

    counts: Tensor
    work: Work


@dataclass(frozen=True)
class ReducingOnWorker:
    """The same, waited for by a worker."""

    sum: JobHandle[Load]


class LoadWindow:
    """The last few sub-windows of global load.

    Every rank closes a sub-window before the same step and takes its sum before the next one, so
    all ranks see the same integers at the same step.

    Where the communicator comes behind the stream's launches, the sum is issued at the boundary,
    and nobody waits. Where it does not, somebody has to wait for the stream first: the worker does,
    beside the forward, if groups are independent, and otherwise the boundary itself (P4).

    Args:
        accelerator: where the counters live.
        communicator: used for nothing else.
        shape: how many of everything.
        parts: which sub-windows are summed.
        worker: sums.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        communicator: Communicator,
        shape: ExpertShape,
        parts: WindowSchedule,
        worker: Worker,
    ) -> None:
        self._accelerator = accelerator
        self._communicator = communicator
        self._worker = worker
        self._schedule = parts
        self.sums: deque[Load] = deque(maxlen=parts.window_size // parts.sub_window)
        """Global rows of the last sub-windows that were summed, oldest first."""
        self._state: NotReducing | Reducing | ReducingOnWorker = NotReducing()
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
    def latest(self) -> Load:
        """(layers, experts): rows over the last summed sub-window and all ranks."""
        return self.sums[-1]

    def next_due_step(self, step: int) -> int:
        """The first boundary behind that of `step` at which there is something to do."""
        if not isinstance(self._state, NotReducing):
            return step + 1
        return self._schedule.next_event(step)

    def advance(self, step: int) -> Job[bool]:
        """Before `step`: take the sum that is due, then close the sub-window that ends here.

        Returns whether a new sum was taken.
        """
        taken = yield from self.drain()
        if self._schedule.ends(step):
            yield from self._close()
        elif self._schedule.starts(step):
            self._accelerator.stream(Role.COMPUTE).launch(self.counters.zero_)
        return taken

    def drain(self) -> Job[bool]:
        """Take a sum that is under way; whether there was one."""
        match self._state:
            case NotReducing():
                return False
            case Reducing(counts, work):
                yield WorkDone(work)
                self.sums.append(counts.cpu().numpy())
            case ReducingOnWorker(told):
                self.sums.append((yield from _sum_of_job(told)))
        self._state = NotReducing()
        return True

    def _close(self) -> Job[None]:
        compute = self._accelerator.stream(Role.COMPUTE)
        counts = torch.empty(self.counters.shape, dtype=torch.int64, device=self.counters.device)

        def program() -> None:
            counts.copy_(self.counters)
            self.counters.zero_()

        compute.launch(program)
        capabilities = self._communicator.capabilities
        if not capabilities.stream_ordered:
            closed = self._accelerator.event()
            compute.record(closed)
            if capabilities.independent_groups:
                self._state = ReducingOnWorker(self._worker.start(self._sum(counts, closed), "sum"))
                return
            yield EventDone(closed)
        with compute.current():
            self._state = Reducing(counts, self._communicator.all_reduce(counts))

    def _sum(self, counts: Tensor, closed: Event) -> Job[Load]:
        """Beside the forward."""
        yield EventDone(closed)
        yield WorkDone(self._communicator.all_reduce(counts))
        summed: Load = counts.cpu().numpy()
        return summed


def _sum_of_job(told: JobHandle[Load]) -> Job[Load]:
    try:
        summed: Load = yield JobDone(told)
    except TimeoutError as error:
        raise ResultPending("the sum of a sub-window's loads has not come") from error
    return summed
