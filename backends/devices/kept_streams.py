"""Streams that a process makes once for a use and keeps."""

import threading
from collections.abc import Callable
from typing import Any


class KeptStreams:
    """A vendor's pool hands out the first stream again after the 32nd, and accelerators are opened
    and closed often: so each use gets the same stream again.

    Args:
        make: takes the next stream from the pool of a device.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, str], Any] = {}

    def get(self, index: int, use: str) -> Any:
        """The one of that device for that use."""
        with self._lock:
            if (index, use) not in self._kept:
                self._kept[index, use] = self._make(index)
            return self._kept[index, use]
