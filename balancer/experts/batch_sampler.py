"""Samples a step of each sub-window: how many rows each rank had for each expert in it.

The step takes no part in it, so steps that are captured graphs are sampled too. Closing a
sub-window clears the counters before a step. The next boundary takes the sum, so it has work
anyway; there the counters hold the rows of exactly that step, and are copied. The copy is gathered
from all ranks when the next sub-window is closed, after its sum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.balancer.experts.placement import BatchCounts, Layout
from equipoise.balancer.experts.runtime.jobs import EventDone, Job, JobDone, JobHandle, WorkDone
from equipoise.balancer.experts.runtime.workers import Worker
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator
from equipoise.hal.errors import ResultPending
from equipoise.hal.stream import Event, Role, Stream
from equipoise.hal.work import Work


@dataclass(frozen=True)
class BatchSample:
    """The batches of one step.

    Attributes:
        step: the step.
        counts: int32 (batches, layers, experts), rows of each rank; ranks that route the same rows
            have one batch.
        layout: the layout that the step was routed with.
    """

    step: int
    counts: BatchCounts
    layout: Layout


@dataclass(frozen=True)
class NothingCopied:
    """No step was copied since the last gather."""


@dataclass(frozen=True)
class CopiedStep:
    """This rank's counts of a step, int32 [layers, experts] on the device, wait to be gathered."""

    step: int
    counts: Tensor
    layout: Layout


@dataclass(frozen=True)
class NotGathering:
    """No gather is in progress."""


@dataclass(frozen=True)
class Gathering:
    """The worker gathers a sample, or waits for it."""

    sample: JobHandle[BatchSample]


class BatchSampler:
    """Samples of this rank's steps, with the counts of all ranks.

    All ranks copy the same steps and gather at the same boundaries. A sample decides nothing, so
    no boundary waits for one, except that a gather has to end before the next begins.

    Args:
        accelerator: its compute stream copies the counters.
        communicator: that of the sums; gathers are issued after them, in one order on all ranks.
        worker: waits for gathers.
        installed_layout: returns the layout of the last step that was launched, at a boundary that
            has not changed it yet.
        ranks_sharing_rows: number of neighbouring ranks that route the same rows.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        communicator: Communicator,
        worker: Worker,
        installed_layout: Callable[[], Layout],
        ranks_sharing_rows: int = 1,
    ) -> None:
        self._accelerator = accelerator
        self._compute = accelerator.stream(Role.COMPUTE)
        self._communicator = communicator
        self._worker = worker
        self._installed_layout = installed_layout
        self._ranks_sharing_rows = ranks_sharing_rows
        self._copied: NothingCopied | CopiedStep = NothingCopied()
        self._gather: NotGathering | Gathering = NotGathering()
        self._finished: list[BatchSample] = []

    def copy(self, step: int, counters: Tensor) -> None:
        """Copies the counters, which hold the rows of `step` and of no other."""
        counts = self._empty(counters.shape, self._compute)
        self._compute.launch(lambda: counts.copy_(counters))
        self._copied = CopiedStep(step, counts, self._installed_layout())

    def issue(self) -> None:
        """Issues the gather of the copied step, if there is one, on the compute stream.

        For communicators that are ordered with the stream, or once the copy has run.
        """
        match self._copied:
            case CopiedStep(_, counts) as copied:
                gathered = self._empty_gathered(counts)
                with self._compute.current():
                    work = self._communicator.all_gather(gathered, counts)
                self._start(self._receive(copied, gathered, work))

    def issue_on_worker(self, copied_event: Event) -> None:
        """The same on the worker, after the compute stream has reached the event."""
        match self._copied:
            case CopiedStep() as copied:
                self._start(self._issue_and_receive(copied, copied_event))

    def take(self) -> Sequence[BatchSample]:
        """Returns the samples that have come since the last call; never waits.

        Raises the error of a gather that failed.
        """
        match self._gather:
            case Gathering(sample) if sample.done():
                self._finish(sample.result())
        samples, self._finished = self._finished, []
        return samples

    def drain(self) -> Job[None]:
        """Waits for the gather in progress. Raises its error, or `ResultPending`."""
        match self._gather:
            case Gathering(sample):
                try:
                    self._finish((yield JobDone(sample)))
                except TimeoutError as error:
                    raise ResultPending("the counts of a step have not come") from error

    def _start(self, gather: Job[BatchSample]) -> None:
        self._copied = NothingCopied()
        self._gather = Gathering(self._worker.start(gather, "gather"))

    def _finish(self, sample: BatchSample) -> None:
        self._gather = NotGathering()
        self._finished.append(sample)

    def _issue_and_receive(self, copied: CopiedStep, copied_event: Event) -> Job[BatchSample]:
        yield EventDone(copied_event)
        gathered = self._empty_gathered(copied.counts)
        work = self._communicator.all_gather(gathered, copied.counts)
        return (yield from self._receive(copied, gathered, work))

    def _receive(self, copied: CopiedStep, gathered: Tensor, work: Work) -> Job[BatchSample]:
        yield WorkDone(work)
        counts: BatchCounts = gathered.cpu().numpy()[:: self._ranks_sharing_rows]
        return BatchSample(copied.step, counts, copied.layout)

    def _empty_gathered(self, counts: Tensor) -> Tensor:
        # Of the stream that the gather is ordered with. A communicator over the host writes on the
        # copy stream: memory of the compute stream may have been freed while that still uses it.
        ordered = self._communicator.capabilities.stream_ordered
        stream = self._compute if ordered else self._accelerator.stream(Role.COPY)
        return self._empty((self._communicator.size, *counts.shape), stream)

    def _empty(self, shape: Sequence[int], stream: Stream) -> Tensor:
        """Returns memory that `stream` is the first to write."""
        # Engines call in inference mode; other threads could not write tensors that are made in it.
        with stream.current(), torch.inference_mode(False):
            return torch.empty(tuple(shape), dtype=torch.int32, device=self._accelerator.device)
