"""Counts load on the device, and sums it over ranks, one sub-window at a time."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.balancer.experts.batch_sampler import BatchSample, BatchSampler
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
    """Which steps are counted and summed; all numbers are steps.

    A plan uses the last window before its boundary. If nothing else needs loads, only the
    sub-windows of such windows are summed, and counts of other steps are discarded.

    Attributes:
        sub_window: length of a sub-window.
        window_size: length of a window, a multiple of `sub_window`.
        period: from the end of one window to the end of the next, a multiple of `sub_window`; at
            least `window_size`; if equal, every sub-window is summed.
        step_offset: windows end this much after multiples of `period`; a multiple of `sub_window`.
        first_step: the step with which counting begins. A sub-window that began before it is short,
            and not summed: its load would count as that of a whole one.

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
                f"a window of {self.window_size} steps, one in {self.period} at "
                f"{self.step_offset}, is not made of {self.sub_window}-step parts"
            )
        if self.period < self.window_size:
            raise ValueError(f"windows of {self.window_size} steps overlap, one in {self.period}")

    def ends(self, step: int) -> bool:
        """Returns whether a summed sub-window ends before `step`."""
        whole = step % self.sub_window == 0 and step - self.sub_window >= self.first_step
        return whole and self._steps_left(step) < self.window_size

    def starts(self, step: int) -> bool:
        """Returns whether counting starts anew at `step`: earlier counts are discarded."""
        steps_left = self._steps_left(step)
        short = step % self.sub_window == 0 and step - self.sub_window < self.first_step < step
        return (short and steps_left < self.window_size) or (
            self.window_size < self.period and steps_left == self.window_size
        )

    def next_event(self, step: int) -> int:
        """Returns the first step after `step` at which a sub-window ends or counting starts."""
        event = (step // self.sub_window + 1) * self.sub_window
        event += max(0, self._steps_left(event) - self.window_size)
        return event if self.ends(event) or self.starts(event) else self.next_event(event)

    def _steps_left(self, step: int) -> int:
        """Returns the steps to the end of the next window."""
        return (self.step_offset - step) % self.period


@dataclass(frozen=True)
class NotReducing:
    """No sum is in progress."""


@dataclass(frozen=True)
class Reducing:
    """The sum of a sub-window over ranks is in progress; due at the next boundary."""

    counts: Tensor
    work: Work


@dataclass(frozen=True)
class ReducingOnWorker:
    """The same, with a worker that waits for it."""

    sum: JobHandle[Load]


class LoadWindow:
    """The load of the last sub-windows, summed over all ranks.

    Every rank closes a sub-window before the same step and takes its sum before the next one, so
    all ranks see the same integers at the same step.

    If the communicator is ordered with the stream, the sum is issued at the boundary without a
    wait. Otherwise the stream has to be waited for first: by the worker, overlapped with the
    forward pass, if groups are independent; else by the boundary itself (P4).

    Args:
        accelerator: holds the counters.
        communicator: used for nothing else.
        shape: numbers of layers, experts, slots and ranks.
        schedule: which sub-windows are summed.
        worker: waits for sums.
        sampler: samples a step of each sub-window; None where no rank has an event sink.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        communicator: Communicator,
        shape: ExpertShape,
        schedule: WindowSchedule,
        worker: Worker,
        sampler: BatchSampler | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._communicator = communicator
        self._worker = worker
        self._sampler = sampler
        self._schedule = schedule
        self.sums: deque[Load] = deque(maxlen=schedule.window_size // schedule.sub_window)
        """int64 (layers, experts) of the last sub-windows over all ranks, oldest first."""
        self._state: NotReducing | Reducing | ReducingOnWorker = NotReducing()
        zeros = torch.zeros((shape.layers, shape.experts), dtype=torch.int32)
        self.counters = zeros.to(accelerator.device)
        """int32 (layers, experts): rows of this rank in the open sub-window.

        Routing adds to it on the compute stream."""

    @property
    def full(self) -> bool:
        """Whether all sub-windows of the window were summed."""
        return len(self.sums) == self.sums.maxlen

    @property
    def windows(self) -> Load:
        """int64 (sub-windows, layers, experts): rows over all ranks, oldest first."""
        return np.stack(self.sums)

    @property
    def latest(self) -> Load:
        """int64 (layers, experts): rows of the last summed sub-window over all ranks."""
        return self.sums[-1]

    def next_due_step(self, step: int) -> int:
        """Returns the first boundary after that of `step` that has work."""
        if not isinstance(self._state, NotReducing):
            return step + 1
        return self._schedule.next_event(step)

    def advance(self, step: int) -> Job[bool]:
        """Takes the sum that is due before `step`, then closes the sub-window that ends here.

        Returns whether a new sum was taken.
        """
        is_new = yield from self._take_sum()
        if is_new and self._sampler is not None:
            # The boundary before cleared the counters: they hold the rows of one step. Before they
            # are cleared again, as they are here if a sub-window is one step long.
            self._sampler.copy(step - 1, self.counters)
        if self._schedule.ends(step):
            if self._sampler is not None:
                yield from self._sampler.drain()
            yield from self._close()
        elif self._schedule.starts(step):
            self._accelerator.stream(Role.COMPUTE).launch(self.counters.zero_)
        return is_new

    def take_samples(self) -> Sequence[BatchSample]:
        """Returns the sampled steps that have come; never waits. Raises as a sum does."""
        return () if self._sampler is None else self._sampler.take()

    def drain(self) -> Job[None]:
        """Waits for the sum and the gather in progress: both are collective."""
        yield from self._take_sum()
        if self._sampler is not None:
            yield from self._sampler.drain()

    def _take_sum(self) -> Job[bool]:
        """Takes the sum in progress; returns whether there was one."""
        match self._state:
            case NotReducing():
                return False
            case Reducing(counts, work):
                yield WorkDone(work)
                self.sums.append(counts.cpu().numpy())
            case ReducingOnWorker(handle):
                self.sums.append((yield from _sum_of_job(handle)))
        self._state = NotReducing()
        return True

    def _close(self) -> Job[None]:
        compute = self._accelerator.stream(Role.COMPUTE)
        counts = torch.empty(self.counters.shape, dtype=torch.int64, device=self.counters.device)

        # Copied and cleared in one program of the compute stream: no row of a step is counted twice
        # or lost between.
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
                if self._sampler is not None:
                    self._sampler.issue_on_worker(closed)
                return
            yield EventDone(closed)
        with compute.current():
            self._state = Reducing(counts, self._communicator.all_reduce(counts))
        if self._sampler is not None:
            self._sampler.issue()

    def _sum(self, counts: Tensor, closed: Event) -> Job[Load]:
        """Sums on the worker, overlapped with the forward pass."""
        yield EventDone(closed)
        yield WorkDone(self._communicator.all_reduce(counts))
        summed: Load = counts.cpu().numpy()
        return summed


def _sum_of_job(handle: JobHandle[Load]) -> Job[Load]:
    try:
        summed: Load = yield JobDone(handle)
    except TimeoutError as error:
        raise ResultPending("the sum of a sub-window's loads has not come") from error
    return summed
