"""What the device has under way for one operation.

Handles of operations as their issuers see them.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import Tensor

from equipoise.backends.common.bounded_wait import poll
from equipoise.backends.devices.collectives.ccl import CclHandle, DeferredEvent
from equipoise.backends.devices.runtime import Device, first_line
from equipoise.backends.devices.stream import own_stream
from equipoise.hal.errors import CommunicatorFailed, OperationTimeout, ResultPending
from equipoise.hal.stream import Stream


class OpStatus(Enum):
    """What became of an operation on the device."""

    IN_FLIGHT = auto()
    DONE = auto()
    """The device has let go of the buffers."""
    FAILED = auto()
    """An error of the device or of the library: whether the buffers are in use nobody knows."""


class InflightOp:
    """An operation that was launched, and its buffers until it really ended (clause K1).

    Args:
        handle: the library's.
        buffers: tensors that the operation reads or writes.
        device: where it runs.
    """

    def __init__(self, handle: CclHandle, buffers: Sequence[Tensor], device: Device) -> None:
        self._handle: CclHandle | None = handle
        self._buffers = tuple(buffers)
        self._device = device
        self._waiting_streams: list[Stream] = []
        self.error = ""

    def poll(self) -> OpStatus:
        """Ask the device; never blocks."""
        handle = self._handle
        if handle is None:
            return OpStatus.DONE
        if self.error:
            return OpStatus.FAILED
        self._device.set_current()
        try:
            if not handle.is_complete():
                return OpStatus.IN_FLIGHT
            self.error = handle.error()
        except RuntimeError as error:
            self.error = first_line(error)
        if self.error:
            return OpStatus.FAILED
        self._release_buffers()
        return OpStatus.DONE

    def block_stream(self, stream: Stream) -> None:
        """Make `stream` wait for the end, without the host."""
        handle = self._handle
        if handle is not None:
            self.add_waiting_stream(stream)
            stream.launch(handle.block_stream)

    def add_waiting_stream(self, stream: Stream) -> None:
        """That stream waits for the end, in whatever way."""
        self._waiting_streams.append(stream)

    def fail(self, failure: CommunicatorFailed) -> None:
        """It has failed, or its group is about to be aborted: fail the streams that wait, for what
        they wait for will not be there (clauses E7, E10)."""
        waiting, self._waiting_streams = self._waiting_streams, []
        for stream in waiting:
            own_stream(stream).fail(failure)  # no launch: one that stands in the driver may be why

    def is_drained(self) -> bool:
        """Whether the device has come behind an operation whose group was aborted."""
        handle = self._handle
        if handle is not None:
            self._device.set_current()
            try:
                if not handle.is_complete():
                    return False
            except RuntimeError:  # an error of the device: it will say nothing else any more
                return False
            self._release_buffers()
        return True

    def _release_buffers(self) -> None:
        self._handle, self._buffers, self._waiting_streams = None, (), []


@dataclass(frozen=True)
class StreamReleaser:
    """What releases streams that wait for an operation which never came to the device.

    Attributes:
        device: the device.
        stream: of the vendor's, on which nothing ever waits.
        deferred_event: makes what a stream can wait for before it is recorded.
    """

    device: Device
    stream: Any
    deferred_event: Callable[[], DeferredEvent]

    def release(self, deferred_event: DeferredEvent) -> None:
        """Let the one stream go on that waits for this; from any thread."""
        self.device.set_current()
        deferred_event.record(self.stream)


@dataclass(frozen=True)
class WaitingStream:
    """A stream that waits for an operation which the device does not know yet.

    Attributes:
        deferred_event: what it waits for.
        stream: who waits.
    """

    deferred_event: DeferredEvent
    stream: Stream

    def release(self, releaser: StreamReleaser, failure: CommunicatorFailed | None) -> None:
        """Let the stream go; first fail it, for what it waits for is not there (clause E10): who
        synchronises it must not find it drained and well."""
        if failure is not None:
            own_stream(self.stream).fail(failure)  # no launch: another may stand in the driver
        releaser.release(self.deferred_event)


class DeviceWork:
    """One operation as its issuer sees it; what the device does with it is its `Flight`'s business.

    Args:
        what: the operation in words, for errors.
        deadline: seconds from now until it fails its communicator.
        failed: called with every failure, before anybody sees it.
        releaser: releases streams that wait in vain.
    """

    def __init__(
        self,
        what: str,
        deadline: float,
        failed: Callable[[CommunicatorFailed], None],
        releaser: StreamReleaser,
    ) -> None:
        self.what = what
        self.expiry = time.monotonic() + deadline
        self._on_failed = failed
        self._releaser = releaser
        self._inflight: InflightOp | None = None
        self._failure: CommunicatorFailed | None = None
        self._waiting_streams: list[WaitingStream] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()

    @property
    def has_ended(self) -> bool:
        """Whether its end is known; asks nobody."""
        return self._ended.is_set()

    def set_inflight(self, inflight: InflightOp, stream: Any) -> None:
        """The device knows it now; `stream` is the vendor's stream that it runs on."""
        with self._lock:
            self._inflight = None if self._ended.is_set() else inflight
            waiting_streams, self._waiting_streams = self._waiting_streams, []
        for waiting in waiting_streams:
            inflight.add_waiting_stream(waiting.stream)
            waiting.deferred_event.record(stream)

    def done(self) -> bool:
        """Whether the operation ended, well or not; asks the device, never blocks."""
        if not self._ended.is_set():
            self._poll()
        return self._ended.is_set()

    def wait(self, stream: Stream) -> None:
        """Make `stream` wait for the end, without the host. Raises `CommunicatorFailed` if it has
        failed already."""
        waiting: WaitingStream | None = None
        with self._lock:
            inflight = self._inflight
            if inflight is None and not self._ended.is_set():
                waiting = WaitingStream(self._releaser.deferred_event(), stream)
                self._waiting_streams.append(waiting)
        if waiting is not None:
            stream.launch(waiting.deferred_event.wait)
        elif inflight is not None:
            inflight.block_stream(stream)
        else:
            self._raise_failure()

    def result(self, timeout: float) -> None:
        """Block until the end; raises `ResultPending` after `timeout` seconds."""
        if not poll(self.done, timeout):
            raise ResultPending(f"{self.what} has not ended within {timeout:g} s")
        self._raise_failure()

    def cancel(self) -> None:
        """Stop waiting; the channel keeps the buffers until the device lets go of them (E4).

        Fails the communicator even after the end: whether that came first is a matter of luck.
        """
        failure = CommunicatorFailed(f"{self.what} was cancelled")
        self._on_failed(failure)
        self._end(failure)

    def complete(self) -> None:
        """End it well, unless it has ended."""
        self._end(None)

    def fail(self, reason: str) -> None:
        """End it with `CommunicatorFailed`, unless it has ended."""
        self._end(CommunicatorFailed(f"{self.what} {reason}"))

    def _poll(self) -> None:
        inflight = self._inflight
        status = OpStatus.IN_FLIGHT if inflight is None else inflight.poll()
        if status is OpStatus.DONE:
            self._end(None)
        elif status is OpStatus.FAILED and inflight is not None:
            self.fail(f"failed on the device: {inflight.error}")
        elif time.monotonic() >= self.expiry:
            self._end(OperationTimeout(f"{self.what} passed its deadline"))

    def _end(self, failure: CommunicatorFailed | None) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._failure, inflight, self._inflight = failure, self._inflight, None
            waiting_streams, self._waiting_streams = self._waiting_streams, []
            if failure is not None:
                self._on_failed(failure)
            self._ended.set()
        if failure is not None and inflight is not None:
            inflight.fail(failure)  # whether or not anybody can end it on the device
        for waiting in waiting_streams:
            waiting.release(self._releaser, failure)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            # Afresh: a kept exception would keep the frames that it was raised through, and what
            # the device never lets go of is kept for ever (R1).
            raise type(self._failure)(str(self._failure))
