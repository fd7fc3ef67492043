"""A communicator of the library with its stream and the operations in flight on it."""

from collections.abc import Callable, Sequence

from torch import Tensor

from equipoise.backends.devices.collectives.ccl import (
    Ccl,
    CclComm,
    CclHandle,
    CommSpec,
    WarmupOps,
)
from equipoise.backends.devices.collectives.comm_memory import COMM_MEMORY
from equipoise.backends.devices.collectives.work import InflightOp, OpStatus
from equipoise.backends.devices.runtime import Device
from equipoise.hal.errors import CommunicatorFailed

Launch = Callable[[CclComm], CclHandle]
"""Calls one operation of a group."""


class CommStream:
    """A communicator, the stream that it runs on, and its operations in flight.

    It was warmed up, so no call blocks from here on. Operations end in the order of their launch,
    since all of them run on one stream. Not thread-safe: callers hold a lock.

    Args:
        spec: what the group is made of.
        library: whose.
        group: the group.
        device: where it runs.
        warmup: its first operations, which are under way.
    """

    def __init__(
        self,
        spec: CommSpec,
        library: Ccl,
        group: CclComm,
        device: Device,
        warmup: WarmupOps,
    ) -> None:
        self.spec = spec
        self.scratch = warmup.scratch
        self.stream = group.stream
        self.aborted = False
        self.can_abort = library.capabilities.abort
        self._group = group
        self._device = device
        self._closing = False
        self._launch_failed = False
        self.warmup = InflightOp(warmup.last, warmup.buffers, device)
        self._inflight = [self.warmup]
        COMM_MEMORY.add(spec.name, library.estimate_bytes(spec.is_link))

    def launch(self, launch: Launch, buffers: Sequence[Tensor]) -> InflightOp:
        """Launch an operation after the current stream. Raises RuntimeError as the vendor does.

        A launch that raised may have been launched in part, or may still be: then the communicator
        never counts as idle until it is aborted, if the library can abort.
        """
        self.collect_completed()
        assert not self._closing, "a closed communicator was used"
        try:
            handle = launch(self._group)
        except BaseException:
            self._launch_failed = self.can_abort
            raise
        inflight = InflightOp(handle, buffers, self._device)
        self._inflight.append(inflight)
        return inflight

    def collect_completed(self) -> bool:
        """Release the buffers of completed operations. Returns whether nothing is in flight."""
        if self.aborted:
            self._inflight = [inflight for inflight in self._inflight if not inflight.is_drained()]
        else:
            self._inflight = [f for f in self._inflight if f.poll() is not OpStatus.DONE]
            if self._launch_failed:
                return False
        return not self._inflight

    def abort(self, failure: CommunicatorFailed) -> None:
        """Abort what is in flight, if the library can, without asking the other members."""
        if self._closing or not self.can_abort:
            return
        self._closing = self.aborted = True
        # First the streams that wait for it: an abort lets them continue, and they must not
        # continue as if their input were there.
        for inflight in self._inflight:
            inflight.fail(failure)
        self._group.abort()

    def close(self) -> None:
        """Release the communicator. Nothing may be in flight on any member."""
        if not self._closing:
            self._closing = True
            self._group.close()

    def is_released(self) -> bool:
        """Whether everything has been released."""
        if not (self._closing and self.collect_completed() and self._group.closed):
            return False
        COMM_MEMORY.remove(self.spec.name)
        return True
