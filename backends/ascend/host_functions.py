"""The share solver on an NPU: a host function that the stream calls in its turn.

Water-filling refills one expert after the other, which no fixed number of operators can express. So
the stream copies the counts and tables to the host, calls the native solver there, and copies the
shares back; the host thread that launched it does not wait.

torch_npu keeps what it needs for a launched callback for ever. So a callback is captured once per
stream and size, into a graph of its own, and replayed.
"""

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise import _native
from equipoise.backends.ascend import npu_runtime, private_api
from equipoise.backends.devices.capture import CAPTURE_STREAM, try_capture_lock
from equipoise.backends.devices.stream import DeviceStream
from equipoise.hal.routing import SWEEPS


@dataclass(eq=False)
class SolveJob:
    """Page-locked memory for one run of the solver at a time, in the order of a stream.

    Attributes:
        stream: the stream that fails if the solver does.
        experts: logical experts.
        ranks: how many ranks the slots are spread over.
        inputs: int64 [experts + (experts + 1) + slots], page-locked: counts, start, replicas.
        result: int32 [slots], page-locked: cumulative shares.
    """

    stream: DeviceStream
    experts: int
    ranks: int
    inputs: Tensor
    result: Tensor
    _graph: Any = field(default=None)

    def enqueue(self) -> None:
        """Make the current stream call the solver."""
        current = npu_runtime.npu().current_stream()
        if npu_runtime.npu().is_current_stream_capturing():
            _launch(current, self)
            return
        if self._graph is None:
            self._graph = _captured(self)
        if self._graph is None:  # another thread captures, or graphs are off
            _launch(current, self)
        else:
            self._graph.replay()

    def solve(self) -> None:
        """Runs on a thread of torch_npu, which an exception would end for good; so it fails the
        stream instead."""
        try:
            counts, start, replicas = torch.split(
                self.inputs, [self.experts, self.experts + 1, self.result.numel()]
            )
            if int(start[-1]) == 0:  # the layer has no tables yet: its shares are left alone
                self.result.zero_()
                return
            _native.solve_cumulative(
                counts.numpy(),
                start.int().numpy(),
                replicas.int().numpy(),
                self.ranks,
                SWEEPS,
                self.result.numpy(),
            )
        except BaseException as failure:
            self.stream.fail(failure)


class HostShareSolver:
    """The jobs of one accelerator: one per stream and size, and one per capture, since a graph may
    be replayed in parallel with the stream."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[DeviceStream, int, int, int], SolveJob] = {}

    def job(self, stream: DeviceStream, experts: int, slots: int, ranks: int) -> SolveJob:
        """A job whose memory only earlier runs on the same stream use."""
        if npu_runtime.npu().is_current_stream_capturing():
            return _job(stream, experts, slots, ranks)
        key = (stream, experts, slots, ranks)
        if key not in self._jobs:
            self._jobs[key] = _job(*key)
        return self._jobs[key]


def _job(stream: DeviceStream, experts: int, slots: int, ranks: int) -> SolveJob:
    inputs = torch.empty(2 * experts + 1 + slots, dtype=torch.int64, pin_memory=True)
    return SolveJob(
        stream, experts, ranks, inputs, torch.empty(slots, dtype=torch.int32, pin_memory=True)
    )


_subscribed: set[tuple[int, int]] = set()
_lock = threading.Lock()


def _launch(stream: Any, job: SolveJob) -> None:
    """Enqueue the call on the stream, which needs a thread that runs its callbacks."""
    # A stream is subscribed once; the lock keeps two threads from doing it at the same time.
    with _lock:
        name = (int(stream.device_index), int(stream.stream_id))
        if name not in _subscribed:
            private_api.subscribe(stream)
            _subscribed.add(name)
    private_api.launch_host_function(stream, SolveJob.solve, job)


def _captured(job: SolveJob) -> Any:
    """A graph that only calls the solver; None while nothing can be captured."""
    with try_capture_lock() as locked:
        if not locked or npu_runtime.RUNTIME.why_uncapturable():
            return None
        stream = job.stream.device.cached_stream(CAPTURE_STREAM)
        with npu_runtime.RUNTIME.current(stream):
            graph = npu_runtime.RUNTIME.begin_capture()
            try:
                _launch(stream, job)
            except BaseException:
                # The capture must be ended: while one is open the driver refuses pageable copies
                # and every other capture of the process (errors 107030, 107027).
                with suppress(RuntimeError):
                    npu_runtime.RUNTIME.end_capture(graph)
                raise
            npu_runtime.RUNTIME.end_capture(graph)
        return graph
