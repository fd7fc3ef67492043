"""A device whose compute and copies are timed waits, outside the interpreter's lock.

Every stream has an emulated clock: the instant at which it is free. Work moves it on, then the
stream's thread really waits until that instant, an absolute one: lateness of the thread, which a
device does not have, does not add up. What the device would wait for moves the clock too: the
launch by the host, a lock's signal, the peers. So whatever the host does between two steps, and
whatever the stream waits for, is in the step's time; how late the system wakes a thread is in it
once a step, where the host waits for its end.

The constants of `engine_stall.py` stand here. Where they come from:

- A step takes 60 to 80 ms where stop-the-world was published, and an expert of such a model is
  44 MB in 8 bits. Eight layers are emulated; each stands for four, which compute one after the
  other and whose experts travel together: a step here takes 80 to 90 ms.
- A stop-the-world rebalance of it was published as 0.91 s, in which each of 32 ranks receives some
  22 GB: 24 GB/s a rank. So the link is that of a card of 200 Gbit/s; half and double beside it.
- A copy within the device reads and writes: half of 4.8 TB/s, less a fifth.
- Host memory comes over a link between chips (200 GB/s a device); it is swept along with the link.
"""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.checksum import checksum
from equipoise.hal.lock import StreamLock
from equipoise.hal.slots import SlotStore
from equipoise.hal.stream import Role, Stream

RANKS, LAYERS, EXPERTS, SLOTS = 4, 8, 64, 80
SEED = 0

WINDOW = 4
"""Steps of load that a plan is made from; one sub-window."""
INTERVAL = 36
"""Steps between two plans."""
REBALANCES = 3
"""Plans of a load stage: one that follows the switch of topic, then some made anew. So a topic
lasts 108 steps, about nine seconds."""
FOLLOWING, ANEW = 128, 256
"""Copies that a plan may move, of 640 slots: where the topic has switched, and where it has not."""
ROWS = (768, 1024, 1280)
"""Rows, one per (token, k), of a rank, step and layer, by load stage."""

GROUP = 4
"""Layers that an emulated one stands for."""
SLOT_BYTES = 44e6 * GROUP
"""Of an emulated slot. What really moves is two numbers: its layer and its expert."""
SLOTS_PER_MESSAGE = 16
"""Slots of a blob at most."""
UPDATES = 1
"""Layers that the locked path rewrites a step."""


@dataclass(frozen=True)
class Point:
    """What is swept.

    Attributes:
        name: for tables.
        stages: load stages that are run.
        row: seconds of compute a row.
        fixed: seconds of a layer beside that: attention, launches, both exchanges.
        latency: seconds of a transfer beside its bytes.
        link: bytes per second of a rank's link to its peers, each direction.
        host: bytes per second from the host's memory.
        hbm: bytes per second of copies within a device.
        skew: sigma of the logarithm of an expert's popularity.
    """

    name: str = "centre"
    stages: int = 2
    row: float = 1.5e-6 * GROUP
    fixed: float = 1.2e-3 * GROUP
    latency: float = 20e-6
    link: float = 25e9
    host: float = 200e9
    hbm: float = 2e12
    skew: float = 1.12

    def fields(self) -> dict[str, float | str]:
        """For JSON."""
        return asdict(self)

    def slower(self, times: float) -> "Point":
        """A device and links so many times slower: what the host does weighs less beside them."""
        return replace(
            self,
            row=self.row * times,
            fixed=self.fixed * times,
            link=self.link / times,
            host=self.host / times,
            hbm=self.hbm / times,
        )


CENTRE = Point()
SWEPT = 1
"""Load stages of the points around the centre."""


def points() -> tuple[Point, ...]:
    """The centre, then one constant at a time at half and at double, or less and more skewed."""
    around = {
        "half the wait per row": {"row": CENTRE.row / 2},
        "twice the wait per row": {"row": CENTRE.row * 2},
        "half the link": {"link": CENTRE.link / 2, "host": CENTRE.host / 2},
        "twice the link": {"link": CENTRE.link * 2, "host": CENTRE.host * 2},
        "less skew": {"skew": 0.8},
        "more skew": {"skew": 1.4},
    }
    other_points = (replace(CENTRE, name=n, stages=SWEPT, **change) for n, change in around.items())
    return (CENTRE, *other_points)


def raw(point: Point) -> Point:
    """The same without emulation: nothing is waited for but what this machine really does."""
    free = float("inf")
    nothing = {"row": 0.0, "fixed": 0.0, "latency": 0.0}
    return replace(point, name="raw", **nothing, link=free, host=free, hbm=free)


PR_SET_TIMERSLACK = 29
SLACK = 1000
"""Nanoseconds by which the system may delay a timed wait; 50,000 by default."""


def now() -> float:
    """Seconds, on a clock that all processes of the machine share."""
    return time.monotonic()


def wait_until(instant: float) -> None:
    """Wait without the interpreter's lock; returns at once where the instant has passed."""
    remaining = instant - now()
    if remaining > 0.0:
        time.sleep(remaining)


def prompt_timers() -> None:
    """Ask that timed waits of this thread, and of those it starts, end on time."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, SLACK, 0, 0, 0)


class Clock:
    """When a stream is free."""

    def __init__(self) -> None:
        self.free = 0.0

    def not_before(self, instant: float) -> None:
        """The stream waited for something that came at `instant`."""
        self.free = max(self.free, instant)

    def spend(self, seconds: float) -> None:
        """Be busy for so long; waits until that is over."""
        self.free += seconds
        wait_until(self.free)


class Emulated:
    """An accelerator whose streams have clocks; all but its locks is the accelerator's own.

    Args:
        inner: the accelerator that it runs on.
        point: rates.
    """

    def __init__(self, inner: Accelerator, point: Point) -> None:
        self._inner = inner
        self.point = point
        self.compute, self.copy = Clock(), Clock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def stream_lock(self, deadline: float) -> "EmulatedLock":
        """A lock that tells the compute stream's clock when it was signalled."""
        return EmulatedLock(self._inner.stream_lock(deadline), self.compute)

    def spend(self, stream: Stream, seconds: float) -> None:
        """Keep a stream busy behind what was launched on it.

        The compute stream begins when it is free and the launch has come. Others begin when their
        thread does, since they wait for events, which have no clock.
        """
        if stream.role is not Role.COMPUTE:
            stream.launch(lambda: self._copies(seconds))
            return
        launched = now()
        stream.launch(lambda: self._computes(launched, seconds))

    def _computes(self, launched: float, seconds: float) -> None:
        self.compute.not_before(launched)
        self.compute.spend(seconds)

    def _copies(self, seconds: float) -> None:
        self.copy.not_before(now())
        self.copy.spend(seconds)


class EmulatedLock:
    """A stream lock; the clock of the stream that takes it learns when it was signalled."""

    def __init__(self, inner: StreamLock, clock: Clock) -> None:
        self._inner = inner
        self._clock = clock
        self._signalled = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def acquire(self, stream: Stream) -> None:
        """See `StreamLock`."""
        self._inner.acquire(stream)
        # Behind it the next signal waits for a release, so this one is what the stream waited for.
        stream.launch(lambda: self._clock.not_before(self._signalled))

    def signal(self, epoch: int) -> None:
        """See `StreamLock`."""
        self._signalled = now()
        self._inner.signal(epoch)


class EmulatedStore:
    """Slots of few bytes that stand for many: every operation also takes the time of those.

    Args:
        inner: the slots.
        device: whose clocks.
    """

    def __init__(self, inner: SlotStore, device: Emulated) -> None:
        self.inner = inner
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def pack(self, slots: Sequence[int], blob: Tensor, stream: Stream) -> None:
        """See `SlotStore`."""
        self.inner.pack(slots, blob, stream)
        self._spend(len(slots), self._device.point.hbm, stream)

    def unpack(self, blob: Tensor, staging: Sequence[int], stream: Stream) -> None:
        """See `SlotStore`."""
        self.inner.unpack(blob, staging, stream)
        self._spend(len(staging), self._device.point.hbm, stream)

    def write(
        self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]], stream: Stream
    ) -> None:
        """See `SlotStore`; from the host's memory."""
        self.inner.write(slots, sources, stream)
        self._spend(len(slots), self._device.point.host, stream)

    def commit(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        """See `SlotStore`."""
        self.inner.commit(copies, stream)
        self._spend(len(copies), self._device.point.hbm, stream)

    def checksum_slots(self, slots: Sequence[int], out: Tensor, stream: Stream) -> None:
        """See `SlotStore`."""
        self.inner.checksum_slots(slots, out, stream)
        self._spend(len(slots), self._device.point.hbm, stream)

    def checksum_staging(self, staging: Sequence[int], out: Tensor, stream: Stream) -> None:
        """See `SlotStore`."""
        self.inner.checksum_staging(staging, out, stream)
        self._spend(len(staging), self._device.point.hbm, stream)

    def _spend(self, slots: int, rate: float, stream: Stream) -> None:
        self._device.spend(stream, slots * SLOT_BYTES / rate)


class Unchecked(EmulatedStore):
    """For systems that do not look at what they have copied: checksums are 0, and take no time."""

    def checksum_slots(self, slots: Sequence[int], out: Tensor, stream: Stream) -> None:
        """Nothing."""
        out.zero_()

    def checksum_staging(self, staging: Sequence[int], out: Tensor, stream: Stream) -> None:
        """Nothing."""
        out.zero_()


class Library:
    """Every expert's weights in the host's memory: its layer and number.

    They stand for `SLOT_BYTES`.

    Args:
        row: int64 (layers, experts, 2).
    """

    def __init__(self, row: Tensor) -> None:
        self._rows = row
        self._sums = [[checksum(expert) for expert in layer] for layer in row]

    def view(self, layer: int, expert: int) -> tuple[Tensor, ...]:
        """See `WeightSource`."""
        return (self._rows[layer, expert],)

    def checksum(self, layer: int, expert: int) -> int:
        """See `WeightSource`."""
        return self._sums[layer][expert]
