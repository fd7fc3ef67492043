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
        membership: what the group is made of.
        library: whose.
        group: the group.
        device: where it runs.
        greeting: its first operations, which are under way.
    """

    def __init__(
        self,
        membership: CommSpec,
        library: Ccl,
        group: CclComm,
        device: Device,
        greeting: WarmupOps,
    ) -> None:
        self.membership = membership
        self.scratch = greeting.scratch
        self.lane = group.lane
        self.aborted = False
        self.aborts = library.capabilities.abort
        self._group = group
        self._device = device
        self._ending = False
        self._broken = False
        self.greeting = InflightOp(greeting.last, greeting.buffers, device)
        self._flights = [self.greeting]
        COMM_MEMORY.enter(membership.name, library.takes(membership.link))

    def fly(self, launch: Launch, buffers: Sequence[Tensor]) -> InflightOp:
        """Launch an operation behind the current stream. Raises RuntimeError as the vendor does.

        What raised may have been launched in part, or may be yet: then the channel is never idle
        until it is aborted, where the library can.
        """
        self.reap()
        assert not self._ending, "a closed channel is used by nobody"
        try:
            handle = launch(self._group)
        except BaseException:
            self._broken = self.aborts
            raise
        flight = InflightOp(handle, buffers, self._device)
        self._flights.append(flight)
        return flight

    def reap(self) -> bool:
        """Give back what the device has let go of; whether nothing is left."""
        if self.aborted:
            self._flights = [flight for flight in self._flights if not flight.past()]
        else:
            self._flights = [f for f in self._flights if f.look() is not OpStatus.LANDED]
            if self._broken:
                return False
        return not self._flights

    def abort(self, failure: CommunicatorFailed) -> None:
        """End what is under way, where the library can: streams that wait for it fail first.

        Nothing is launched any more. The other members are not asked.
        """
        if self._ending or not self.aborts:
            return
        self._ending = self.aborted = True
        for flight in self._flights:
            flight.fail(failure)
        self._group.abort()

    def close(self) -> None:
        """Give the group back. Nothing may be under way on any member."""
        if not self._ending:
            self._ending = True
            self._group.close()

    def gone(self) -> bool:
        """Whether everything was given back, in the end."""
        if not (self._ending and self.reap() and self._group.closed):
            return False
        COMM_MEMORY.strike(self.membership.name)
        return True
