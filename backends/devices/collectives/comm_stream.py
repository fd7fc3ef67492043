"""One of the library's communicators, made and greeted: from here on no call of it blocks."""

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
    """A group, the stream that it runs on, and what it has under way.

    Operations land in the order of their launch, since all of them run on one stream. Not for
    several threads: whoever issues holds a lock.

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
        """Launch an operation behind the current stream. Raises RuntimeError as the vendor does.

        What raised may have been launched in part, or may be yet: then the channel is never idle
        until it is aborted, where the library can.
        """
        self.collect_completed()
        assert not self._closing, "a closed channel is used by nobody"
        try:
            handle = launch(self._group)
        except BaseException:
            self._launch_failed = self.can_abort
            raise
        inflight = InflightOp(handle, buffers, self._device)
        self._inflight.append(inflight)
        return inflight

    def collect_completed(self) -> bool:
        """Give back what the device has let go of; whether nothing is left."""
        if self.aborted:
            self._inflight = [inflight for inflight in self._inflight if not inflight.is_drained()]
        else:
            self._inflight = [f for f in self._inflight if f.poll() is not OpStatus.DONE]
            if self._launch_failed:
                return False
        return not self._inflight

    def abort(self, failure: CommunicatorFailed) -> None:
        """End what is under way, where the library can: streams that wait for it fail first.

        Nothing is launched any more. The other members are not asked.
        """
        if self._closing or not self.can_abort:
            return
        self._closing = self.aborted = True
        for inflight in self._inflight:
            inflight.fail(failure)
        self._group.abort()

    def close(self) -> None:
        """Give the group back. Nothing may be under way on any member."""
        if not self._closing:
            self._closing = True
            self._group.close()

    def is_released(self) -> bool:
        """Whether everything was given back, in the end."""
        if not (self._closing and self.collect_completed() and self._group.closed):
            return False
        COMM_MEMORY.remove(self.spec.name)
        return True
