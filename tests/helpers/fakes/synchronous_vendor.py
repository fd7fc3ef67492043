"""A vendor whose device is the host: everything runs where it is launched, and nothing can wait."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from equipoise.backends.devices.gate import Gate
from equipoise.backends.devices.runtime import Device
from equipoise.backends.devices.stream import DeviceStream
from equipoise.hal.stream import Role


class AtOnce:
    """See `equipoise.backends.devices.runtime.DeviceRuntime`."""

    kind = "cpu"

    def settle_thread(self, index: int) -> None:
        """There is one device."""

    def current(self, stream: Any) -> AbstractContextManager[None]:
        """Any stream is as good as another."""
        return nullcontext()

    def current_stream(self, index: int) -> Any:
        """One that has nothing to do."""
        return Passed()

    def kept_stream(self, index: int, use: str) -> Any:
        """Likewise."""
        return Passed()

    def event(self) -> Any:
        """It has passed."""
        return Passed()

    def captured(self, stream: Any) -> bool:
        """Never."""
        return False

    def uncapturable(self) -> str:
        """It runs what it should keep."""
        return "what is launched has run"

    def begin_capture(self) -> Any:
        """Nobody asks."""
        raise NotImplementedError

    def end_capture(self, graph: Any) -> None:
        """Nobody asks."""
        raise NotImplementedError

    def unrestricted(self) -> AbstractContextManager[None]:
        """Nothing is forbidden."""
        return nullcontext()

    def free_memory(self, index: int) -> tuple[int, int]:
        """None is counted."""
        return 0, 0


class Passed:
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


DEVICE = Device(AtOnce(), 0)


def stream(adopted: bool = False) -> DeviceStream:
    """A stream of that device."""
    return DeviceStream(Role.COMPUTE, "at once", DEVICE, Passed(), Gate(), adopted)
