"""What the objects of one virtual rank share."""

from typing import TYPE_CHECKING

from equipoise.backends.virtual.scheduling import TaskQueue
from equipoise.hal.capabilities import Capabilities
from equipoise.hal.errors import StreamFailed
from equipoise.hal.stream import Role

if TYPE_CHECKING:
    from equipoise.backends.virtual.backend import VirtualParts
    from equipoise.backends.virtual.event import VirtualEvent
    from equipoise.backends.virtual.stream import VirtualStream
    from equipoise.backends.virtual.world import VirtualWorld


class VirtualDevice:
    """One rank's memory and queues.

    Attributes:
        world: the world it is in.
        rank: whose it is.
        parts: the classes that everything is made from.
        declared: what it declares.
        arena: its memory.
        reports: news on their way to its host.
        current: the current stream of each of the rank's hosts.
        running: the stream whose program runs at this moment.
        events: how many events are alive.
    """

    def __init__(
        self, world: "VirtualWorld", rank: int, parts: "VirtualParts", declared: Capabilities
    ) -> None:
        self.world = world
        self.rank = rank
        self.parts = parts
        self.declared = declared
        self.arena = parts.arena()
        self.reports = parts.reports(rank)
        self.current: dict[int, VirtualStream | None] = {}
        self.running: VirtualStream | None = None
        self.events = 0
        self._queues: list[TaskQueue] = []
        self._streams: dict[Role, VirtualStream] = {}
        world.steppers.append(self.reports)

    @property
    def name(self) -> str:
        """The backend and the rank."""
        return f"virtual:{self.rank}"

    @property
    def streams(self) -> "list[VirtualStream]":
        """Those that were asked for so far."""
        return list(self._streams.values())

    @property
    def tasks(self) -> int:
        """How many tasks have not ended."""
        return sum(map(len, self._queues))

    def stream(self, role: Role) -> "VirtualStream":
        """The stream of that role: always the same one (clause B4)."""
        if role not in self._streams:
            self._streams[role] = self.parts.stream(role, self, self._queue())
        return self._streams[role]

    def event(self) -> "VirtualEvent":
        """A fresh event."""
        return self.parts.event(self)

    def issuing(self) -> "VirtualStream | None":
        """The stream that is current for the host, or the program, that calls."""
        return self.running or self.current.get(self.world.host)

    def expire(self) -> bool:
        """The deadlines of what waits at the heads of the queues; whether anything changed."""
        return any([queue.expire() for queue in self._queues])

    def close(self) -> None:
        """Skip what has not run, and let go of the memory."""
        for stream in self.streams:
            stream.fail(StreamFailed(f"{self.name} is gone"))
        self.current.clear()
        self.arena.close()

    def _queue(self) -> TaskQueue:
        """A queue of the stream's own."""
        queue = TaskQueue(self.rank)
        self._queues.append(queue)
        self.world.steppers.append(queue)
        return queue


class AliasingDevice(VirtualDevice):
    """All roles share one native queue, as when a vendor's pool of streams is used up."""

    def _queue(self) -> TaskQueue:
        """The one queue."""
        return self._queues[0] if self._queues else super()._queue()
