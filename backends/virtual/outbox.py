"""What a rank has issued on one communicator and the network has not taken up yet."""

from collections import deque
from typing import TYPE_CHECKING, Protocol

from equipoise.backends.virtual.operation import Operation, Pair

if TYPE_CHECKING:
    from equipoise.backends.virtual.endpoint import Endpoint
    from equipoise.backends.virtual.network import Group


class Item(Protocol):
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

    def __init__(self, communicator: "Endpoint", group: "Group") -> None:
        self.ranks: tuple[int, ...] = (communicator.member,)
        self._communicator = communicator
        self.group = group
        self._items: deque[Item] = deque()
        self._open = True

    def push(self, item: Item) -> None:
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

    def withdraw(self, operation: Operation) -> None:
        """Neither start it nor let anything meet it."""
        if operation in self._items:
            self._items.remove(operation)
            self._leave_when_empty()
        self.group.withdraw(operation)

    def _leave_when_empty(self) -> None:
        lanes = self._communicator.world.lanes
        if not self._open and not self._items and self in lanes:
            lanes.remove(self)
