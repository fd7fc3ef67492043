"""How long a stream takes: marks on it, rounds in turn, and graphs of many launches.

On a device a mark is one of its own timed events, so that the host's launching is not measured: the
stream is held back until everything is queued. On the processor, for a trial, it is the clock.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.stream import Stream

DEADLINE = 60.0
CYCLES = 2.0e9
"""Of a device's clock in a second, and a little more: a hold-back lasts as long as asked or longer.
"""
HELD = 5e-4
"""Seconds that a stream is held back for the launch of a graph."""
SLACK = 1.5
"""Times what the host took to queue something that the stream is held back for it."""
MICRO, MILLI, GIGA = 1e6, 1e3, 1e9
Spread = dict[str, float]


class Mark(Protocol):
    """A point in a stream."""

    def take(self) -> None:
        """The program that is the point."""
        ...

    def wait(self) -> None:
        """Block the host until the stream has come here."""
        ...

    def since(self, earlier: Any) -> float:
        """Seconds from another mark, which has been reached as this one has."""
        ...


class HostMark:
    """When the thread that is the stream came here."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._at = 0.0

    def take(self) -> None:
        """Look at the clock."""
        self._at = time.perf_counter()
        self._reached.set()

    def wait(self) -> None:
        """Raises `TimeoutError`."""
        if not self._reached.wait(DEADLINE):
            raise TimeoutError(f"a mark was not reached within {DEADLINE:g} s")

    def since(self, earlier: "HostMark") -> float:
        """Seconds."""
        return self._at - earlier._at


class DeviceMark:
    """A timed event of the device."""

    def __init__(self) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=True)

    def take(self) -> None:
        """Record it on the current stream."""
        self._event.record()

    def wait(self) -> None:
        """The driver's own wait: ours looks every so often, which would be seen."""
        self._event.synchronize()

    def since(self, earlier: "DeviceMark") -> float:
        """Seconds."""
        return float(earlier._event.elapsed_time(self._event)) / MILLI


@dataclass(frozen=True)
class Clock:
    """Times what is issued to a stream of an accelerator."""

    accelerator: Accelerator
    stream: Stream

    @property
    def on_device(self) -> bool:
        """Whether the stream is of a device that has timed events."""
        return self.accelerator.device.type == "cuda"

    def mark(self) -> Mark:
        """A fresh one."""
        return DeviceMark() if self.on_device else HostMark()

    def point(self) -> Mark:
        """One behind everything launched so far."""
        found = self.mark()
        self.stream.launch(found.take)
        return found

    def span(self, issue: Callable[[], object], held: float = HELD) -> float:
        """Seconds that the stream takes for what `issue` launches, once all of it is queued."""
        if self.on_device:
            self.stream.launch(lambda: torch.cuda._sleep(int(held * CYCLES)))
        begin = self.point()
        issue()
        end = self.point()
        end.wait()
        return end.since(begin)


def repeated(
    clock: Clock, call: Callable[[], object], times: int, graph: Any
) -> Callable[[], float]:
    """Times one of so many launches in a row: captured in `graph`, or, where it is None, not.

    The first launch, before the capture, makes what has to be made once.
    """

    def row() -> None:
        for _ in range(times):
            call()

    call()
    clock.stream.synchronize(DEADLINE)
    if graph is None:
        queued = cost(clock, row)
        return lambda: clock.span(row, max(HELD, SLACK * queued)) / times
    graph.capture(clock.stream, row)
    clock.span(lambda: graph.replay(clock.stream))

    def replayed(kept: object = row) -> float:
        """`row` names the memory that the graph points to."""
        return clock.span(lambda: graph.replay(clock.stream)) / times

    return replayed


def cost(clock: Clock, issue: Callable[[], object]) -> float:
    """Seconds of the host's thread to issue something; the stream is empty before and behind."""
    clock.stream.synchronize(DEADLINE)
    began = time.perf_counter()
    issue()
    took = time.perf_counter() - began
    clock.stream.synchronize(DEADLINE)
    return took


def in_turns(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each found in each round; each round begins with another one."""
    names = list(contestants)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            found[name].append(contestants[name]())
    return found


def spread(values: Iterable[float]) -> Spread:
    """Median, least and most."""
    found = list(values)
    return {"median": statistics.median(found), "lowest": min(found), "highest": max(found)}


def paired(ours: Iterable[float], theirs: Iterable[float]) -> Spread:
    """The ratio of each round."""
    return spread(own / other for own, other in zip(ours, theirs, strict=True))


def scaled(values: Iterable[float], factor: float) -> Spread:
    """The spread of so many times the values, to four digits behind the point."""
    return spread(round(value * factor, 4) for value in values)
