"""What a link really is, as two ranks see it who have nothing else to do."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from emulated_device import now
from torch import Tensor
from wire import Wire

PAUSE = 1e-3
"""Seconds between two messages."""
WARM, SHORT, LONG = 3, 41, 7
"""Messages that are not timed; that are, of few and of many bytes. Medians are taken."""
SHORTEST = 1e-6
"""Seconds that no message is quicker than."""
FEW, MANY = 8, 16 << 20
"""Bytes of a message that shows latency, and of one that shows the rate."""


@dataclass(frozen=True)
class Gauged:
    """Medians.

    Attributes:
        latency: seconds, one way, of 8 bytes.
        rate: bytes per second of 16 MiB, one way, beside that latency.
    """

    latency: float
    rate: float

    def fields(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


class Gauge:
    """Times messages between ranks 0 and 1; every rank may hold one, these two have to.

    Args:
        wire: that has nothing in flight.
        rank: this one.
    """

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire = wire
        self._rank = rank
        self._word = torch.zeros(FEW, dtype=torch.uint8)

    def link(self) -> Gauged:
        """Latency and rate. Both ranks call it, and the first one's figures hold."""
        latency = self._median(SHORT, self._there_and_back) / 2
        seconds = self._one_way(MANY, latency) - latency
        return Gauged(latency, MANY / max(seconds, SHORTEST))

    def transfer(self, nbytes: int) -> float:
        """Seconds, one way, of a message of so many bytes, both sides ready for it."""
        latency = self._median(SHORT, self._there_and_back) / 2
        return self._one_way(nbytes, latency)

    def _one_way(self, nbytes: int, latency: float) -> float:
        blob = torch.zeros(nbytes, dtype=torch.uint8)
        return max(latency, self._median(LONG, lambda: self._there(blob)) - latency)

    def _median(self, times: int, message: Callable[[], None]) -> float:
        found = []
        for turn in range(WARM + times):
            time.sleep(PAUSE)  # as behind a stage's compute: caches and cores have cooled down
            began = now()
            message()
            if turn >= WARM:
                found.append(now() - began)
        return statistics.median(found)

    def _there_and_back(self) -> None:
        self._there(self._word)

    def _there(self, blob: Tensor) -> None:
        """The blob one way, 8 bytes the other; the one who waits for a blob is ready before."""
        if self._rank == 0:
            answer = self._wire.irecv(self._word.clone(), 1)
            self._wire.isend(blob, 1).result()
            answer.result()
        else:
            self._wire.irecv(blob, 0).result()
            self._wire.isend(self._word, 0).result()
