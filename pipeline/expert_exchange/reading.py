"""The sticky words on their way to the host."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from equipoise.hal.errors import ExchangeMisuse
from equipoise.hal.stream import Event, Stream
from equipoise.pipeline.expert_exchange.words import Verdict, judge


class Ledger:
    """Copies the words of all rooms to the host, and clears them.

    Args:
        rooms: the words of each, int64 [words].
        pinned: host memory, uint8 [bytes].
        event: recorded behind each reading.
    """

    def __init__(
        self, rooms: Sequence[Tensor], pinned: Callable[[int], Tensor], event: Event
    ) -> None:
        self._rooms = tuple(rooms)
        words = rooms[0].numel()
        self._host = pinned(8 * words * len(rooms)).view(torch.int64).view(len(rooms), words)
        self._event = event
        self._count = 0

    def read(self, stream: Stream) -> "Reading":
        """Launch it; an earlier reading that nobody has taken is over."""
        stream.launch(self._copy)
        stream.record(self._event)
        self._count += 1
        return Reading(self, self._count)

    @property
    def event(self) -> Event:
        """Behind it the words may be written again."""
        return self._event

    def take(self, number: int, timeout: float) -> Verdict:
        """What reading `number` says."""
        if number != self._count:
            raise ExchangeMisuse(f"reading {number} was overwritten by reading {self._count}")
        self._event.synchronize(timeout)
        return judge(self._host.tolist())

    def _copy(self) -> None:
        for into, words in zip(self._host, self._rooms, strict=True):
            into.copy_(words, non_blocking=True)
            words.zero_()


class Reading:
    """One reading of the words."""

    def __init__(self, ledger: Ledger, number: int) -> None:
        self._ledger = ledger
        self._number = number

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        return self._ledger.event.query()

    def result(self, timeout: float) -> Verdict:
        """What became of the step.

        Raises:
            GenerationMismatch: a rank dispatched with tables of another generation.
            ExchangeMisuse: a later reading has overwritten this one.
            StreamTimeout: not read within `timeout` seconds; it goes on.
        """
        return self._ledger.take(self._number, timeout)
