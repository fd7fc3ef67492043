"""The sticky words of an exchange: what went wrong in a step, kept on the device until it is read.

int64 [3 + 3 x ranks]: the most rows, and the most results, by which any rank exceeded a capacity;
this rank's choices that fell on inactive ranks; then for each rank whether its generation differed,
its generation and ours of the latest time that it did.

The sticky words on their way to the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.hal.errors import ExchangeMisuse, GenerationMismatch
from equipoise.hal.stream import Event, Stream
from equipoise.pipeline.all_to_all.formats import DispatchMessages

OVERFLOW = slice(0, 2)
INACTIVE_RANK_HITS = 2
RANK_WORDS_START = 3
"""Where the words of ranks begin."""


def num_words(ranks: int) -> int:
    """How many words."""
    return RANK_WORDS_START + 3 * ranks


def merge_headers(words: Tensor, arrived: DispatchMessages, own: Tensor, active: Tensor) -> None:
    """Enter what the headers of one dispatch say; nothing of it is read by the host.

    Args:
        words: changed in place.
        arrived: the messages that came.
        own: int64 [1], the generation that this rank sent.
        active: bool [ranks]; the others' messages never come.
    """
    seen = torch.where(active[:, None], arrived.overflow.long(), 0).amax(0)
    words[OVERFLOW].copy_(torch.maximum(words[OVERFLOW], seen))
    ranks = words[RANK_WORDS_START:].view(-1, 3)
    differs = active & (arrived.generation != own)
    news = torch.stack(
        [torch.ones_like(arrived.generation), arrived.generation, own.expand_as(active)], dim=1
    )
    ranks.copy_(torch.where(differs[:, None], news, ranks))


@dataclass(frozen=True)
class StepFitted:
    """Every row of the step travelled.

    Attributes:
        inactive_rank_hits: choices of this rank that fell on inactive ranks, and came back as zeros.
    """

    inactive_rank_hits: int


@dataclass(frozen=True)
class StepOverflowed:
    """Some rank had more rows than fit: what the step computed is to be discarded by all.

    Attributes:
        rows_over: by how many the fullest message exceeded its capacity; 0 if only results did.
        results_over: the same of results.
    """

    rows_over: int
    results_over: int


StepOutcome = StepFitted | StepOverflowed
"""What became of a step; the same kind on all ranks that took part in it."""


def read_outcome(rooms: Sequence[Sequence[int]]) -> StepOutcome:
    """What the words of all rooms, read by the host, say.

    Raises:
        GenerationMismatch: a rank dispatched with tables of another generation.
    """
    for words in rooms:
        for rank in range((len(words) - RANK_WORDS_START) // 3):
            differs, theirs, ours = words[
                RANK_WORDS_START + 3 * rank : RANK_WORDS_START + 3 * rank + 3
            ]
            if differs:
                raise GenerationMismatch(
                    f"rank {rank} dispatched with generation {theirs}, this rank with {ours}: "
                    "what the step computed is to be discarded"
                )
    rows, results = (max(words[place] for words in rooms) for place in range(2))
    if rows or results:
        return StepOverflowed(rows, results)
    return StepFitted(sum(words[INACTIVE_RANK_HITS] for words in rooms))


class StatusReader:
    """Copies the words of all rooms to the host, and clears them.

    Args:
        rooms: the words of each, int64 [words].
        pinned: host memory, uint8 [bytes].
        event: recorded behind each reading.
    """

    def __init__(
        self, rooms: Sequence[Tensor], pinned: Callable[[int], Tensor], event: Event
    ) -> None:
        self._status_words = tuple(rooms)
        words = rooms[0].numel()
        self._host = pinned(8 * words * len(rooms)).view(torch.int64).view(len(rooms), words)
        self._event = event
        self._count = 0

    def start_read(self, stream: Stream) -> "StatusReadback":
        """Launch it; an earlier reading that nobody has taken is over."""
        stream.launch(self._copy)
        stream.record(self._event)
        self._count += 1
        return StatusReadback(self, self._count)

    @property
    def event(self) -> Event:
        """Behind it the words may be written again."""
        return self._event

    def result_of(self, number: int, timeout: float) -> StepOutcome:
        """What reading `number` says."""
        if number != self._count:
            raise ExchangeMisuse(f"reading {number} was overwritten by reading {self._count}")
        self._event.synchronize(timeout)
        return read_outcome(self._host.tolist())

    def _copy(self) -> None:
        for into, words in zip(self._host, self._status_words, strict=True):
            into.copy_(words, non_blocking=True)
            words.zero_()


class StatusReadback:
    """One reading of the words."""

    def __init__(self, ledger: StatusReader, number: int) -> None:
        self._reader = ledger
        self._number = number

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        return self._reader.event.query()

    def result(self, timeout: float) -> StepOutcome:
        """What became of the step.

        Raises:
            GenerationMismatch: a rank dispatched with tables of another generation.
            ExchangeMisuse: a later reading has overwritten this one.
            StreamTimeout: not read within `timeout` seconds; it goes on.
        """
        return self._reader.result_of(self._number, timeout)
