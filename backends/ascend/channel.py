"""One of HCCL's communicators, made and greeted: from here on no call of it blocks the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from equipoise.backends.ascend.flight import Fate, Flight
from equipoise.backends.ascend.group import Group, Membership, Native
from equipoise.backends.ascend.lanes import Lane, Lanes
from equipoise.backends.ascend.ledger import LEDGER

Launch = Callable[[Group], Native]
"""Calls one operation of a group."""


@dataclass(frozen=True)
class Berth:
    """Where a communicator of HCCL's runs.

    Attributes:
        device: the device.
        lanes: the account of its streams.
        lane: the stream that it has.
    """

    device: Any
    lanes: Lanes
    lane: Lane


class Channel:
    """A process group, the stream that it runs on, and what it has under way.

    Operations land in the order of their launch, since all of them run on one stream. Not for
    several threads: whoever issues holds a lock.

    Args:
        membership: what the group is made of.
        group: the group.
        store: what the group was introduced by; the group calls it as long as it lives.
        berth: where it runs.
        scratch: int8 [1] on the device, whose contents nobody wants.
    """

    def __init__(
        self, membership: Membership, group: Group, store: object, berth: Berth, scratch: Tensor
    ) -> None:
        self.membership = membership
        self.scratch = scratch
        self.lane = berth.lane
        self._group: Group | None = group
        self._store = store
        self._berth = berth
        self._flights: list[Flight] = []
        LEDGER.enter(membership.name, membership.buffer)

    def fly(self, launch: Launch, buffers: Sequence[Tensor]) -> Flight:
        """Launch an operation behind the current stream. Raises RuntimeError as torch_npu does."""
        self.reap()
        assert self._group is not None, "a closed channel is used by nobody"
        flight = Flight(launch(self._group), buffers, self._berth.device.index)
        self._flights.append(flight)
        return flight

    def reap(self) -> bool:
        """Give back what the device has let go of; whether nothing is left."""
        self._flights = [flight for flight in self._flights if flight.look() is not Fate.LANDED]
        return not self._flights

    def close(self) -> None:
        """Give the communicator back. Nothing may be under way on any member."""
        if self._group is None:
            return
        self._group = None
        self._berth.lanes.give(self._berth.lane)
        LEDGER.strike(self.membership.name)
