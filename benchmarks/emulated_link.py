"""A link between ranks that takes as long as many bytes would, while few really travel.

A rank has one link, serial in each direction: transfers that leave it queue up, and so do those
that arrive. An exchange begins when its few bytes have really come, which takes both ends, and ends
no earlier than latency + bytes / rate behind that, also while the device computes.
"""

import threading
from collections.abc import Sequence
from typing import Any

from emulated_device import now, wait_until
from emulation import SLOT_BYTES, Point

from equipoise.hal.communicator import Communicator, Exchange, Fabric, Parcel
from equipoise.hal.errors import ResultPending
from equipoise.hal.stream import Stream
from equipoise.hal.work import Work

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
        sent = self._out.take(begins, self._seconds(round.sends))
        received = self._in.take(begins, self._seconds(round.receives))
        return max(sent, received) + self._point.latency

    def _seconds(self, parcels: tuple[Parcel, ...]) -> float:
        slots = sum(parcel.blob.numel() for parcel in parcels) / self._slot
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
        self._opened: list[Communicator] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> Communicator:
        """See `Fabric`."""
        opened = self._inner.open(purpose, ranks)
        self._opened.append(opened)
        if purpose.endswith(MOVES):
            return LinkedCommunicator(opened, self._link)  # type: ignore[return-value]
        return opened

    def part(self) -> None:
        """Close what was opened here."""
        for opened in self._opened:
            opened.close()
