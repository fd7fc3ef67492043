"""A network whose links block until both ends have come, and how to live with it."""

from itertools import combinations

from equipoise.backends.virtual.communicator import VirtualCommunicator
from equipoise.backends.virtual.operation import Pair
from equipoise.backends.virtual.outbox import Outbox


class Link:
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
            self.outbox.push(Link((low, high)))
