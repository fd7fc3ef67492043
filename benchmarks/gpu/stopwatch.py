"""How long a stream of a device takes: marks on it, rounds in turn, and graphs of many launches.

On a device a mark is one of its own timed events, so that the host's launching is not measured: the
stream is held back until everything is queued. On the processor, for a trial, it is the clock.
"""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol

import torch
from lib.results import spread

from equipoise.hal import registry
from equipoise.hal.accelerator import Accelerator, Backend
from equipoise.hal.capabilities import Unavailable
from equipoise.hal.errors import BackendUnavailable
from equipoise.hal.stream import Role, Stream

DEADLINE = 60.0
CYCLES = 2.0e9
"""Of a device's clock in a second, and a little more: a hold-back lasts as long as asked or longer.
"""
LEAST_HOLD = 5e-4
"""Seconds that a stream is held back for the launch of a graph."""
SLACK = 1.5
"""Times what the host took to queue something that the stream is held back for it."""
MICRO, MILLI, GIGA = 1e6, 1e3, 1e9


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
        mark = self.mark()
        self.stream.launch(mark.take)
        return mark

    def span(self, issue: Callable[[], object], hold: float = LEAST_HOLD) -> float:
        """Seconds that the stream takes for what `issue` launches, once all of it is queued."""
        if self.on_device:
            self.stream.launch(lambda: torch.cuda._sleep(int(hold * CYCLES)))
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
        return lambda: clock.span(row, max(LEAST_HOLD, SLACK * queued)) / times
    graph.capture(clock.stream, row)
    clock.span(lambda: graph.replay(clock.stream))

    def replayed(owner: object = row) -> float:
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
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            times[name].append(contestants[name]())
    return times


def paired(ours: Iterable[float], theirs: Iterable[float]) -> list[float]:
    """The ratio of each round."""
    return spread(own / other for own, other in zip(ours, theirs, strict=True))


def scaled(values: Iterable[float], factor: float) -> list[float]:
    """The spread of so many times the values, to four digits behind the point."""
    return spread(round(value * factor, 4) for value in values)


NOT_HERE = "-"
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
TOOL_TIMEOUT = 20.0
"""Seconds that a tool may take to say what the driver is."""


@dataclass(frozen=True)
class Place:
    """An opened device, and the backend that it is of."""

    backend: Backend
    accelerator: Accelerator

    @property
    def on_device(self) -> bool:
        """Whether it is the kind of device that is measured."""
        return self.accelerator.device.type == "cuda"

    def clock(self, role: Role) -> Clock:
        """Of one of its streams."""
        return Clock(self.accelerator, self.accelerator.stream(role))

    def graph(self) -> Any:
        """An empty graph; None where there are none."""
        return self.accelerator.graph() if self.backend.capabilities.graph_capture else None

    def settle(self) -> None:
        """Everything that was launched has run, also on the stream that torch takes by itself."""
        self.accelerator.synchronize(DEADLINE)
        if self.on_device:
            torch.cuda.synchronize(self.accelerator.device)


def why_unavailable(name: str) -> str | None:
    """Why there is no device of that backend here; None where there is one."""
    try:
        backend = registry.accelerator(name)
    except BackendUnavailable as error:
        return str(error)
    probe = backend.probe()
    if isinstance(probe, Unavailable):
        return probe.reason
    return None if backend.devices() > 0 else f"backend {name!r} has no device"


@contextmanager
def open_device(name: str) -> Iterator[Place]:
    """Its first device."""
    backend = registry.accelerator(name)
    accelerator = backend.open(0)
    try:
        yield Place(backend, accelerator)
    finally:
        accelerator.close()


def facts(place: Place) -> dict[str, str]:
    """Device, driver and versions, in words; `-` for what there is not."""
    device = place.accelerator.device
    details = {
        "backend": place.backend.name,
        "device": place.accelerator.name,
        "driver": NOT_HERE,
        "runtime": torch.version.cuda or NOT_HERE,
        "torch": torch.__version__,
        "triton": _version("triton"),
    }
    if place.on_device:
        about = torch.cuda.get_device_properties(device)
        details["device"] = (
            f"{about.name}, {about.total_memory / 2**30:.0f} GiB, "
            f"{about.multi_processor_count} multiprocessors"
        )
        details["driver"] = _driver()
    return details


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NOT_HERE


def _driver() -> str:
    """The driver's version, as its own tool says it."""
    if shutil.which(DRIVER[0]) is None:
        return NOT_HERE
    try:
        result = subprocess.run(
            DRIVER, capture_output=True, text=True, timeout=TOOL_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return NOT_HERE
    return result.stdout.strip().splitlines()[0] if result.stdout.strip() else NOT_HERE
