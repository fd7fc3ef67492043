"""The network between virtual ranks: matches their operations, and handles lost ranks."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from equipoise.backends.virtual.arena import Bytes
from equipoise.backends.virtual.operation import NetworkHandle, Pair, VirtualOperation
from equipoise.backends.virtual.transfer import Contribution, InTransit, MessageEnd, same_collective
from equipoise.hal.errors import CommunicatorFailed

if TYPE_CHECKING:
    from equipoise.backends.virtual.operation import Outbox
    from equipoise.backends.virtual.world import VirtualWorld

Key = tuple[str, int, int, tuple[int, ...]]
"""Purpose, how often it was opened before and rebuilt, members."""


class UnmatchedMessages:
    """Sends and receives of one (source, destination) that have not met, in order (clause P2)."""

    __slots__ = ("receives", "sends")

    def __init__(self) -> None:
        self.sends: deque[MessageEnd] = deque()
        self.receives: deque[MessageEnd] = deque()


class VirtualGroup:
    """One communicator between two rebuilds, over all its ranks.

    Args:
        network: what it is a part of.
        members: numbers in the world, by rank of the group.
    """

    def __init__(self, network: "Network", members: tuple[int, ...]) -> None:
        self.members = members
        self.outboxes: dict[int, Outbox] = {}
        self.links: set[Pair] = set()
        self._network = network
        self._meetings: dict[Pair, UnmatchedMessages] = {}
        self._rounds: dict[int, dict[int, Contribution]] = {}

    def send(self, native: NetworkHandle, buffer: Bytes, pair: Pair) -> None:
        """Offer a message from `pair[0]` to `pair[1]`."""
        self._meeting(pair).sends.append(MessageEnd(native, buffer))
        self._match(pair)

    def receive(self, native: NetworkHandle, buffer: Bytes, pair: Pair) -> None:
        """Take the next message from `pair[0]` to `pair[1]`."""
        self._meeting(pair).receives.append(MessageEnd(native, buffer))
        self._match(pair)

    def batch(self, operation: VirtualOperation, count: int) -> Sequence[NetworkHandle]:
        """Handles for so many messages of one operation: one each."""
        return [NetworkHandle(operation) for _ in range(count)]

    def join(self, index: int, rank: int, share: Contribution) -> None:
        """Rank `rank` has come to the group's collective of that number.

        What the ranks did not issue alike never starts, as on a real network.
        """
        shares = self._rounds.setdefault(index, {})
        shares[rank] = share
        if len(shares) < len(self.members):
            return
        del self._rounds[index]
        by_rank = [shares[rank] for rank in range(len(self.members))]
        if same_collective(by_rank):
            self._network.begin_collective(self.members, by_rank)

    def withdraw(self, operation: VirtualOperation) -> None:
        """Nothing that has not met will meet it."""
        for meeting in self._meetings.values():
            meeting.sends = _without(meeting.sends, operation)
            meeting.receives = _without(meeting.receives, operation)
        for shares in self._rounds.values():
            for rank in [r for r, s in shares.items() if s.native.operation is operation]:
                del shares[rank]

    def _meeting(self, pair: Pair) -> UnmatchedMessages:
        return self._meetings.setdefault(pair, UnmatchedMessages())

    def _match(self, pair: Pair) -> None:
        """First in, first out."""
        meeting = self._meetings[pair]
        while meeting.sends and meeting.receives:
            send, receive = meeting.sends.popleft(), meeting.receives.popleft()
            ranks = (self.members[pair[0]], self.members[pair[1]])
            self._network.begin_transfer(ranks, send, receive)


class CoalescingGroup(VirtualGroup):
    """A batch of messages has one handle for all of them, whatever their number."""

    def batch(self, operation: VirtualOperation, count: int) -> Sequence[NetworkHandle]:
        """A list of one element."""
        return [NetworkHandle(operation, count)] if count else []


class Network:
    """All groups, and everything in flight.

    Attributes:
        moving: what has met and moves.
        pending: what is not over, in the order of issue.
        dead: ranks that were killed.
    """

    def __init__(self, world: "VirtualWorld") -> None:
        self.world = world
        self.moving: list[InTransit] = []
        self.pending: dict[VirtualOperation, None] = {}
        self.dead: set[int] = set()
        self.ranks: tuple[int, ...] = ()
        self._groups: dict[Key, tuple[VirtualGroup, set[int]]] = {}
        world.steppers.append(self)

    def join_group(self, key: Key, rank: int) -> VirtualGroup:
        """The group of that key; forgotten here once every member has come."""
        parts = self.world.parts
        group, missing = self._groups.setdefault(key, (parts.group(self, key[3]), set(key[3])))
        missing.discard(rank)
        if not missing:
            del self._groups[key]
        return group

    def begin_transfer(self, ranks: tuple[int, ...], send: MessageEnd, receive: MessageEnd) -> None:
        """A send has met its receive."""
        self.moving.append(self.world.parts.transfer(self, ranks, send, receive))

    def begin_collective(self, ranks: tuple[int, ...], shares: Sequence[Contribution]) -> None:
        """Every rank has come."""
        self.moving.append(self.world.parts.collective(self, ranks, shares))

    def forget(self, moving: InTransit) -> None:
        """It has moved to its end."""
        self.moving.remove(moving)

    def ready(self) -> bool:
        """Whether somebody has yet to learn that a peer is gone."""
        return bool(self.dead) and self._first_orphan() is not None

    def step(self) -> None:
        """One operation learns it."""
        operation = self._first_orphan()
        if operation is not None:
            self.cut(operation, CommunicatorFailed, f"{operation.what} lost its peer")

    def cut(self, operation: VirtualOperation, kind: type[CommunicatorFailed], text: str) -> None:
        """End an operation here and now; what it had met by then ends with it."""
        operation.outbox.withdraw(operation)
        operation.drop(kind, text)
        for moving in [m for m in self.moving if operation in m.operations]:
            moving.cut()
            for partner in moving.operations:
                if not partner.over:
                    self.cut(partner, CommunicatorFailed, f"{partner.what} lost its peer")

    def expire(self) -> bool:
        """Deadlines strike; whether any did."""
        return any([operation.strike() for operation in self.due()])

    def due(self) -> list[VirtualOperation]:
        """What has waited for its deadline: all that has not ended, on ranks that run."""
        stopped = self.world.stopped
        pending = (op for op in self.pending if not op.ended)
        return [op for op in pending if op.communicator.member not in stopped]

    def kill(self, rank: int) -> None:
        """The rank is gone, with everything that it had in flight."""
        self.dead.add(rank)
        self.world.steppers = [
            stepper for stepper in self.world.steppers if rank not in stepper.ranks
        ]
        for moving in [m for m in self.moving if rank in m.ranks]:
            moving.cut()
        for operation in [op for op in self.pending if op.communicator.member == rank]:
            operation.outbox.withdraw(operation)
            operation.finish()

    def close(self) -> None:
        """Let go of everything."""
        for operation in list(self.pending):
            operation.finish()
        for moving in list(self.moving):
            moving.cut()
        self._groups.clear()

    def _first_orphan(self) -> VirtualOperation | None:
        """The first operation that a dead rank leaves alone."""
        return next((op for op in self.pending if not self.dead.isdisjoint(op.peers)), None)


def _without(messages: deque[MessageEnd], operation: VirtualOperation) -> deque[MessageEnd]:
    return deque(message for message in messages if message.native.operation is not operation)
