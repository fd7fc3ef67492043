"""What the device has under way for one operation."""

from collections.abc import Sequence
from enum import Enum, auto

from torch import Tensor

from equipoise.backends.ascend import native as vendor
from equipoise.backends.ascend.group import Native


class Fate(Enum):
    """What became of an operation on the device."""

    UNDER_WAY = auto()
    LANDED = auto()
    """The device has let go of the buffers."""
    BROKEN = auto()
    """An error of the device or of HCCL: whether it still uses the buffers nobody knows."""


class Flight:
    """An operation that was launched, and its buffers until it really ended (clause K1).

    Args:
        native: torch_npu's handle.
        buffers: tensors that the operation reads or writes.
        index: of the device.
    """

    def __init__(self, native: Native, buffers: Sequence[Tensor], index: int) -> None:
        self._native: Native | None = native
        self._buffers = tuple(buffers)
        self._index = index
        self.error = ""

    def look(self) -> Fate:
        """Ask the device; never blocks."""
        native = self._native
        if native is None:
            return Fate.LANDED
        if self.error:
            return Fate.BROKEN
        vendor.settle_thread(self._index)
        try:
            if not native.is_completed():
                return Fate.UNDER_WAY
            sound = native.is_success()
        except RuntimeError as error:
            self.error = _line(error)
            return Fate.BROKEN
        if not sound:
            self.error = "HCCL reports an error of its communicator"
            return Fate.BROKEN
        self._native, self._buffers = None, ()
        return Fate.LANDED

    def hold(self) -> None:
        """Make the current stream wait for the end, without the host."""
        native = self._native
        if native is not None:
            native.wait()


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
