"""A host pool: a fixed number of pages, reused in turn once no copy reads them."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch import Tensor

from equipoise.hal.errors import PoolExhausted, SlotError, StreamFailed, StreamTimeout
from equipoise.hal.stream import Event

POLL_INTERVAL = 0.01
"""Seconds between two looks at the other pages while waiting for the oldest."""


class PagePool:
    """The host pool of any backend (clause A13).

    Args:
        allocate: host memory, uint8 [n], for n bytes.
        page_bytes: bytes of a page.
        pages: how many; all are allocated at once.
    """

    def __init__(self, allocate: Callable[[int], Tensor], page_bytes: int, pages: int) -> None:
        if page_bytes < 1 or pages < 1:
            raise SlotError(f"a pool needs pages: got {pages} of {page_bytes} bytes")
        self._page_bytes = page_bytes
        self._returned_pages: list[tuple[Tensor, Event | None]] = [
            (allocate(page_bytes), None) for _ in range(pages)
        ]
        self._changed = threading.Condition()

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self._page_bytes

    def take(self, timeout: float) -> "PoolPage":
        """A page that no copy reads any more, the one returned first if there are several."""
        expiry = time.monotonic() + timeout
        while True:
            page = self._free()
            if page is not None:
                return page
            seconds_left = expiry - time.monotonic()
            if seconds_left <= 0.0:
                raise PoolExhausted(f"no page became free within {timeout:g} s")
            self._await(seconds_left)

    def put(self, page: "PoolPage", after: Event | None) -> None:
        """Return a page to the pool, once."""
        if after is not None:
            with suppress(StreamTimeout, StreamFailed):
                after.synchronize(0.0)  # raises for an event that was never recorded (clause O3)
        with self._changed:
            if page.returned:
                raise SlotError("a page was given back twice")
            page.returned = True
            self._returned_pages.append((page.data, after))
            self._changed.notify()

    def _free(self) -> "PoolPage | None":
        """The first returned page whose copies have ended, by success or failure."""
        with self._changed:
            for place, (data, after) in enumerate(self._returned_pages):
                if after is None or after.query():
                    del self._returned_pages[place]
                    return PoolPage(self, data)
        return None

    def _await(self, seconds: float) -> None:
        """Wait until a page may have become free; returns within `POLL_INTERVAL` if one has."""
        with self._changed:
            if not self._returned_pages:
                self._changed.wait(seconds)
                return
            oldest = self._returned_pages[0][1]
        # Outside the lock, which `put` needs; briefly, since another page may become free first.
        if oldest is not None:
            with suppress(StreamTimeout, StreamFailed):
                oldest.synchronize(min(seconds, POLL_INTERVAL))


class PoolPage:
    """A page that was taken from the pool."""

    def __init__(self, pool: PagePool, data: Tensor) -> None:
        self._pool = pool
        self._data = data
        self.returned = False

    @property
    def data(self) -> Tensor:
        """uint8 [page_bytes]."""
        return self._data

    def give_back(self, after: Event | None) -> None:
        """Return it; `after` must not be recorded on another stream before it is reached."""
        self._pool.put(self, after)
