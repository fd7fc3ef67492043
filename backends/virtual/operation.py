"""Operations in flight on the virtual network, and those issued but not started yet."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from equipoise.backends.virtual.event import VirtualRecording
from equipoise.hal.errors import CommunicatorFailed, OperationTimeout

if TYPE_CHECKING:
    from equipoise.backends.virtual.communicator import CommunicatorEndpoint

Pair = tuple[int, int]
"""Two ranks of a group."""


class NetworkHandle:
    """The network's own handle; ends when everything that it stands for has happened."""

    __slots__ = ("left", "operation")

    def __init__(self, operation: "VirtualOperation", left: int = 1) -> None:
        self.operation = operation
        self.left = left

    def end(self) -> None:
        """One thing has happened."""
        self.left -= 1
        self.operation.progress()


Post = Callable[["VirtualOperation"], Sequence[NetworkHandle]]
"""Brings an operation onto the network; returns the handles to wait for."""


class VirtualOperation:
    """One operation of one rank: what its host sees of it, and what the network does with it.

    The two part when the operation's deadline passes, or when it is cancelled: for the host it has
    *ended*, with an error; on the network it goes on, and keeps its tensors, until it is *over*
    (clauses K1, E3, E4).

    Args:
        communicator: whose it is.
        what: in words, for errors.
        tensors: what it reads or writes.
        peers: numbers, in the world, of the ranks without which it cannot end.
        after: the recording after which it starts, if any (clause X6).
        post: brings it onto the network.
        links: pairs of ranks whose link it needs.
    """

    __slots__ = (
        "_failure",
        "_natives",
        "after",
        "communicator",
        "ended",
        "links",
        "outbox",
        "over",
        "peers",
        "post",
        "rebuilds",
        "tensors",
        "what",
    )

    def __init__(
        self,
        communicator: "CommunicatorEndpoint",
        what: str,
        tensors: Sequence[Tensor],
        peers: frozenset[int],
        after: VirtualRecording | None,
        post: Post,
        links: tuple[Pair, ...] = (),
    ) -> None:
        self.communicator = communicator
        self.rebuilds = communicator.rebuilds
        self.outbox = communicator.outbox
        self.what = f"{what} of {communicator.purpose!r}"
        self.tensors = tuple(tensors)
        self.peers = peers
        self.after = after
        self.post = post
        self.links = links
        self.ended = False
        self.over = False
        self._failure: tuple[type[CommunicatorFailed], str] | None = None
        self._natives: Sequence[NetworkHandle] | None = None

    def may_start(self) -> bool:
        """Whether what it must come after has happened."""
        return self.after is None or self.after.ended

    def start(self) -> None:
        """Bring it onto the network."""
        if self.after is not None and self.after.failure is not None:
            self.drop(CommunicatorFailed, f"{self.what}: its stream failed: {self.after.failure}")
            return
        self._natives = self.post(self)
        self.progress()

    def progress(self) -> None:
        """Something has happened on the network: it may be over."""
        if self._natives is None or self.over:
            return
        if all(native.left == 0 for native in self._natives):
            self.finish()

    def finish(self) -> None:
        """It really ended: let go of the tensors, and of whatever else holds their bytes."""
        self.over = self.ended = True
        self.tensors = ()
        self.post = _post_nothing
        self._natives = ()
        self.communicator.forget(self)

    def strike(self) -> bool:
        """Its deadline passes. False if it had ended before."""
        return self.fail(OperationTimeout, f"{self.what} passed its deadline")

    def fail(self, kind: type[CommunicatorFailed], text: str) -> bool:
        """End it for the host; the network goes on. False if it had ended before."""
        if self.ended:
            return False
        self._failure = (kind, text)
        self.ended = True
        self.communicator.fail(kind, text, self.rebuilds)
        return True

    def drop(self, kind: type[CommunicatorFailed], text: str) -> None:
        """End it for the host and on the network."""
        self.fail(kind, text)
        if not self.over:
            self.finish()

    def check(self) -> None:
        """Raise its failure, afresh each time: a kept exception would keep its frames alive."""
        if self._failure is not None:
            kind, text = self._failure
            raise kind(text)


def _post_nothing(_: VirtualOperation) -> Sequence[NetworkHandle]:
    """Stands where the real one stood."""
    return ()


if TYPE_CHECKING:
    from equipoise.backends.virtual.communicator import CommunicatorEndpoint
    from equipoise.backends.virtual.network import VirtualGroup


class OutboxItem(Protocol):
    """An operation, or a link to be built.

    Attributes:
        links: pairs of ranks whose link it needs.
    """

    links: tuple[Pair, ...]

    def may_start(self) -> bool:
        """Whether what it must come after has happened."""
        ...

    def start(self) -> None:
        """Bring it onto the network."""
        ...


class Outbox:
    """First in, first out; one micro-step brings one operation onto the network (clause P6)."""

    def __init__(self, communicator: "CommunicatorEndpoint", group: "VirtualGroup") -> None:
        self.ranks: tuple[int, ...] = (communicator.member,)
        self._communicator = communicator
        self.group = group
        self._items: deque[OutboxItem] = deque()
        self._open = True

    def push(self, item: OutboxItem) -> None:
        """Behind everything that was issued before."""
        self._items.append(item)

    def ready(self) -> bool:
        """Whether the first one may start."""
        return bool(self._items) and self._communicator.may_start(self._items[0])

    def step(self) -> None:
        """The first one starts."""
        self._items.popleft().start()
        self._leave_when_empty()

    def retire(self) -> None:
        """Nothing more will be issued here."""
        self._open = False
        self._leave_when_empty()

    def clear(self) -> None:
        """Forget what has not started."""
        self._items.clear()
        self.retire()

    def withdraw(self, operation: VirtualOperation) -> None:
        """Neither start it nor let anything meet it."""
        if operation in self._items:
            self._items.remove(operation)
            self._leave_when_empty()
        self.group.withdraw(operation)

    def _leave_when_empty(self) -> None:
        steppers = self._communicator.world.steppers
        if not self._open and not self._items and self in steppers:
            steppers.remove(self)
