"""Where the ranks meet in every layer: a page of memory that all processes map.

Each rank writes when it could begin, and the rows that it sends to each rank; it goes on when all
have. So dispatch waits for the last rank, and everybody knows when the slowest rank ends, which is
when combine ends.
"""

import mmap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.hal.communicator import Communicator, Exchange, Fabric, PeerBuffer
from equipoise.hal.errors import ResultPending
from equipoise.hal.stream import Stream
from equipoise.hal.work import Work
from lib.emulated_device import SLOT_BYTES, Point, now, wait_until

MOVES = "moves"
"""Purposes that end so carry weights."""


class Port:
    """One direction of a rank's link."""

    def __init__(self) -> None:
        self._free = 0.0

    def take(self, begins: float, seconds: float) -> float:
        """Be busy for so long, when it is free; when that ends."""
        self._free = max(self._free, begins) + seconds
        return self._free


class Link:
    """A rank's link.

    Args:
        point: rates.
        slot: real bytes of a slot.
    """

    def __init__(self, point: Point, slot: int) -> None:
        self._point = point
        self._slot = slot
        self._out, self._in = Port(), Port()

    def book(self, round: Exchange) -> float:
        """When an exchange ends that begins now."""
        begins = now()
        send_end = self._out.take(begins, self._seconds(round.sends))
        receive_end = self._in.take(begins, self._seconds(round.receives))
        return max(send_end, receive_end) + self._point.latency

    def _seconds(self, buffers: tuple[PeerBuffer, ...]) -> float:
        slots = sum(buffer.blob.numel() for buffer in buffers) / self._slot
        return slots * SLOT_BYTES / self._point.link


class LinkedWork:
    """An exchange: ended when it really is and its emulated time is over.

    Args:
        inner: the few bytes.
        link: this rank's.
        round: what travels.
    """

    def __init__(self, inner: Work, link: Link, round: Exchange) -> None:
        self._inner = inner
        self._link = link
        self._round = round
        self._ends: float | None = None
        self._booking = threading.Lock()

    def done(self) -> bool:
        """See `Work`."""
        return self._inner.done() and now() >= self._booked()

    def wait(self, stream: Stream) -> None:
        """See `Work`; used behind `result` only, so it is a formality."""
        self._inner.wait(stream)
        stream.launch(lambda: wait_until(self._booked()))

    def result(self, timeout: float) -> None:
        """See `Work`."""
        expires = now() + timeout
        self._inner.result(timeout)
        ends = self._booked()
        wait_until(min(ends, expires))
        if ends > expires:
            raise ResultPending(f"an emulated exchange takes longer than {timeout:g} s")

    def cancel(self) -> None:
        """See `Work`."""
        self._inner.cancel()

    def _booked(self) -> float:
        """When it ends; the few bytes have come."""
        with self._booking:
            if self._ends is None:
                self._ends = self._link.book(self._round)
            return self._ends


class LinkedCommunicator:
    """A communicator whose exchanges go over the emulated link; all else is its own."""

    def __init__(self, inner: Communicator, link: Link) -> None:
        self._inner = inner
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def exchange(self, round: Exchange) -> Work:
        """See `Communicator`."""
        return LinkedWork(self._inner.exchange(round), self._link, round)


class LinkedFabric:
    """A fabric whose weights go over the emulated link; communicators are given back by `part`."""

    def __init__(self, inner: Fabric, link: Link) -> None:
        self._inner = inner
        self._link = link
        self._communicators: list[Communicator] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> Communicator:
        """See `Fabric`."""
        communicator = self._inner.open(purpose, ranks)
        self._communicators.append(communicator)
        if purpose.endswith(MOVES):
            return LinkedCommunicator(communicator, self._link)  # type: ignore[return-value]
        return communicator

    def part(self) -> None:
        """Close what was opened here."""
        for communicator in self._communicators:
            communicator.close()


RING = 4
"""Meetings that are kept: a rank is at most one ahead of another."""
SOONEST, LATEST = 50e-6, 400e-6
"""Seconds between two looks: a look costs a switch of threads, and cores are few."""
WORD = 8


@dataclass(frozen=True)
class Meeting:
    """What all ranks brought.

    Attributes:
        start: when the last of them could begin.
        rows: int64 [ranks], that each rank computes.
        generations: of each rank's tables.
    """

    start: float
    rows: npt.NDArray[np.int64]
    generations: npt.NDArray[np.int64]


class Board:
    """One rank's view.

    Args:
        path: of a file of `size(ranks)` zeros.
        rank: this one.
        ranks: how many.
        deadline: seconds to wait for the others.
    """

    def __init__(self, path: Path, rank: int, ranks: int, deadline: float) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), Board.size(ranks))
        words = np.frombuffer(self._memory, dtype=np.int64).reshape(RING, ranks, ranks + 3)
        self._numbers = words[:, :, 0]
        self._starts = words[:, :, 1].view(np.float64)
        self._generations = words[:, :, 2]
        self._rows = words[:, :, 3:]
        self._rank = rank
        self._deadline = deadline
        self._count = 0

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes of the page."""
        return RING * ranks * (ranks + 3) * WORD

    def meet(
        self, start: float, rows: npt.NDArray[np.int64], generation: int, look: float = 0.0
    ) -> Meeting:
        """Write this rank's words and read everybody's. Raises `TimeoutError`.

        Args:
            start: when this rank could begin.
            rows: int64 [ranks], that it sends to each.
            generation: of its tables.
            look: before then nobody needs to know.
        """
        self._count += 1
        place = self._count % RING
        self._starts[place, self._rank] = start
        self._rows[place, self._rank] = rows
        self._generations[place, self._rank] = generation
        self._numbers[place, self._rank] = self._count  # last: stores are seen in order here
        wait_until(look)
        self._await(place)
        return Meeting(
            float(self._starts[place].max()),
            self._rows[place].sum(axis=0),
            self._generations[place].copy(),
        )

    def _await(self, place: int) -> None:
        expires, pause = now() + self._deadline, SOONEST
        while not (self._numbers[place] == self._count).all():
            if now() > expires:
                there = (self._numbers[place] == self._count).tolist()
                raise TimeoutError(f"meeting {self._count}: came: {there}")
            time.sleep(pause)
            pause = min(2 * pause, LATEST)
