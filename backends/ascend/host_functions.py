"""Functions of the host that a stream calls in its turn: the share solver and levelled routing.

Both go from one expert to the next, each step on what the last one left, which no fixed number of
operators can express. So the stream copies the operands to page-locked memory, calls the native
function there, and copies the result back; the host thread that launched it does not wait.

torch_npu keeps what it needs for a launched callback for ever. So a callback is captured once per
stream and size, into a graph of its own, and replayed.
"""

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise import _native
from equipoise.backends.ascend import npu_runtime, private_api
from equipoise.backends.devices.capture import CAPTURE_STREAM, try_capture_lock
from equipoise.backends.devices.stream import DeviceStream
from equipoise.hal.routing import SWEEPS

MIN_CAPACITY = 1024
"""Least ids that memory is made for: most decode steps share it. Larger batches get the next power
of two, so that there are few sizes, and all of them take less than twice the largest."""


class HostFunction(Protocol):
    """What the host computes for a stream, and on how much memory; compared by value."""

    @property
    def input_dtype(self) -> torch.dtype:
        """The type of the operands, which are one array."""
        ...

    @property
    def input_size(self) -> int:
        """The most elements of operands."""
        ...

    @property
    def result_size(self) -> int:
        """The most elements of the result, int32."""
        ...

    def __call__(self, inputs: NDArray[Any], result: NDArray[np.int32]) -> None:
        """Compute `result` of `inputs`; both as long as the sizes say."""
        ...


@dataclass(frozen=True)
class SolveShares:
    """Water-filling on one layer's counts.

    Inputs are counts [experts], start [experts + 1] and replicas [slots]; the result is the
    cumulative shares [slots].
    """

    experts: int
    slots: int
    ranks: int
    input_dtype = torch.int64

    @property
    def input_size(self) -> int:
        """Counts and the layer's table."""
        return 2 * self.experts + 1 + self.slots

    @property
    def result_size(self) -> int:
        """A share per slot."""
        return self.slots

    def __call__(self, inputs: NDArray[Any], result: NDArray[np.int32]) -> None:
        """Solve; a layer that has no tables yet gets zeros, which are not used."""
        counts, start, replicas = np.split(inputs, np.cumsum([self.experts, self.experts + 1]))
        if start[-1] == 0:
            result[:] = 0
            return
        table = start.astype(np.int32), replicas.astype(np.int32)
        _native.solve_cumulative(counts, *table, self.ranks, SWEEPS, result)


@dataclass(frozen=True)
class RouteLevelled:
    """Levelled routing of a batch of up to `capacity` ids, by itself or as part of a group.

    Inputs are the number of ids, rank and layer, then start [experts + 1], replicas [slots], of a
    group total [experts] and before [experts], and the ids; the result is their slots. What lies
    after the last id, or its slot, is left from a larger batch.
    """

    experts: int
    slots: int
    ranks: int
    capacity: int
    grouped: bool
    input_dtype = torch.int32

    @staticmethod
    def of_batch(
        count: int, experts: int, slots: int, ranks: int, *, grouped: bool
    ) -> "RouteLevelled":
        """With a capacity for `count` ids."""
        capacity = max(MIN_CAPACITY, 1 << (count - 1).bit_length())
        return RouteLevelled(experts, slots, ranks, capacity, grouped)

    @property
    def input_size(self) -> int:
        """Numbers, the layer's table, counts and ids."""
        return sum(self._widths) + self.capacity

    @property
    def result_size(self) -> int:
        """A slot per id."""
        return self.capacity

    def __call__(self, inputs: NDArray[Any], result: NDArray[np.int32]) -> None:
        """Route. Raises ValueError where the layer has no tables yet."""
        numbers, start, replicas, *summed, ids = np.split(inputs, np.cumsum(self._widths))
        count, rank, layer = numbers.tolist()
        _native.route_levelled(
            ids[:count],
            start,
            replicas,
            self.ranks,
            rank,
            layer,
            result[:count],
            np.empty(self.experts, np.int32),  # the batch's own counts: the device has them
            *summed,
        )

    @property
    def _widths(self) -> tuple[int, ...]:
        """Elements of all operands but the ids."""
        summed = (self.experts, self.experts) if self.grouped else ()
        return (3, self.experts + 1, self.slots, *summed)


@dataclass(eq=False)
class HostJob:
    """Page-locked memory for one run of a function at a time, in the order of a stream.

    Attributes:
        stream: the stream that fails if the function does.
        function: what the host computes.
        inputs: [function.input_size], page-locked.
        result: int32 [function.result_size], page-locked.
    """

    stream: DeviceStream
    function: HostFunction
    inputs: Tensor
    result: Tensor
    _graph: Any = field(default=None)

    def enqueue(self) -> None:
        """Make the current stream call the function."""
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

    def run(self) -> None:
        """Runs on a thread of torch_npu, which an exception would end for good; so it fails the
        stream instead."""
        try:
            self.function(self.inputs.numpy(), self.result.numpy())
        except BaseException as failure:
            # What was launched after it still runs, and must find slots that exist.
            self.result.zero_()
            self.stream.fail(failure)


class HostJobs:
    """The jobs of one accelerator: one per stream, function and size, and one per capture, since a
    graph may be replayed in parallel with the stream."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[DeviceStream, HostFunction], HostJob] = {}

    def job(self, stream: DeviceStream, function: HostFunction) -> HostJob:
        """A job whose memory only earlier runs on the same stream use."""
        if npu_runtime.npu().is_current_stream_capturing():
            return _job(stream, function)
        key = (stream, function)
        if key not in self._jobs:
            self._jobs[key] = _job(stream, function)
        return self._jobs[key]


def _job(stream: DeviceStream, function: HostFunction) -> HostJob:
    # An engine launches in inference mode; a tensor made in it cannot be written outside of it.
    with torch.inference_mode(False):
        inputs = torch.empty(function.input_size, dtype=function.input_dtype, pin_memory=True)
        result = torch.empty(function.result_size, dtype=torch.int32, pin_memory=True)
    return HostJob(stream, function, inputs, result)


_subscribed: set[tuple[int, int]] = set()
_lock = threading.Lock()


def _launch(stream: Any, job: HostJob) -> None:
    """Enqueue the call on the stream, which needs a thread that runs its callbacks."""
    # A stream is subscribed once; the lock keeps two threads from doing it at the same time.
    with _lock:
        name = (int(stream.device_index), int(stream.stream_id))
        if name not in _subscribed:
            private_api.subscribe(stream)
            _subscribed.add(name)
    private_api.launch_host_function(stream, HostJob.run, job)


def _captured(job: HostJob) -> Any:
    """A graph that only calls the function; None while nothing can be captured."""
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
