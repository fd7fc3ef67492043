"""Events of the virtual device, as references to their latest recording."""

from typing import TYPE_CHECKING

from equipoise.hal.errors import EventNotRecorded, StreamFailed, StreamTimeout
from equipoise.hal.stream import Event

if TYPE_CHECKING:
    from equipoise.backends.virtual.device import VirtualDevice


class VirtualRecording:
    """One recording of an event: reached, or failed together with its stream."""

    __slots__ = ("_device", "ended", "failure")

    def __init__(self, device: "VirtualDevice") -> None:
        self._device = device
        self.ended = False
        self.failure: BaseException | None = None

    def reach(self) -> None:
        """The stream has come here."""
        self.ended = True

    def fail(self, failure: BaseException) -> None:
        """The stream never comes here."""
        self.failure = failure
        self.ended = True

    def visible(self) -> bool:
        """Whether a query that the host makes now says that it ended."""
        return self.ended

    def await_by(self) -> "VirtualRecording | OneShotSignal":
        """What one waiting stream waits for."""
        return self

    def passable(self) -> bool:
        """Whether the waiting stream may go on."""
        return self.ended

    def take(self) -> None:
        """The waiting stream goes on. Raises `StreamFailed`."""
        self.check("an event that is waited for")

    def check(self, what: str) -> None:
        """Raise `StreamFailed` if the stream failed before it came here."""
        if self.failure is not None:
            raise StreamFailed(f"{what} failed: {self.failure}") from self.failure


class OneShotSignal:
    """A native event that feeds one wait and empties itself."""

    __slots__ = ("_full", "_recording")

    def __init__(self, recording: VirtualRecording) -> None:
        self._recording = recording
        self._full = recording.ended

    def send(self) -> None:
        """Let the one waiter go."""
        self._full = True

    def passable(self) -> bool:
        """Whether it was sent and not taken."""
        return self._full

    def take(self) -> None:
        """The waiter goes on. Raises `StreamFailed`."""
        self._full = False
        self._recording.take()


class OneShotRecording(VirtualRecording):
    """A recording on a device whose native events feed one wait each: one for every waiter."""

    __slots__ = ("_signals",)

    def __init__(self, device: "VirtualDevice") -> None:
        super().__init__(device)
        self._signals: list[OneShotSignal] = []

    def await_by(self) -> OneShotSignal:
        """A signal of the waiter's own; sent already if the point was reached."""
        signal = OneShotSignal(self)
        if not self.ended:
            self._signals.append(signal)
        return signal

    def reach(self) -> None:
        """Send every waiter its own."""
        super().reach()
        self._send_all()

    def fail(self, failure: BaseException) -> None:
        """Let the waiters learn it."""
        super().fail(failure)
        self._send_all()

    def _send_all(self) -> None:
        for signal in self._signals:
            signal.send()
        self._signals.clear()


class LaggingRecording(VirtualRecording):
    """A recording whose end the host's queries see some micro-steps late."""

    __slots__ = ("_is_visible",)

    def __init__(self, device: "VirtualDevice") -> None:
        super().__init__(device)
        self._is_visible = False

    def reach(self) -> None:
        """The news is on its way to the host."""
        super().reach()
        self._device.reports.post(self.show)

    def visible(self) -> bool:
        """Whether the news has come. A failure is seen at once."""
        return self._is_visible or self.failure is not None

    def show(self) -> None:
        """The news has come."""
        self._is_visible = True


class VirtualEvent:
    """The latest recording; whoever waits keeps the recording it saw (clause O4)."""

    __slots__ = ("_device", "_recording")

    def __init__(self, device: "VirtualDevice") -> None:
        self._device = device
        self._recording: VirtualRecording | None = None
        device.events += 1

    def __del__(self) -> None:
        self._device.events -= 1

    def query(self) -> bool:
        """Whether the latest recording has been reached."""
        return self._recording is not None and self._recording.visible()

    def synchronize(self, timeout: float) -> None:
        """Advance the world until the latest recording is reached."""
        recording = self.latest()
        if not self._device.world.until(lambda: recording.ended, timeout):
            raise StreamTimeout(f"the event was not reached within {timeout:g} s")
        self._device.reports.flush()
        recording.check("the event")

    def latest(self) -> VirtualRecording:
        """The latest recording. Raises `EventNotRecorded`."""
        if self._recording is None:
            raise EventNotRecorded("nothing was ever recorded into this event")
        return self._recording

    def start_recording(self) -> VirtualRecording:
        """Start a new recording; earlier waiters keep the old one."""
        self._recording = self._device.parts.mark(self._device)
        return self._recording


def own_event(event: Event) -> VirtualEvent:
    """`event` itself. Raises `TypeError` for one of another backend."""
    if not isinstance(event, VirtualEvent):
        raise TypeError(f"an event of another backend: {event!r}")
    return event
