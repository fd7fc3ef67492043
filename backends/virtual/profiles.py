"""Variants of the virtual backend that behave like a vendor's in one respect and still keep the
contract.

One has links that block until both ends have come, another lets only one communicator of a rank
move at a time. Each is a backend of its own, `equipoise.backends.virtual.profiles:NAME`.
"""

from dataclasses import replace
from itertools import combinations

import torch

from equipoise.backends.virtual.arena import PaddedArena
from equipoise.backends.virtual.backend import (
    ALL_CAPABILITIES,
    ALL_COMMUNICATOR_CAPABILITIES,
    HEALTHY,
    VirtualBackend,
)
from equipoise.backends.virtual.communicator import VirtualCommunicator
from equipoise.backends.virtual.device import AliasingDevice
from equipoise.backends.virtual.event import LaggingRecording, OneShotRecording
from equipoise.backends.virtual.network import CoalescingGroup, Network
from equipoise.backends.virtual.operation import Outbox, OutboxItem, Pair, VirtualOperation


class LinkSetup:
    """A link to be built, in its turn."""

    __slots__ = ("links",)

    def __init__(self, link: Pair) -> None:
        self.links: tuple[Pair, ...] = (link,)

    def may_start(self) -> bool:
        """It has no more to wait for than the link itself."""
        return True

    def start(self) -> None:
        """The link is there."""


class LinkingOutbox(Outbox):
    """Links of pairs are built at their first use, which blocks until both ends have come to it.

    Whoever sends first to a rank that does something else first waits there, and whatever it has
    issued behind waits too.
    """

    def missing(self) -> Pair | None:
        """The link that the first item waits for."""
        links = self._items[0].links if self._items else ()
        return next((link for link in links if link not in self.group.links), None)

    def ready(self) -> bool:
        """Whether the first one may start, or its link can be built."""
        link = self.missing()
        if link is None:
            return super().ready()
        if not self._communicator.world.stopped.isdisjoint(self.group.members[r] for r in link):
            return False
        ends = [self.group.outboxes.get(rank) for rank in link]
        return all(isinstance(end, LinkingOutbox) and end.missing() == link for end in ends)

    def step(self) -> None:
        """The link is built, or the first item starts."""
        link = self.missing()
        if link is None:
            super().step()
        else:
            self.group.links.add(link)


class LinkingCommunicator(VirtualCommunicator):
    """On a network whose links block until both sides come: builds all of them when it is made.

    Always in one order, so that no two ranks wait for each other; afterwards nothing that is
    issued waits for a link (clauses P1, X2).
    """

    def _join(self, members: tuple[int, ...]) -> None:
        super()._join(members)
        for link in self._all_links():
            self._build(link)

    def _all_links(self) -> list[Pair]:
        return list(combinations(range(self.size), 2))

    def _build(self, link: Pair) -> None:
        """In its turn, if this rank is an end of it."""
        low, high = min(link), max(link)
        if self.rank in (low, high) and low != high:
            self.outbox.push(LinkSetup((low, high)))


class SerialNetwork(Network):
    """An operation starts when all that its rank issued earlier elsewhere has ended.

    Its deadline counts from when nobody in its group is held up so: what is stuck on one
    communicator does not fail another's operations (clauses P3, X3). Where all groups hold each
    other up, all are struck.
    """

    def is_queued_after_other(self, item: OutboxItem) -> bool:
        """Whether another communicator of the same rank comes first."""
        if not isinstance(item, VirtualOperation):
            return False
        for operation in self.pending:
            if operation is item:
                return False
            same = operation.communicator.member == item.communicator.member
            if same and operation.communicator is not item.communicator and not operation.ended:
                return True
        return False

    def due(self) -> list[VirtualOperation]:
        """What is pending in groups of which no rank is held up."""
        pending = super().due()
        held_up = {op.outbox.group for op in pending if self.is_queued_after_other(op)}
        return [op for op in pending if op.outbox.group not in held_up] or pending


class SerialCommunicator(VirtualCommunicator):
    """Asks such a network when to start."""

    def may_start(self, item: OutboxItem) -> bool:
        """Whether no other communicator of this rank comes first."""
        network = self.world.network
        free = not (isinstance(network, SerialNetwork) and network.is_queued_after_other(item))
        return free and super().may_start(item)


LAGGING_QUERY = VirtualBackend(replace(HEALTHY, mark=LaggingRecording))
"""A query says false for some micro-steps after the point was reached."""

ALIASING_POOL = VirtualBackend(
    replace(HEALTHY, device=AliasingDevice),
    replace(ALL_CAPABILITIES, streams=1, stream_lock=False, copy_independent_of_launch=False),
)
"""All roles share one queue: nothing may wait on one role for what comes later on another."""

ONE_SIGNAL_ONE_WAITER = VirtualBackend(replace(HEALTHY, mark=OneShotRecording))
"""A native event feeds one wait and empties itself."""

BLOCKING_LINKS = VirtualBackend(
    replace(HEALTHY, outbox=LinkingOutbox, communicator=LinkingCommunicator)
)
"""The first operation between two ranks blocks until both have come to it."""

ONE_HANDLE_A_BATCH = VirtualBackend(replace(HEALTHY, group=CoalescingGroup))
"""However many messages a batch has, the list of its handles has one element."""

NO_ABORT = VirtualBackend(groups=replace(ALL_COMMUNICATOR_CAPABILITIES, abort=False))
"""Nothing ends an operation in flight but its deadline."""

PADDED_FORMATS = VirtualBackend(replace(HEALTHY, arena=PaddedArena))
"""Storage goes on behind the bytes that a tensor shows."""

NO_BYTE_SUMS = VirtualBackend(
    groups=replace(
        ALL_COMMUNICATOR_CAPABILITIES,
        reductions=ALL_COMMUNICATOR_CAPABILITIES.reductions - {torch.uint8},
    )
)
"""Bytes travel, but are not summed."""

SERIAL_GROUPS = VirtualBackend(
    replace(HEALTHY, network=SerialNetwork, communicator=SerialCommunicator),
    groups=replace(ALL_COMMUNICATOR_CAPABILITIES, independent_groups=False),
)
"""An operation waits for all that its rank issued earlier, on whatever communicator."""

PROFILES = {
    "lagging-query": LAGGING_QUERY,
    "aliasing-pool": ALIASING_POOL,
    "one-signal-one-waiter": ONE_SIGNAL_ONE_WAITER,
    "blocking-links": BLOCKING_LINKS,
    "one-handle-a-batch": ONE_HANDLE_A_BATCH,
    "no-abort": NO_ABORT,
    "padded-formats": PADDED_FORMATS,
    "no-byte-sums": NO_BYTE_SUMS,
    "serial-groups": SERIAL_GROUPS,
}
"""By name."""
