"""Point-to-point messages: each direction of each pair of ranks has a communicator of its own.

All operations of a communicator of the library run on one stream, in the order of their launch, and
a send ends when its receive does. If messages shared one, two ranks that both send first would wait
for each other for ever; so would three, whichever way a stream is shared by several pairs. So a
link is one direction between two ranks, with a communicator and a stream to itself: messages of a
pair stay in order (P2), those of different pairs never wait for each other (P1).

A link is made when both ends have asked for it: the sender by its first send, the receiver by its
first receive, or both by `warm`. Neither host waits for that: a thread makes the link, and messages
issued in the meantime are launched as soon as it is there, after what their callers' streams had
been given before.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from equipoise.backends.common.bounded_wait import Deadline
from equipoise.backends.devices.collectives.comm_stream import CommStream, Launch
from equipoise.backends.devices.collectives.work import DeviceWork
from equipoise.backends.devices.runtime import Device
from equipoise.hal.errors import CommunicatorFailed
from equipoise.hal.support.native_call_guard import NATIVE_CALL_GUARD

Make = Callable[[Deadline], CommStream]
"""Makes a link's communicator together with the other end. Raises `CommunicatorFailed`."""


@dataclass(frozen=True)
class LinkSpec:
    """One end of a link.

    Attributes:
        library: name of the library.
        name: of the link, for errors and threads.
        operation: isend or irecv.
        device: the device.
    """

    library: str
    name: str
    operation: str
    device: Device

    @property
    def peer(self) -> int:
        """The other end's place in the link's group."""
        return 1 if self.operation == "isend" else 0


@dataclass(frozen=True)
class DeferredMessage:
    """A message that was issued before its link was made.

    Attributes:
        work: its handle.
        tensor: what is sent or received into.
        ready: an event of the vendor's, after what the caller's stream had been given until then.
    """

    work: DeviceWork
    tensor: Tensor
    ready: Any


@dataclass(frozen=True)
class Unconnected:
    """No message was issued yet."""


@dataclass(frozen=True)
class Connecting:
    """A thread is making the link; messages issued in the meantime, in order."""

    deferred_messages: deque[DeferredMessage] = field(default_factory=deque)


@dataclass(frozen=True)
class Connected:
    """The link can be used."""

    comm_stream: CommStream


@dataclass(frozen=True)
class ConnectFailed:
    """The link could not be made."""

    reason: str


LinkState: TypeAlias = Unconnected | Connecting | Connected | ConnectFailed


class P2PLink:
    """One end of a link.

    Args:
        operation: from whom to whom.
        make: makes its communicator.
        deadline: how long until a moment of the monotonic clock, or until the fabric closes.
    """

    def __init__(
        self, operation: LinkSpec, make: Make, deadline: Callable[[float], Deadline]
    ) -> None:
        self._spec = operation
        self._make = make
        self._deadline = deadline
        self._state: LinkState = Unconnected()
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._teardown: Callable[[CommStream], None] | None = None

    def issue(self, work: DeviceWork, tensor: Tensor) -> None:
        """Send or receive, after the current stream; never waits for the other end."""
        with self._lock:
            reason = self._launch_or_defer(work, tensor)
        if reason:
            work.fail(reason)

    def connect(self, expiry: float) -> None:
        """Make it now; the host waits for the other end. Raises `CommunicatorFailed`."""
        # The lock is not held while the link is made: a thread that issues a message meanwhile
        # defers it instead of waiting.
        with self._lock:
            absent = isinstance(self._state, Unconnected)
            if absent:
                self._state = Connecting()
        if absent:
            self._connect(expiry)
        self._settled.wait(self._deadline(expiry).remaining)
        with self._lock:
            if not isinstance(self._state, Connected):
                reason = (
                    self._state.reason
                    if isinstance(self._state, ConnectFailed)
                    else "did not come in time"
                )
                raise CommunicatorFailed(f"{self._spec.name} {reason}")

    def retire(self, teardown: Callable[[CommStream], None]) -> None:
        """Nothing is issued any more: pass the communicator to `teardown`, now or when it is
        made."""
        with self._lock:
            self._teardown = teardown
            comm_stream = self._state.comm_stream if isinstance(self._state, Connected) else None
        if comm_stream is not None:
            teardown(comm_stream)

    def collect_completed(self) -> None:
        """Release the buffers of completed messages."""
        with self._lock:
            if isinstance(self._state, Connected):
                self._state.comm_stream.collect_completed()

    def _launch_or_defer(self, work: DeviceWork, tensor: Tensor) -> str:
        """Launch the message or defer it. Returns why neither was possible, or nothing."""
        match self._state:
            case Connected(channel):
                return self._launch(channel, work, tensor)
            case ConnectFailed(why):
                return why
            case Connecting(issued):
                issued.append(self._deferred(work, tensor))
            case Unconnected():
                self._state = Connecting(deque([self._deferred(work, tensor)]))
                self._start_connecting(work.expiry)
        return ""

    def _start_connecting(self, expiry: float) -> None:
        name = f"equipoise.{self._spec.library}.{self._spec.name}"
        guarded_connect = NATIVE_CALL_GUARD(self._connect)
        threading.Thread(target=guarded_connect, args=(expiry,), name=name, daemon=True).start()

    def _connect(self, expiry: float) -> None:
        """Make the communicator, then launch the deferred messages, or fail them."""
        failed: list[tuple[DeviceWork, str]] = []
        try:
            comm_stream = self._make(self._deadline(expiry))
            self._spec.device.set_current()
        except Exception as error:  # else only their deadline would end the deferred messages
            failed = self._on_failed(f"was not connected: {error}")
        else:
            failed = self._on_connected(comm_stream)
        finally:
            self._settled.set()
        # Outside the lock: failing a work calls the communicator.
        for work, reason in failed:
            work.fail(reason)

    def _on_connected(self, comm_stream: CommStream) -> list[tuple[DeviceWork, str]]:
        """Launch the deferred messages. Returns those that could not be launched, and why."""
        failed = []
        with self._lock:
            waiting = (
                self._state.deferred_messages if isinstance(self._state, Connecting) else deque()
            )
            self._state = Connected(comm_stream)
            # Under the lock, so that messages issued from now on come after these (P2).
            for deferred in waiting:
                if reason := self._launch_late(comm_stream, deferred):
                    failed.append((deferred.work, reason))
            teardown = self._teardown
        if teardown is not None:
            teardown(comm_stream)
        return failed

    def _on_failed(self, reason: str) -> list[tuple[DeviceWork, str]]:
        with self._lock:
            waiting = (
                self._state.deferred_messages if isinstance(self._state, Connecting) else deque()
            )
            self._state = ConnectFailed(reason)
        return [(deferred.work, reason) for deferred in waiting]

    def _launch(self, comm_stream: CommStream, work: DeviceWork, tensor: Tensor) -> str:
        """Returns why it could not be launched, or nothing."""
        try:
            inflight = comm_stream.launch(self._call(comm_stream, tensor), (tensor,))
        except RuntimeError as error:
            return f"was not launched: {error}"
        work.set_inflight(inflight, comm_stream.stream)
        return ""

    def _launch_late(self, comm_stream: CommStream, deferred: DeferredMessage) -> str:
        """Launch a deferred message on the link's own stream, after what its caller's stream had
        been given when it was issued."""
        with self._spec.device.runtime.current(comm_stream.stream):
            try:
                deferred.ready.wait(comm_stream.stream)
            except RuntimeError as error:
                return f"was not launched: {error}"
            return self._launch(comm_stream, deferred.work, deferred.tensor)

    def _call(self, comm_stream: CommStream, tensor: Tensor) -> Launch:
        """An empty message travels as one byte: libraries end an empty one at once, whether or not
        the other end takes part."""
        payload = tensor if tensor.numel() else comm_stream.scratch
        return lambda group: group.message(self._spec.operation, payload, self._spec.peer)

    def _deferred(self, work: DeviceWork, tensor: Tensor) -> DeferredMessage:
        device = self._spec.device
        ready = device.runtime.event()
        ready.record(device.runtime.current_stream(device.index))
        return DeferredMessage(work, tensor, ready)
