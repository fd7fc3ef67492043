"""Handles of operations: as the device runs them (`InflightOp`), and as their issuers see them."""

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
    """The state of an operation on the device."""

    IN_FLIGHT = auto()
    DONE = auto()
    """The device does not use the buffers any more."""
    FAILED = auto()
    """An error of the device or of the library: the buffers may still be in use."""


class InflightOp:
    """A launched operation. It keeps its buffers until the device has finished (clause K1).

    Args:
        handle: the library's handle.
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
        # Read once: another thread that polls may drop the handle.
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
        """Make `stream` wait for the end, without blocking the host."""
        handle = self._handle
        if handle is not None:
            self.add_waiting_stream(stream)
            stream.launch(handle.block_stream)

    def add_waiting_stream(self, stream: Stream) -> None:
        """Note that `stream` waits for the end, so that a failure reaches it."""
        self._waiting_streams.append(stream)

    def fail(self, failure: CommunicatorFailed) -> None:
        """Fail the streams that wait: the operation has failed, or is about to be aborted, and its
        output will not be there (clauses E7, E10)."""
        waiting, self._waiting_streams = self._waiting_streams, []
        for stream in waiting:
            # Not by a launch: another launch that blocks in the driver, with the issue lock, may be
            # the reason for the abort.
            own_stream(stream).fail(failure)

    def is_drained(self) -> bool:
        """Whether the device has finished an operation whose communicator was aborted."""
        handle = self._handle
        if handle is not None:
            self._device.set_current()
            try:
                if not handle.is_complete():
                    return False
            except RuntimeError:  # an error of the device, which does not go away
                return False
            self._release_buffers()
        return True

    def _release_buffers(self) -> None:
        self._handle, self._buffers, self._waiting_streams = None, (), []


@dataclass(frozen=True)
class StreamReleaser:
    """Releases streams that wait for an operation which was never launched.

    Attributes:
        device: the device.
        stream: of the vendor's, on which nothing ever waits.
        deferred_event: makes what a stream can wait for before it is recorded.
    """

    device: Device
    stream: Any
    deferred_event: Callable[[], DeferredEvent]

    def release(self, deferred_event: DeferredEvent) -> None:
        """Let the stream continue that waits for this event; from any thread."""
        self.device.set_current()
        deferred_event.record(self.stream)


@dataclass(frozen=True)
class WaitingStream:
    """A stream that waits for an operation which was not launched yet.

    Attributes:
        deferred_event: what it waits for.
        stream: the stream.
    """

    deferred_event: DeferredEvent
    stream: Stream

    def release(self, releaser: StreamReleaser, failure: CommunicatorFailed | None) -> None:
        """Let the stream continue. After a failure it is failed first, because the output is not
        there (clause E10): a caller that synchronises it must not find it idle and healthy."""
        if failure is not None:
            own_stream(self.stream).fail(failure)  # not by a launch, which may block
        releaser.release(self.deferred_event)


class DeviceWork:
    """One operation as its issuer sees it. It may end, at its deadline or by an abort, before the
    device has finished; `InflightOp` keeps the buffers then.

    Args:
        what: the operation in words, for errors.
        deadline: seconds from now until it fails its communicator.
        failed: called with every failure, before any caller sees it.
        releaser: releases streams that wait for what is never launched.
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
        self._end_event = threading.Event()

    @property
    def has_ended(self) -> bool:
        """Whether its end is known, without asking the device."""
        return self._end_event.is_set()

    def set_inflight(self, inflight: InflightOp, stream: Any) -> None:
        """The operation was launched; `stream` is the vendor's stream that it runs on."""
        with self._lock:
            self._inflight = None if self._end_event.is_set() else inflight
            waiting_streams, self._waiting_streams = self._waiting_streams, []
        for waiting in waiting_streams:
            inflight.add_waiting_stream(waiting.stream)
            waiting.deferred_event.record(stream)

    def done(self) -> bool:
        """Whether the operation ended, well or not; asks the device, never blocks."""
        if not self._end_event.is_set():
            self._poll()
        return self._end_event.is_set()

    def wait(self, stream: Stream) -> None:
        """Make `stream` wait for the end, without blocking the host. Raises `CommunicatorFailed` if
        it has failed already."""
        waiting: WaitingStream | None = None
        with self._lock:
            inflight = self._inflight
            if inflight is None and not self._end_event.is_set():
                waiting = WaitingStream(self._releaser.deferred_event(), stream)
                self._waiting_streams.append(waiting)
        # Launched outside the lock: a launch may block, and the watchdog needs the lock to end it.
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
        """Stop waiting; the buffers are kept until the device has finished with them (E4).

        Fails the communicator even if the operation has just ended: that would be a race otherwise.
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
            if self._end_event.is_set():
                return
            self._failure, inflight, self._inflight = failure, self._inflight, None
            waiting_streams, self._waiting_streams = self._waiting_streams, []
            # First the communicator, so that a caller who sees the end finds it failed.
            if failure is not None:
                self._on_failed(failure)
            self._end_event.set()
        if failure is not None and inflight is not None:
            inflight.fail(failure)  # also if the library cannot abort it
        for waiting in waiting_streams:
            waiting.release(self._releaser, failure)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            # A new exception each time: one that is raised again would keep the frames of its
            # earlier callers, and with them their tensors (R1).
            raise type(self._failure)(str(self._failure))
