"""One rank's end of a group: membership, issuing, failure, the end."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from equipoise.backends.virtual.event import Mark
from equipoise.backends.virtual.operation import Operation, Pair, Post
from equipoise.backends.virtual.outbox import Item
from equipoise.backends.virtual.work import DEADLINE, VirtualWork
from equipoise.hal.capabilities import CommunicatorCapabilities
from equipoise.hal.errors import CommunicatorFailed, Unsupported
from equipoise.hal.operands import check_rank

if TYPE_CHECKING:
    from equipoise.backends.virtual.fabric import VirtualFabric
    from equipoise.backends.virtual.network import Network
    from equipoise.backends.virtual.world import World


class Endpoint:
    """What every operation of one rank in one group goes through.

    Args:
        fabric: whose it is.
        purpose: what it is for.
        opening: how often this rank had opened that purpose before.
        ranks: numbers of the members in the world, in the order of their ranks here.
    """

    def __init__(
        self, fabric: "VirtualFabric", purpose: str, opening: int, ranks: Sequence[int]
    ) -> None:
        self._fabric = fabric
        self._purpose = purpose
        self._opening = opening
        self._failure: tuple[type[CommunicatorFailed], str] | None = None
        self.incarnation = 0
        self._join(tuple(ranks))

    @property
    def purpose(self) -> str:
        """What the communicator is for."""
        return self._purpose

    @property
    def rank(self) -> int:
        """This rank's number within the communicator."""
        return self._members.index(self.member)

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self._members)

    @property
    def member(self) -> int:
        """This rank's number in the world."""
        return self._fabric.rank

    @property
    def world(self) -> "World":
        """The world that it is in."""
        return self._fabric.world

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """What the backend declares."""
        return self._fabric.declared

    def abort(self) -> None:
        """End what is in flight with an error."""
        if not self.capabilities.abort:
            raise Unsupported(f"communicator {self._purpose!r} cannot end what is in flight")
        self.fail(CommunicatorFailed, f"{self._purpose!r} was aborted", self.incarnation)
        self._cut_all("was aborted")

    def rebuild(self, ranks: Sequence[int]) -> None:
        """A new group among `ranks` (numbers of the world, not of the communicator)."""
        if not self.capabilities.rebuild:
            raise Unsupported(f"communicator {self._purpose!r} cannot be built again")
        check_rank("rebuild", self.member, ranks)
        self.outbox.retire()
        self._failure = None
        self.incarnation += 1
        self._join(tuple(ranks))

    def close(self) -> None:
        """Let what can still end do so; cut the rest; every later call is refused (clause E5)."""
        self.world.until(lambda: not self._pending(), DEADLINE)
        self._failure = (CommunicatorFailed, f"communicator {self._purpose!r} was closed")
        self._cut_all("was closed in flight")
        self.outbox.clear()

    def fail(self, kind: type[CommunicatorFailed], text: str, incarnation: int) -> None:
        """An operation failed; what is heard of an earlier incarnation says nothing of this."""
        if incarnation == self.incarnation and self._failure is None:
            self._failure = (kind, text)

    def forget(self, operation: Operation) -> None:
        """An operation is over: nobody here keeps it any more."""
        self._network.pending.pop(operation, None)

    def may_start(self, item: Item) -> bool:
        """Whether the first item of the outbox may start."""
        return item.may_start()

    @property
    def _network(self) -> "Network":
        return self.world.network

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _join(self, members: tuple[int, ...]) -> None:
        """Become one of a group that has issued nothing."""
        self._members = members
        self._rounds = 0
        key = (self._purpose, self._opening, self.incarnation, members)
        self._group = self._network.meet(key, self.member)
        self.outbox = self.world.parts.outbox(self, self._group)
        self._group.outboxes[self.rank] = self.outbox
        self.world.lanes.append(self.outbox)

    def _build(self, link: Pair) -> None:
        """Links need no building on this network."""

    def _pending(self) -> list[Operation]:
        return [op for op in self._network.pending if op.communicator is self]

    def _cut_all(self, how: str) -> None:
        for operation in self._pending():
            if not operation.over:
                self._network.cut(operation, CommunicatorFailed, f"{operation.what} {how}")

    def _next_round(self) -> int:
        """The number of the next collective: all ranks issue them in one order."""
        self._rounds += 1
        return self._rounds

    def _issue(
        self,
        what: str,
        after: Mark | None,
        post: Post,
        tensors: Sequence[Tensor],
        peers: frozenset[int],
        links: tuple[Pair, ...],
    ) -> VirtualWork:
        """Put an operation that was admitted into the outbox; the network does the rest."""
        parts = self.world.parts
        operation = parts.operation(self, what, tensors, peers, after, post, links)
        self._network.pending[operation] = None
        self.outbox.push(operation)
        self.world.submitted()
        return parts.work(operation)

    def _admit(self, what: str) -> Mark | None:
        """Refuse an operation before any side effect; the point behind which it starts."""
        self._check_usable(what)
        return self._after()

    def _check_usable(self, what: str) -> None:
        """Raise `CommunicatorFailed` after a failure (clause E2)."""
        if self._failure is not None:
            raise CommunicatorFailed(f"{what} of {self._purpose!r}: {self._failure[1]}")

    def _after(self) -> Mark | None:
        """The point of the current stream behind which an operation starts (clause X6)."""
        device = self.world.device(self.member)
        stream = device.issuing()
        if stream is None or not self.capabilities.stream_ordered:
            return None
        if stream.capturing:
            raise Unsupported("an operation of the virtual network cannot be captured")
        event = device.event()
        stream.record(event)
        return event.latest()
