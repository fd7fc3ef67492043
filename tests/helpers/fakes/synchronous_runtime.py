"""A runtime whose device is the host: everything runs where it is launched, nothing can wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from equipoise.backends.devices.issue_lock import IssueLock
from equipoise.backends.devices.runtime import Device, DeviceRuntime
from equipoise.backends.devices.stream import DeviceStream
from equipoise.hal.stream import Role


class SynchronousRuntime(DeviceRuntime):
    """Calls no module of torch's."""

    device_type = "cpu"

    def set_thread_device(self, index: int) -> None:
        """There is one device."""

    @contextmanager
    def current(self, stream: Any) -> Iterator[None]:
        """Any stream is as good as another."""
        yield

    def current_stream(self, index: int) -> Any:
        """One that has nothing to do."""
        return CompletedEvent()

    def cached_stream(self, index: int, use: str) -> Any:
        """Likewise."""
        return CompletedEvent()

    def wrap_stream(self, index: int, stream: Any) -> Any:
        """Whatever it is."""
        return stream

    def event(self) -> Any:
        """It has passed."""
        return CompletedEvent()

    def is_capturing(self) -> bool:
        """Never."""
        return False

    def why_uncapturable(self) -> str:
        """It runs what it should keep."""
        return "what is launched has run"

    def free_memory(self, index: int) -> tuple[int, int]:
        """None is counted."""
        return 0, 0


class CompletedEvent:
    """A stream or an event that is always at its end."""

    def query(self) -> bool:
        """Yes."""
        return True

    def synchronize(self) -> None:
        """At once."""

    def record(self, stream: Any) -> None:
        """Nothing is ahead."""

    def wait(self, stream: Any) -> None:
        """Nothing is ahead."""


DEVICE = Device(SynchronousRuntime(), 0)


def stream(adopted: bool = False) -> DeviceStream:
    """A stream of that device."""
    return DeviceStream(Role.COMPUTE, "at once", DEVICE, CompletedEvent(), IssueLock(), adopted)
