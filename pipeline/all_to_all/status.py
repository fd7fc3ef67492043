"""Status of a step: overflows and generation mismatches, accumulated on the device until read.

int64 [3 + 3 * ranks]: the largest overflow of rows and of results of any rank; this rank's choices
that fell on inactive ranks; then for each rank whether its generation differed, and its generation
and ours at the latest mismatch.
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
"""Index of the first of the three words per rank."""


def num_words(ranks: int) -> int:
    """Length of the status."""
    return RANK_WORDS_START + 3 * ranks


def merge_headers(status: Tensor, messages: DispatchMessages, own: Tensor, active: Tensor) -> None:
    """Merge the headers of one dispatch into the status, on the device.

    Args:
        status: changed in place.
        messages: the received messages.
        own: int64 [1], the generation that this rank sent.
        active: bool [ranks]; inactive ranks send nothing.
    """
    overflows = torch.where(active[:, None], messages.overflow.long(), 0).amax(0)
    status[OVERFLOW].copy_(torch.maximum(status[OVERFLOW], overflows))
    ranks = status[RANK_WORDS_START:].view(-1, 3)
    differs = active & (messages.generation != own)
    update = torch.stack(
        [torch.ones_like(messages.generation), messages.generation, own.expand_as(active)], dim=1
    )
    ranks.copy_(torch.where(differs[:, None], update, ranks))


@dataclass(frozen=True)
class StepFitted:
    """No capacity was exceeded in the step.

    Attributes:
        inactive_rank_hits: choices of this rank that fell on inactive ranks; their results are 0.
    """

    inactive_rank_hits: int


@dataclass(frozen=True)
class StepOverflowed:
    """Some rank exceeded a capacity: all ranks have to discard what the step computed.

    Attributes:
        rows_over: rows by which the fullest message exceeded its capacity; 0 if only results did.
        results_over: the same for results.
    """

    rows_over: int
    results_over: int


StepOutcome = StepFitted | StepOverflowed
"""Outcome of a step; of the same type on all ranks that took part."""


def read_outcome(all_status: Sequence[Sequence[int]]) -> StepOutcome:
    """Return the outcome that the status of all buffer sets, read by the host, amounts to.

    Raises:
        GenerationMismatch: a rank dispatched with tables of another generation.
    """
    for status in all_status:
        for rank in range((len(status) - RANK_WORDS_START) // 3):
            differs, peer_generation, own_generation = status[
                RANK_WORDS_START + 3 * rank : RANK_WORDS_START + 3 * rank + 3
            ]
            if differs:
                raise GenerationMismatch(
                    f"rank {rank} dispatched with generation {peer_generation}, "
                    f"this rank with {own_generation}: "
                    "discard what the step computed"
                )
    rows, results = (max(status[place] for status in all_status) for place in range(2))
    if rows or results:
        return StepOverflowed(rows, results)
    return StepFitted(sum(status[INACTIVE_RANK_HITS] for status in all_status))


class StatusReader:
    """Copies the status of all buffer sets to the host, and clears it.

    Args:
        all_status: the status of each buffer set, int64 [words].
        pinned: allocates host memory, uint8 [bytes].
        event: recorded after each copy.
    """

    def __init__(
        self, all_status: Sequence[Tensor], pinned: Callable[[int], Tensor], event: Event
    ) -> None:
        self._status_words = tuple(all_status)
        size = all_status[0].numel()
        self._host = (
            pinned(8 * size * len(all_status)).view(torch.int64).view(len(all_status), size)
        )
        self._event = event
        self._count = 0

    def start_read(self, stream: Stream) -> "StatusReadback":
        """Launch the copy. There is one host buffer, so this invalidates earlier readbacks."""
        stream.launch(self._copy)
        stream.record(self._event)
        self._count += 1
        return StatusReadback(self, self._count)

    @property
    def event(self) -> Event:
        """Recorded after the copy; writers of the status have to wait for it."""
        return self._event

    def result_of(self, number: int, timeout: float) -> StepOutcome:
        """Return the outcome of readback `number`."""
        if number != self._count:
            raise ExchangeMisuse(
                f"status readback {number} was overwritten by readback {self._count}"
            )
        self._event.synchronize(timeout)
        return read_outcome(self._host.tolist())

    def _copy(self) -> None:
        for host_row, status in zip(self._host, self._status_words, strict=True):
            host_row.copy_(status, non_blocking=True)
            status.zero_()


class StatusReadback:
    """One readback of the status."""

    def __init__(self, reader: StatusReader, number: int) -> None:
        self._reader = reader
        self._number = number

    def ready(self) -> bool:
        """Whether `result` would return at once."""
        return self._reader.event.query()

    def result(self, timeout: float) -> StepOutcome:
        """Return the outcome of the step.

        Raises:
            GenerationMismatch: a rank dispatched with tables of another generation.
            ExchangeMisuse: a later readback has overwritten this one.
            StreamTimeout: not complete within `timeout` seconds; may be called again.
        """
        return self._reader.result_of(self._number, timeout)
