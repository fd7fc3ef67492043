"""Where the ranks meet in every layer: a page of memory that all processes map.

Each rank writes when it could begin, and the rows that it sends to each rank; it goes on when all
have. So dispatch waits for the last rank, and everybody knows when the slowest rank ends, which is
when combine ends.
"""

import mmap
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from emulated_device import now, wait_until

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
