"""Events as references to their latest recording, each of which is a vendor event of its own."""

from typing import Any

from equipoise.backends.common.bounded_wait import poll
from equipoise.backends.devices.runtime import Device
from equipoise.hal.errors import EventNotRecorded, StreamFailed, StreamTimeout
from equipoise.hal.stream import Event


class DeviceRecording:
    """One recording: a vendor event that is recorded exactly once.

    So a stream that waits keeps the point that it saw (clause O4), whatever the vendor does with an
    event that is recorded twice. The vendor's event is dropped as soon as it is reached.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._event: Any = device.runtime.event()
        self.failure: BaseException | None = None

    def record(self, stream: Any) -> None:
        """Record after everything launched so far on `stream`, a stream of the vendor's."""
        self._device.set_current()
        self._event.record(stream)

    def block_stream(self, stream: Any) -> None:
        """Make `stream`, a stream of the vendor's, wait for the point."""
        # Read once: another thread may drop the vendor's event as soon as it is reached.
        event = self._event
        if event is not None:
            self._device.set_current()
            event.wait(stream)

    def fail(self, failure: BaseException) -> None:
        """Mark the point as never reached."""
        self.failure = failure
        self._event = None

    def is_complete(self) -> bool:
        """Whether the point is reached, or never will be. Asks the device; never blocks."""
        event = self._event
        if event is None:
            return True
        self._device.set_current()
        try:
            with self._device.runtime.allowed_in_capture():
                reached = bool(event.query())
        except RuntimeError as failure:  # a device error, which every later call reports too
            self.fail(failure)
            return True
        if reached:
            self._event = None
        return reached

    def wait(self, timeout: float, what: str) -> None:
        """Block the host. Raises `StreamTimeout`, `StreamFailed`."""
        if not poll(self.is_complete, timeout):
            raise StreamTimeout(f"{what} was not reached within {timeout:g} s")
        if self.failure is not None:
            raise StreamFailed(f"{what} failed: {self.failure}") from self.failure


class DeviceEvent:
    """An event of the contract. It refuses to wait for a recording that does not exist, where the
    vendor's event silently lets the stream through."""

    def __init__(self) -> None:
        self._recording: DeviceRecording | None = None

    def query(self) -> bool:
        """Whether the latest recording has been reached; false while the host still queues it."""
        recording = self._recording
        return recording is not None and recording.is_complete()

    def synchronize(self, timeout: float) -> None:
        """Block until the latest recording is reached."""
        self.latest().wait(timeout, "the event")

    def latest(self) -> DeviceRecording:
        """The latest recording. Raises `EventNotRecorded`."""
        if self._recording is None:
            raise EventNotRecorded("nothing was ever recorded into this event")
        return self._recording

    def start_recording(self, device: Device) -> DeviceRecording:
        """Start a new recording on that device; earlier waiters keep the old one."""
        self._recording = DeviceRecording(device)
        return self._recording


def own_event(event: Event) -> DeviceEvent:
    """`event` itself. Raises `TypeError` for one of another backend."""
    if not isinstance(event, DeviceEvent):
        raise TypeError(f"an event of another backend: {event!r}")
    return event
