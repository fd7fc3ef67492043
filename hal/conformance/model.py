"""The oracle: what the contract allows, computed without any backend."""

from collections.abc import Iterable
from dataclasses import dataclass, field

Clock = dict[str, int]
"""How many points of each stream come before something."""


@dataclass
class Order:
    """Happens-before among launches, by vector clocks.

    A launch is a point of its stream. An event keeps the clock of its latest recording; a wait
    merges the clock it finds into the stream's (clauses O1, O2, O4).
    """

    streams: dict[str, Clock] = field(default_factory=dict)
    events: dict[int, Clock] = field(default_factory=dict)
    launches: list[tuple[str, Clock]] = field(default_factory=list)

    def launch(self, stream: str) -> int:
        """A launch on `stream`; its number."""
        clock = self.streams.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        self.launches.append((stream, dict(clock)))
        return len(self.launches) - 1

    def record(self, event: int, stream: str) -> None:
        """The event now stands for everything launched on `stream`."""
        self.events[event] = dict(self.streams.get(stream, {}))

    def recorded(self, event: int) -> bool:
        """Whether anything was recorded into the event."""
        return event in self.events

    def wait(self, stream: str, event: int) -> None:
        """Whatever is launched on `stream` from now on comes after the event's point."""
        self._merge(stream, self.events[event])

    def follow(self, stream: str, launch: int) -> None:
        """Whatever is launched on `stream` from now on comes after that launch."""
        self._merge(stream, self.launches[launch][1])

    def reached(self, stream: str, launch: int) -> bool:
        """Whether whatever is launched on `stream` from now on comes after that launch."""
        other, clock = self.launches[launch]
        return self.streams.get(stream, {}).get(other, 0) >= clock[other]

    def before(self, first: int, second: int) -> bool:
        """Whether launch `first` must have run before launch `second`."""
        stream, clock = self.launches[first]
        return first != second and self.launches[second][1].get(stream, 0) >= clock[stream]

    def pairs(self) -> Iterable[tuple[int, int]]:
        """All ordered pairs of launches."""
        count = len(self.launches)
        return ((a, b) for a in range(count) for b in range(count) if self.before(a, b))

    def same_stream(self, first: int, second: int) -> bool:
        """Whether both were launched on one stream."""
        return self.launches[first][0] == self.launches[second][0]

    def _merge(self, stream: str, found: Clock) -> None:
        clock = self.streams.setdefault(stream, {})
        for other, count in found.items():
            clock[other] = max(clock.get(other, 0), count)
