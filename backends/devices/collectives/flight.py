"""What the device has under way for one operation."""

from collections.abc import Sequence
from enum import Enum, auto

from torch import Tensor

from equipoise.backends.devices.collectives.library import Handle
from equipoise.backends.devices.runtime import Device, first_line
from equipoise.backends.devices.stream import own_stream
from equipoise.hal.errors import CommunicatorFailed
from equipoise.hal.stream import Stream


class Fate(Enum):
    """What became of an operation on the device."""

    UNDER_WAY = auto()
    LANDED = auto()
    """The device has let go of the buffers."""
    BROKEN = auto()
    """An error of the device or of the library: whether the buffers are in use nobody knows."""


class Flight:
    """An operation that was launched, and its buffers until it really ended (clause K1).

    Args:
        handle: the library's.
        buffers: tensors that the operation reads or writes.
        device: where it runs.
    """

    def __init__(self, handle: Handle, buffers: Sequence[Tensor], device: Device) -> None:
        self._handle: Handle | None = handle
        self._buffers = tuple(buffers)
        self._device = device
        self._held: list[Stream] = []
        self.error = ""

    def look(self) -> Fate:
        """Ask the device; never blocks."""
        handle = self._handle
        if handle is None:
            return Fate.LANDED
        if self.error:
            return Fate.BROKEN
        self._device.settle()
        try:
            if not handle.ended():
                return Fate.UNDER_WAY
            self.error = handle.fault()
        except RuntimeError as error:
            self.error = first_line(error)
        if self.error:
            return Fate.BROKEN
        self._land()
        return Fate.LANDED

    def hold(self, stream: Stream) -> None:
        """Make `stream` wait for the end, without the host."""
        handle = self._handle
        if handle is not None:
            self.held_by(stream)
            stream.launch(handle.hold)

    def held_by(self, stream: Stream) -> None:
        """That stream waits for the end, in whatever way."""
        self._held.append(stream)

    def fail(self, failure: CommunicatorFailed) -> None:
        """It has failed, or its group is about to be aborted: fail the streams that wait, for what
        they wait for will not be there (clauses E7, E10)."""
        held, self._held = self._held, []
        for stream in held:
            own_stream(stream).fail(failure)  # no launch: one that stands in the driver may be why

    def past(self) -> bool:
        """Whether the device has come behind an operation whose group was aborted."""
        handle = self._handle
        if handle is not None:
            self._device.settle()
            try:
                if not handle.ended():
                    return False
            except RuntimeError:  # an error of the device: it will say nothing else any more
                return False
            self._land()
        return True

    def _land(self) -> None:
        self._handle, self._buffers, self._held = None, (), []
