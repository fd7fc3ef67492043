"""Mutants of what is packed and unpacked: ids, rows, places, histograms, headers."""

from dataclasses import replace

import torch
from exploration.exchange.mutants.mutant import Mutant
from torch import Tensor

from equipoise.hal.communicator import Communicator
from equipoise.hal.stream import Stream
from equipoise.hal.work import Work
from equipoise.pipeline.all_to_all import sorting, status
from equipoise.pipeline.all_to_all.formats import Batch, ExchangeFormat
from equipoise.pipeline.all_to_all.kernels import BufferSet
from equipoise.pipeline.all_to_all.sorting import SortedBatch
from equipoise.pipeline.all_to_all.torch_kernels import TorchKernels
from equipoise.pipeline.all_to_all.transport import AllRanksTransport


class KeepsToItself(TorchKernels):
    """Knows its overflow, and does not report it."""

    def _pack_rows(self, batch: Batch, buffer_set: BufferSet) -> None:
        super()._pack_rows(batch, buffer_set)
        overflow = self._buffers[buffer_set.index].sent.overflow
        buffer_set.status[status.OVERFLOW].copy_(
            torch.maximum(buffer_set.status[status.OVERFLOW], overflow[0].long())
        )
        overflow.zero_()


class LeavesOldIds(TorchKernels):
    """Writes the ids of rows that are used, and no others."""

    def _pack_rows(self, batch: Batch, buffer_set: BufferSet) -> None:
        ids = self._buffers[buffer_set.index].sent.ids
        used_sets = self._used_sets = getattr(self, "_used_sets", set[int]())
        previous_ids = (
            ids.clone()
            if buffer_set.index in used_sets
            else torch.full_like(ids, self._form.invalid_slot)
        )
        used_sets.add(buffer_set.index)
        super()._pack_rows(batch, buffer_set)
        used = self._buffers[buffer_set.index].sent.row_counts.view(-1, 1, 1)
        row = torch.arange(ids.shape[1]).view(1, -1, 1)
        ids.copy_(torch.where(row < used, ids, previous_ids))


class LoadsOfTheStepBefore(TorchKernels):
    """Sends the histogram that the batch before had."""

    def _pack_rows(self, batch: Batch, buffer_set: BufferSet) -> None:
        super()._pack_rows(batch, buffer_set)
        loads = self._buffers[buffer_set.index].sent.loads
        previous_loads, self._previous_loads = (
            getattr(self, "_previous_loads", loads.clone()),
            loads.clone(),
        )
        loads.copy_(previous_loads)


class GenerationOfTheFirstStep(TorchKernels):
    """Writes the generation once."""

    def _pack_rows(self, batch: Batch, buffer_set: BufferSet) -> None:
        self._first = getattr(self, "_first", batch.generation.clone())
        super()._pack_rows(replace(batch, generation=self._first), buffer_set)


class LeavesOldResults(TorchKernels):
    """Writes results where some came, and leaves the rest."""

    def _unpack_results(self, tokens: int, buffer_set: BufferSet) -> None:
        before = buffer_set.results.clone()
        super()._unpack_results(tokens, buffer_set)
        form = self._form
        places = self._buffers[buffer_set.index].result_positions[: tokens * form.top_k]
        for place in range(tokens * form.top_k):
            if places[place] == form.max_entries:
                token, k = divmod(place, form.top_k)
                buffer_set.results[token, k] = before[token, k]


class SharesBlobs(TorchKernels):
    """Both buffer sets send their results from one buffer."""

    def _pack_results(self, rows: Tensor, buffer_set: BufferSet) -> None:
        first, other = self._buffers[0], self._buffers[buffer_set.index]
        self._buffers[buffer_set.index] = replace(
            other, result_blobs=(first.result_blobs[0], other.result_blobs[1])
        )
        super()._pack_results(rows, buffer_set)


class OutOfOrder(AllRanksTransport):
    """Sends without a look at what the stream has still to pack."""

    def all_to_all(self, into: Tensor, source: Tensor, stream: Stream) -> Work:
        group: Communicator = self._communicator
        return group.all_to_all(into, source)


def one_too_many(slots: Tensor, form: ExchangeFormat, active: Tensor) -> SortedBatch:
    """Takes a message for full when one row more has come than fits."""
    batch = sorting.sort_batch(slots, form, active)
    return replace(batch, overflow=(batch.overflow - 1).clamp(min=0))


def one_too_few(slots: Tensor, form: ExchangeFormat, active: Tensor) -> SortedBatch:
    """Never uses the last row."""
    batch = sorting.sort_batch(slots, form, active)
    tokens = batch.tokens.clone()
    tokens[:, -1] = slots.shape[0]
    return replace(batch, tokens=tokens)


def row_a_choice(slots: Tensor, form: ExchangeFormat, active: Tensor) -> SortedBatch:
    """Counts a row for each choice of a token, also where they go to one rank."""
    batch = sorting.sort_batch(slots, form, active)
    homes = torch.where((slots >= 0) & (slots < form.num_slots), slots // form.slots_per_rank, -1)
    most = max(int((homes == r).sum()) for r in range(form.ranks) if active[r]) - form.capacity
    overflow = batch.overflow.clone()
    overflow[0] = max(most, 0)
    return replace(batch, overflow=overflow)


def strays_uncounted(slots: Tensor, form: ExchangeFormat, active: Tensor) -> SortedBatch:
    """Says nothing of choices that fall on ranks that take no part."""
    batch = sorting.sort_batch(slots, form, active)
    return replace(batch, inactive_rank_hits=torch.zeros_like(batch.inactive_rank_hits))


def sends_to_all(slots: Tensor, form: ExchangeFormat, active: Tensor) -> SortedBatch:
    """Takes every rank for active."""
    everybody = torch.ones_like(active)
    everybody[-1] = False
    batch = sorting.sort_batch(slots, form, everybody)
    return replace(
        batch, inactive_rank_hits=sorting.sort_batch(slots, form, active).inactive_rank_hits
    )


MUTANTS = (
    Mutant(
        name="overflow-kept-to-itself",
        broken="a rank's overflow is not in its headers: only that rank runs the step again",
        property="verdict",
        patches={"torch_kernels.TorchKernels": KeepsToItself},
    ),
    Mutant(
        name="capacity-one-too-large",
        broken="one row more than fits is not an overflow",
        property="verdict",
        patches={"torch_kernels.sort_batch": one_too_many},
    ),
    Mutant(
        name="capacity-one-too-small",
        broken="the last row of a message is never used",
        property="dense",
        patches={"torch_kernels.sort_batch": one_too_few},
    ),
    Mutant(
        name="row-a-choice",
        broken="a token takes a row for each choice, not for each rank",
        property="verdict",
        patches={"torch_kernels.sort_batch": row_a_choice},
    ),
    Mutant(
        name="invalid-id-not-written",
        broken="ids of unused rows are those of the batch before",
        property="entries",
        patches={"torch_kernels.TorchKernels": LeavesOldIds},
    ),
    Mutant(
        name="zeros-not-written",
        broken="results of invalid slots are those of the batch before",
        property="dense",
        patches={"torch_kernels.TorchKernels": LeavesOldResults},
    ),
    Mutant(
        name="loads-of-the-step-before",
        broken="the histogram that is sent with the rows is that of the step before",
        property="loads",
        patches={"torch_kernels.TorchKernels": LoadsOfTheStepBefore},
    ),
    Mutant(
        name="generation-of-the-first-step",
        broken="the header's generation is written once",
        property="generation",
        patches={"torch_kernels.TorchKernels": GenerationOfTheFirstStep},
    ),
    Mutant(
        name="strays-uncounted",
        broken="choices on inactive ranks are not counted",
        property="verdict",
        patches={"torch_kernels.sort_batch": strays_uncounted},
    ),
    Mutant(
        name="inactive-ranks-sent-to",
        broken="choices on inactive ranks take room in messages that no rank sends",
        property="verdict",
        patches={"torch_kernels.sort_batch": sends_to_all},
    ),
    Mutant(
        name="one-buffer-for-results",
        broken="a batch's results are packed over those that peers still read",
        property="dense",
        patches={"torch_kernels.TorchKernels": SharesBlobs},
    ),
    Mutant(
        name="sent-before-packed",
        broken="a message leaves before the stream has packed it",
        property="dense",
        patches={"transport.AllRanksTransport": OutOfOrder},
    ),
)
