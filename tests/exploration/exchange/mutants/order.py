"""Mutants of order: who waits for whom, and of the words that are kept until they are read."""

import torch
from exploration.exchange.mutants.mutant import Mutant
from torch import Tensor

from equipoise.hal.stream import Event, Stream
from equipoise.pipeline.all_to_all.fixed_capacity import (
    BatchTracker,
    Combined,
    Combining,
    Dispatched,
    Dispatching,
    Idle,
)
from equipoise.pipeline.all_to_all.formats import Batch, DispatchMessages, ReceivedRows
from equipoise.pipeline.all_to_all.status import OVERFLOW, StatusReader, merge_headers


class ReusedWhileRead(BatchTracker):
    """Reuses the buffers while another stream reads the results."""

    def dispatch(self, batch: Batch, batch_id: int, stream: Stream) -> None:
        self._start_events.clear()
        super().dispatch(batch, batch_id, stream)


class ReusedInFlight(BatchTracker):
    """Reuses the buffers once results have been sent, whether they arrived or not."""

    def wait_results(self, batch_id: int, stream: Stream) -> Tensor:
        state = self._own(batch_id)
        assert isinstance(state, Combining | Combined)
        if isinstance(state, Combining):
            self._kernels.unpack_results(state.tokens, self._buffers, stream)
            stream.record(self._returned)
            self._state = Combined(batch_id, state.tokens)
        return self._buffers.results[: state.tokens]


class ListsTooEarly(BatchTracker):
    """Lists the entries before the rows have arrived."""

    def wait_rows(self, batch_id: int, stream: Stream) -> ReceivedRows:
        state = self._own(batch_id)
        if isinstance(state, Dispatching):
            self._kernels.unpack_rows(self._buffers, stream)
            stream.record(self._unpacked)
            self._merge_events = (self._unpacked,)
            self._state = Dispatched(batch_id, state.tokens)
        return self._buffers.received


class WordsReadTooEarly(BatchTracker):
    """Reads the words without waiting for the stream that enters them."""

    def wait_headers_merged(self, stream: Stream) -> None:
        """Whatever is there."""


class WordsWrittenTooEarly(BatchTracker):
    """Lets a batch enter words that are being read."""

    def start_after(self, event: Event) -> None:
        if isinstance(self._state, Idle):
            return
        super().start_after(event)


class NeverClears(StatusReader):
    """Keeps the words of the step before."""

    def _copy(self) -> None:
        for into, words in zip(self._host, self._status_words, strict=True):
            into.copy_(words)


def latest_only(words: Tensor, arrived: DispatchMessages, own: Tensor, active: Tensor) -> None:
    """Forgets what an earlier dispatch of the step said."""
    words[OVERFLOW].zero_()
    merge_headers(words, arrived, own, active)


def any_generation(words: Tensor, arrived: DispatchMessages, own: Tensor, active: Tensor) -> None:
    """Compares no generation."""
    merge_headers(words, arrived, own, torch.zeros_like(active))
    overflow = torch.where(active[:, None], arrived.overflow.long(), 0).amax(0)
    words[OVERFLOW].copy_(torch.maximum(words[OVERFLOW], overflow))


def listens_to_the_absent(
    words: Tensor, arrived: DispatchMessages, own: Tensor, active: Tensor
) -> None:
    """Compares the generation of ranks that never send one."""
    merge_headers(words, arrived, own, torch.ones_like(active))


MUTANTS = (
    Mutant(
        name="room-reused-while-read",
        broken="the next batch does not wait for the stream that reads the results",
        property="dense",
        patches={"fixed_capacity.BatchTracker": ReusedWhileRead},
    ),
    Mutant(
        name="results-not-awaited",
        broken="results are unpacked, and the buffers reused, before they have arrived",
        property="dense",
        patches={"fixed_capacity.BatchTracker": ReusedInFlight},
    ),
    Mutant(
        name="rows-not-awaited",
        broken="entries are listed before the rows have come",
        property="entries",
        patches={"fixed_capacity.BatchTracker": ListsTooEarly},
    ),
    Mutant(
        name="words-read-too-early",
        broken="the status words are read before another stream has recorded the last headers",
        property="verdict",
        patches={"fixed_capacity.BatchTracker": WordsReadTooEarly},
    ),
    Mutant(
        name="words-written-too-early",
        broken="a batch of the next step writes status words that are being read",
        property="verdict",
        patches={"fixed_capacity.BatchTracker": WordsWrittenTooEarly},
    ),
    Mutant(
        name="words-never-cleared",
        broken="a step reports the overflow of the step before",
        property="verdict",
        patches={"fixed_capacity.StatusReader": NeverClears},
    ),
    Mutant(
        name="words-not-sticky",
        broken="a dispatch that fits hides one that did not",
        property="verdict",
        patches={"status.merge_headers": latest_only},
    ),
    Mutant(
        name="generation-not-compared",
        broken="dispatches of two generations are accepted as one",
        property="generation",
        patches={"status.merge_headers": any_generation},
    ),
    Mutant(
        name="absent-generation-compared",
        broken="an inactive rank is treated as one of another generation",
        property="generation",
        patches={"status.merge_headers": listens_to_the_absent},
    ),
)
