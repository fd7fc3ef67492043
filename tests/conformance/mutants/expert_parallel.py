"""Mutants of family *expert_parallel*: our exchange as a library, with one behaviour broken."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from conformance.mutants.expert_libraries import (
    FixedLibrary,
    LoneGroup,
    LoneLibrary,
    VariableLibrary,
)
from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import gloo_library_with, library_with
from torch import Tensor

from equipoise.hal.errors import CapacityExceeded, ExchangeMisuse, GenerationMismatch, StreamFailed
from equipoise.hal.expert_parallel import ReceivedTokens, StepStatus
from equipoise.hal.stream import Event, Stream
from equipoise.pipeline.all_to_all.expert_parallel import (
    ExchangeHandle,
    FixedCapacityGroup,
    FixedCapacityStatus,
    VariableSizeGroup,
)
from equipoise.pipeline.all_to_all.formats import ReceivedRows

# ----- M1, M2: results and rows -------------------------------------------------------------------


class IgnoresWeights(FixedCapacityGroup):
    """Sums results as if every weight were one."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        return super().dispatch(tokens, expert_ids, torch.ones_like(weights), stream)


class SumsInTokenDtype(FixedCapacityGroup):
    """Rounds to the dtype of the tokens after every choice, though float32 is declared."""

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        assert isinstance(handle, ExchangeHandle)
        combined = handle.dispatched.combine(outputs, stream)
        results = combined.wait(stream)
        out = outputs.new_empty((handle.weights.shape[0], outputs.shape[1]))
        stream.launch(partial(self._sum, out, results, handle.weights))
        combined.release(stream)
        return out

    def _sum(self, out: Tensor, results: Tensor, weights: Tensor) -> None:
        out.zero_()
        for choice in range(weights.shape[1]):
            out += results[:, choice] * weights[:, choice, None].to(out.dtype)


class SumsThreeChoices(FixedCapacityGroup):
    """The fourth choice is left out of the sum."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        kept = torch.zeros_like(weights)
        stream.launch(lambda: kept[:, :3].copy_(weights[:, :3]))
        return super().dispatch(tokens, expert_ids, kept, stream)


class SwapsLocalExperts(FixedCapacityGroup):
    """Rows of a rank's last two experts are taken for each other's."""

    def _list_rows(
        self, received: ReceivedRows, rows: Tensor, experts: Tensor, counts: Tensor
    ) -> None:
        super()._list_rows(received, rows, experts, counts)
        last = self._form.slots_per_rank - 1
        if last > 0:
            swapped = torch.where(experts == last, last - 1, experts)
            experts.copy_(torch.where(experts == last - 1, last, swapped))


class RepeatsFirstRow(FixedCapacityGroup):
    """Every row of a rank that received more than three is its first one."""

    def _list_rows(
        self, received: ReceivedRows, rows: Tensor, experts: Tensor, counts: Tensor
    ) -> None:
        super()._list_rows(received, rows, experts, counts)
        used = (experts >= 0).nonzero().view(-1)
        if used.numel() > 3:
            rows[used[3:]] = rows[used[0]].clone()


class TakesThousandRows(VariableSizeGroup):
    """Rows after the first 1024 are not handed to the experts."""

    def _list_rows(
        self, received: ReceivedRows, rows: Tensor, experts: Tensor, counts: Tensor
    ) -> None:
        super()._list_rows(received, rows, experts, counts)
        experts[1024:] = -1


class SixtyFourTokensAtATime(FixedCapacityGroup):
    """The weights of tokens after the 64th are those of the first 64 again."""

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        assert isinstance(handle, ExchangeHandle)
        places = torch.arange(handle.weights.shape[0], device=handle.weights.device) % 64
        weights = torch.empty_like(handle.weights)
        stream.launch(lambda: weights.copy_(handle.weights[places]))
        return super().combine(outputs, replace(handle, weights=weights), stream)


# ----- M3, M4, M5: loads, choices and counts ------------------------------------------------------


class SharesRoomEvenly(FixedCapacityGroup):
    """An expert has room for three quarters of all tokens; the rows after them are dropped."""

    def _list_rows(
        self, received: ReceivedRows, rows: Tensor, experts: Tensor, counts: Tensor
    ) -> None:
        super()._list_rows(received, rows, experts, counts)
        room = max(2, self._form.ranks * self._form.max_tokens * 3 // 4)
        for local in range(self._form.slots_per_rank):
            own = (experts == local).nonzero().view(-1)
            experts[own[room:]] = -1


class PadsWithExpertZero(FixedCapacityGroup):
    """A choice of -1 is sent to expert 0, with its weight."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        ids = torch.empty_like(expert_ids)
        stream.launch(lambda: ids.copy_(expert_ids.clamp(min=0)))
        return super().dispatch(tokens, ids, weights, stream)


class CountsRepetitionOnce(FixedCapacityGroup):
    """An expert that a token repeats in its next choice gets its row once."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        ids = torch.empty_like(expert_ids)
        stream.launch(partial(self._once, ids, expert_ids))
        return super().dispatch(tokens, ids, weights, stream)

    def _once(self, ids: Tensor, expert_ids: Tensor) -> None:
        ids.copy_(expert_ids)
        repeated = expert_ids[:, 1:] == expert_ids[:, :-1]
        ids[:, 1:] = torch.where(repeated, -1, expert_ids[:, 1:])


class CountsUnusedRows(FixedCapacityGroup):
    """Unused rows are counted for the last local expert."""

    def _list_rows(
        self, received: ReceivedRows, rows: Tensor, experts: Tensor, counts: Tensor
    ) -> None:
        super()._list_rows(received, rows, experts, counts)
        counts[-1] += (experts < 0).sum()


class TellsPrefixSums(FixedCapacityGroup):
    """Counts are added up over the local experts."""

    def _list_rows(
        self, received: ReceivedRows, rows: Tensor, experts: Tensor, counts: Tensor
    ) -> None:
        super()._list_rows(received, rows, experts, counts)
        counts.copy_(counts.cumsum(0))


# ----- M6, M7: what is passed ---------------------------------------------------------------------


class LocalisesIdsInPlace(FixedCapacityGroup):
    """Leaves local ids in the caller's tensor."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        received = super().dispatch(tokens, expert_ids, weights, stream)
        stream.launch(lambda: expert_ids.remainder_(self._form.slots_per_rank))
        return received


class PadsTokensInPlace(FixedCapacityGroup):
    """Clears the memory after the tokens, up to a multiple of 64 bytes."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        begin = tokens.storage_offset() + tokens.numel()
        end = tokens.untyped_storage().nbytes() // tokens.dtype.itemsize
        extra = min(-tokens.numel() % 64, end - begin)
        padding = torch.as_strided(tokens, (extra,), (1,), begin)
        stream.launch(padding.zero_)
        return super().dispatch(tokens, expert_ids, weights, stream)


class WritesBesideOutputs(FixedCapacityGroup):
    """Leaves a flag in front of the experts' outputs."""

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        if outputs.storage_offset() > 0:
            flag = torch.as_strided(outputs, (1,), (1,), outputs.storage_offset() - 1)
            stream.launch(flag.zero_)
        return super().combine(outputs, handle, stream)


class KeepsWeightsOfCaller(FixedCapacityGroup):
    """Combines with the caller's own tensor of weights."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        received = super().dispatch(tokens, expert_ids, weights, stream)
        assert isinstance(received.handle, ExchangeHandle)
        return replace(received, handle=replace(received.handle, weights=weights))


class ReadsIdsAgain(FixedCapacityGroup):
    """Combines by the ids that the caller's tensor holds by then."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        received = super().dispatch(tokens, expert_ids, weights, stream)
        assert isinstance(received.handle, ExchangeHandle)
        self._ids = {**getattr(self, "_ids", {}), id(received.handle): expert_ids}
        return received

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        assert isinstance(handle, ExchangeHandle)
        ids, kept = self._ids.pop(id(handle), None), handle.weights
        if ids is None:
            return super().combine(outputs, handle, stream)
        weights = torch.empty_like(kept)
        stream.launch(lambda: weights.copy_(kept * (ids < self._form.num_slots).float()))
        return super().combine(outputs, replace(handle, weights=weights), stream)


# ----- M8, M9: handles ----------------------------------------------------------------------------


class CombinesNewest(FixedCapacityGroup):
    """A handle that has ended stands for the dispatch that came last."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        received = super().dispatch(tokens, expert_ids, weights, stream)
        self._newest = received.handle
        return received

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        try:
            return super().combine(outputs, handle, stream)
        except ExchangeMisuse:
            return super().combine(outputs, self._newest, stream)


class AnswersEndedWithZeros(FixedCapacityGroup):
    """The result of a handle that has ended is zero."""

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        try:
            return super().combine(outputs, handle, stream)
        except ExchangeMisuse:
            assert isinstance(handle, ExchangeHandle)
            return outputs.new_zeros((handle.weights.shape[0], outputs.shape[1]))


class RefusesOnFirstRank(FixedCapacityGroup):
    """Rank 0 refuses a handle that has ended; the others know its result by heart."""

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        results: dict[object, Tensor] = vars(self).setdefault("_results", {})
        if handle in results and self._communicator.rank > 0:
            return results[handle]
        results[handle] = super().combine(outputs, handle, stream)
        return results[handle]


class HasOneBufferForWeights(FixedCapacityGroup):
    """All dispatches in flight have their weights in one buffer."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        received = super().dispatch(tokens, expert_ids, weights, stream)
        assert isinstance(received.handle, ExchangeHandle)
        shape = (self._form.max_tokens, self._form.top_k)
        buffer: Tensor = vars(self).setdefault("_buffer", weights.new_empty(shape))
        kept = buffer[: weights.shape[0]]
        stream.launch(partial(kept.copy_, weights))
        return replace(received, handle=replace(received.handle, weights=kept))


class CombinesOldest(FixedCapacityGroup):
    """Of the dispatches that are open, the oldest one is combined."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        received = super().dispatch(tokens, expert_ids, weights, stream)
        vars(self).setdefault("_open", []).append(received.handle)
        return received

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        opened: list[object] = vars(self).setdefault("_open", [])
        if handle not in opened:
            return super().combine(outputs, handle, stream)
        return super().combine(outputs, opened.pop(0), stream)


# ----- M10: masks ---------------------------------------------------------------------------------


class ScalesUpForLost(FixedCapacityGroup):
    """The weights of the choices that are left make up for those on lost ranks."""

    def set_active(self, ranks: Sequence[int]) -> None:
        super().set_active(ranks)
        self._scale = self._form.ranks / len(ranks)

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        scaled = torch.empty_like(weights)
        scale = getattr(self, "_scale", 1.0)
        stream.launch(lambda: scaled.copy_(weights * scale))
        return super().dispatch(tokens, expert_ids, scaled, stream)


class SendsOwnForLost(FixedCapacityGroup):
    """Choices on lost ranks are computed by this rank's first expert."""

    def set_active(self, ranks: Sequence[int]) -> None:
        super().set_active(ranks)
        self._present = list(ranks)

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        ids = torch.empty_like(expert_ids)
        stream.launch(partial(self._redirect, ids, expert_ids))
        return super().dispatch(tokens, ids, weights, stream)

    def _redirect(self, ids: Tensor, expert_ids: Tensor) -> None:
        per_rank = self._form.slots_per_rank
        present = torch.tensor(getattr(self, "_present", list(range(self._form.ranks))))
        homes = torch.div(expert_ids, per_rank, rounding_mode="floor")
        own = self._communicator.rank * per_rank
        ids.copy_(torch.where(torch.isin(homes, present) | (expert_ids < 0), expert_ids, own))


# ----- M11: graphs --------------------------------------------------------------------------------


class CapturesChoices(LoneGroup):
    """Choices are read by the host at the call, and so captured with the graph."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        return super().dispatch(tokens, expert_ids.clone(), weights, stream)


class CapturesWeights(LoneGroup):
    """Weights are read at the call."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        return super().dispatch(tokens, expert_ids, weights.clone(), stream)


# ----- M12, M13: what does not fit ----------------------------------------------------------------


class TruncatesBatch(FixedCapacityGroup):
    """Tokens after the most that a batch may have are left out."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        most = self._form.max_tokens
        return super().dispatch(tokens[:most], expert_ids[:most], weights[:most], stream)


class CountsRefusedBatches(FixedCapacityGroup):
    """The number of the batch, which peers compare, is counted before the batch is checked."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        self._generation = self._generation + 1
        return super().dispatch(tokens, expert_ids, weights, stream)


class _Status(FixedCapacityStatus):
    """A status that is told in another way."""

    def __init__(self, healthy: StepStatus, rank: int, steps: list[bool]) -> None:
        self._healthy = healthy
        self._rank = rank
        self._steps = steps

    def ready(self) -> bool:
        return self._healthy.ready()

    def result(self, timeout: float) -> None:
        self._healthy.result(timeout)


class SilentOverflow(_Status):
    def result(self, timeout: float) -> None:
        try:
            super().result(timeout)
        except CapacityExceeded:
            return


class OverflowOnFirstRank(_Status):
    def result(self, timeout: float) -> None:
        try:
            super().result(timeout)
        except CapacityExceeded:
            if self._rank == 0:
                raise


class StickyOverflow(_Status):
    def result(self, timeout: float) -> None:
        if self._steps:
            raise CapacityExceeded("a step before this one")
        try:
            super().result(timeout)
        except CapacityExceeded:
            self._steps.append(True)
            raise


class SilentFailure(_Status):
    def result(self, timeout: float) -> None:
        try:
            super().result(timeout)
        except StreamFailed:
            return


class MismatchOnLowest(_Status):
    def result(self, timeout: float) -> None:
        try:
            super().result(timeout)
        except GenerationMismatch:
            if self._rank == 0:
                raise


class _Told(FixedCapacityGroup):
    """Its steps are told by another status."""

    status: type[_Status] = _Status

    def finish(self, stream: Stream) -> StepStatus:
        steps: list[bool] = vars(self).setdefault("_steps", [])
        return self.status(super().finish(stream), self._communicator.rank, steps)


class ForgetsOverflow(_Told):
    """Rows that do not fit are dropped without an error."""

    status = SilentOverflow


class TellsFirstRank(_Told):
    """Only rank 0 is told that rows did not fit."""

    status = OverflowOnFirstRank


class RemembersOverflow(_Told):
    """Steps after one that did not fit are told not to fit either."""

    status = StickyOverflow


class ForgetsFailure(_Told):
    """A step that failed for lack of a peer is told to be right."""

    status = SilentFailure


class TellsMismatchOnce(_Told):
    """Only rank 0 is told of another generation."""

    status = MismatchOnLowest


class IgnoresGeneration(FixedCapacityGroup):
    """Every dispatch carries the same generation."""

    def set_generation(self, generation: int) -> None:
        super().set_generation(0)


# ----- M16: resources -----------------------------------------------------------------------------


class KeepsBatches(FixedCapacityGroup):
    """Keeps the tokens of every dispatch."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        vars(self).setdefault("_batches", []).append(weights)
        return super().dispatch(tokens, expert_ids, weights, stream)


class KeepsEvents(FixedCapacityGroup):
    """Makes an event for every combine, and keeps it."""

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        event = self._accelerator.event()
        stream.record(event)
        kept: list[Event] = vars(self).setdefault("_events", [])
        kept.append(event)
        return super().combine(outputs, handle, stream)


class ClosesOnce(FixedCapacityGroup):
    """Closing again raises."""

    def close(self) -> None:
        if vars(self).setdefault("_closed", False):
            raise ExchangeMisuse("the group is closed")
        self._closed = True
        super().close()


RESULTS = (
    "combine-is-the-dense-sum",
    "real-numbers-keep-the-declared-precision",
    "many-tokens-arrive-at-many-experts",
    "uneven-loads-arrive-whole",
    "padding-and-repeated-experts-count-as-they-are",
    "counts-are-those-of-the-rows",
    "what-is-passed-is-only-read",
    "later-launches-may-overwrite-what-was-passed",
    "an-ended-handle-is-refused-or-right",
    "dispatches-in-flight-do-not-mix",
    "lost-ranks-are-left-out",
    "a-batch-that-does-not-fit-is-refused",
    "what-exceeds-a-capacity-is-told",
    "ranks-of-different-generations-are-told",
    "steps-leak-nothing",
)
"""All properties that look at the results of ordinary steps."""


def _fixed(group: type[FixedCapacityGroup]) -> Any:
    return library_with(FixedLibrary(group=group))


MUTANTS = (
    Mutant(
        name="weights-are-ignored",
        clause="M1",
        broken="Results are summed as if every weight were one.",
        property="combine-is-the-dense-sum",
        subject=_fixed(IgnoresWeights),
        also=RESULTS,  # every ordinary step is wrong
    ),
    Mutant(
        name="sums-are-rounded-after-each-choice",
        clause="M1",
        broken="Results are summed in the dtype of the tokens, though float32 is declared.",
        property="real-numbers-keep-the-declared-precision",
        subject=_fixed(SumsInTokenDtype),
    ),
    Mutant(
        name="a-fourth-choice-is-not-summed",
        clause="M1",
        broken="Choices after the third are left out of the sum.",
        property="combine-is-the-dense-sum",
        subject=_fixed(SumsThreeChoices),
        also=RESULTS,  # every ordinary step is wrong
    ),
    Mutant(
        name="two-local-experts-are-swapped",
        clause="M2",
        broken="Rows of the last two experts of a rank are taken for each other's.",
        property="combine-is-the-dense-sum",
        subject=_fixed(SwapsLocalExperts),
        also=RESULTS,  # every ordinary step is wrong
    ),
    Mutant(
        name="one-row-stands-for-all",
        clause="M2",
        broken="A rank that received more than three rows has the first one in place of others.",
        property="combine-is-the-dense-sum",
        subject=_fixed(RepeatsFirstRow),
        also=RESULTS,  # every ordinary step is wrong
    ),
    Mutant(
        name="rows-after-the-first-1024-are-lost",
        clause="M2",
        broken="No more than 1024 rows are handed to the experts of a rank.",
        property="many-tokens-arrive-at-many-experts",
        subject=gloo_library_with(VariableLibrary(group=TakesThousandRows)),
        real=True,
    ),
    Mutant(
        name="weights-begin-again-after-64-tokens",
        clause="M1",
        broken="The weights of tokens after the 64th are those of the first ones.",
        property="many-tokens-arrive-at-many-experts",
        subject=_fixed(SixtyFourTokensAtATime),
    ),
    Mutant(
        name="an-expert-has-room-for-most-tokens",
        clause="M3",
        broken="Rows for an expert that more than three quarters of all tokens chose are dropped.",
        property="uneven-loads-arrive-whole",
        subject=_fixed(SharesRoomEvenly),
        also=RESULTS,  # every ordinary step is wrong
    ),
    Mutant(
        name="padding-is-sent-to-expert-zero",
        clause="M4",
        broken="A choice of -1 counts as one of expert 0.",
        property="padding-and-repeated-experts-count-as-they-are",
        subject=_fixed(PadsWithExpertZero),
    ),
    Mutant(
        name="a-repeated-expert-counts-once",
        clause="M4",
        broken="An expert that is chosen twice in a row computes the token once.",
        property="padding-and-repeated-experts-count-as-they-are",
        subject=_fixed(CountsRepetitionOnce),
    ),
    Mutant(
        name="unused-rows-are-counted",
        clause="M5",
        broken="The count of the last local expert includes unused rows.",
        property="counts-are-those-of-the-rows",
        subject=_fixed(CountsUnusedRows),
    ),
    Mutant(
        name="counts-are-added-up",
        clause="M5",
        broken="The counts are prefix sums over the local experts.",
        property="counts-are-those-of-the-rows",
        subject=_fixed(TellsPrefixSums),
    ),
    Mutant(
        name="ids-are-made-local-in-place",
        clause="M6",
        broken="The caller's ids are local ones after the dispatch.",
        property="what-is-passed-is-only-read",
        subject=_fixed(LocalisesIdsInPlace),
    ),
    Mutant(
        name="tokens-are-padded-in-place",
        clause="M6",
        broken="Bytes after the tokens are cleared, up to a multiple of 64.",
        property="what-is-passed-is-only-read",
        subject=_fixed(PadsTokensInPlace),
    ),
    Mutant(
        name="a-flag-is-left-before-the-outputs",
        clause="M6",
        broken="The element in front of the experts' outputs is cleared.",
        property="what-is-passed-is-only-read",
        subject=_fixed(WritesBesideOutputs),
    ),
    Mutant(
        name="weights-are-read-at-the-combine",
        clause="M7",
        broken="Weights are those that the caller's tensor holds when the results come back.",
        property="later-launches-may-overwrite-what-was-passed",
        subject=_fixed(KeepsWeightsOfCaller),
    ),
    Mutant(
        name="ids-are-read-again-at-the-combine",
        clause="M7",
        broken="Choices count by the ids that the caller's tensor holds at the combine.",
        property="later-launches-may-overwrite-what-was-passed",
        subject=_fixed(ReadsIdsAgain),
    ),
    Mutant(
        name="an-ended-handle-combines-the-newest",
        clause="M8",
        broken="A handle that has ended stands for the dispatch that came last.",
        property="an-ended-handle-is-refused-or-right",
        subject=_fixed(CombinesNewest),
    ),
    Mutant(
        name="an-ended-handle-gives-zeros",
        clause="M8",
        broken="The result of a handle that has ended is zero.",
        property="an-ended-handle-is-refused-or-right",
        subject=_fixed(AnswersEndedWithZeros),
    ),
    Mutant(
        name="an-ended-handle-is-refused-on-one-rank",
        clause="M8",
        broken="Rank 0 refuses a handle that has ended, and the others return a result.",
        property="an-ended-handle-is-refused-or-right",
        subject=_fixed(RefusesOnFirstRank),
    ),
    Mutant(
        name="dispatches-share-a-buffer-of-weights",
        clause="M9",
        broken="The weights of a second dispatch overwrite those of the first.",
        property="dispatches-in-flight-do-not-mix",
        subject=_fixed(HasOneBufferForWeights),
    ),
    Mutant(
        name="the-oldest-dispatch-is-combined",
        clause="M9",
        broken="Whatever the handle, the oldest dispatch that is open is combined.",
        property="dispatches-in-flight-do-not-mix",
        subject=_fixed(CombinesOldest),
    ),
    Mutant(
        name="weights-make-up-for-lost-ranks",
        clause="M10",
        broken="Weights are scaled by the part of the ranks that is lost.",
        property="lost-ranks-are-left-out",
        subject=_fixed(ScalesUpForLost),
    ),
    Mutant(
        name="another-expert-stands-in-for-a-lost-one",
        clause="M10",
        broken="Choices on lost ranks are computed by the first expert of the token's rank.",
        property="lost-ranks-are-left-out",
        subject=_fixed(SendsOwnForLost),
    ),
    Mutant(
        name="choices-are-captured",
        clause="M11",
        broken="A replay sends tokens by the choices of the capture.",
        property="a-captured-step-is-replayed-with-new-contents",
        subject=library_with(LoneLibrary(group=CapturesChoices)),
    ),
    Mutant(
        name="weights-are-captured",
        clause="M11",
        broken="A replay sums by the weights of the capture.",
        property="a-captured-step-is-replayed-with-new-contents",
        subject=library_with(LoneLibrary(group=CapturesWeights)),
    ),
    Mutant(
        name="a-batch-is-cut-to-size",
        clause="M12",
        broken="Tokens beyond the most that a batch may have are left out.",
        property="a-batch-that-does-not-fit-is-refused",
        subject=_fixed(TruncatesBatch),
    ),
    Mutant(
        name="a-refused-batch-is-counted",
        clause="M12",
        broken="A batch that is refused counts, and the next one has another number than peers'.",
        property="a-batch-that-does-not-fit-is-refused",
        subject=_fixed(CountsRefusedBatches),
    ),
    Mutant(
        name="rows-that-do-not-fit-are-dropped",
        clause="M13",
        broken="Rows beyond the capacity are dropped without an error.",
        property="what-exceeds-a-capacity-is-told",
        subject=_fixed(ForgetsOverflow),
    ),
    Mutant(
        name="one-rank-is-told-what-does-not-fit",
        clause="M13",
        broken="Only rank 0 is told that rows did not fit.",
        property="what-exceeds-a-capacity-is-told",
        subject=_fixed(TellsFirstRank),
    ),
    Mutant(
        name="what-did-not-fit-is-told-for-ever",
        clause="M13",
        broken="After a step that did not fit no step fits.",
        property="what-exceeds-a-capacity-is-told",
        subject=_fixed(RemembersOverflow),
    ),
    Mutant(
        name="a-failed-step-is-told-to-be-right",
        clause="M14",
        broken="A step that failed for lack of a peer ends well.",
        property="a-rank-that-stays-away-is-told",
        subject=_fixed(ForgetsFailure),
    ),
    Mutant(
        name="generations-are-not-sent",
        clause="M15",
        broken="Ranks of different generations are not told.",
        property="ranks-of-different-generations-are-told",
        subject=_fixed(IgnoresGeneration),
    ),
    Mutant(
        name="one-rank-is-told-of-another-generation",
        clause="M15",
        broken="Only rank 0 is told that generations differ.",
        property="ranks-of-different-generations-are-told",
        subject=_fixed(TellsMismatchOnce),
    ),
    Mutant(
        name="batches-are-kept",
        clause="M16",
        broken="The weights of every dispatch are kept.",
        property="steps-leak-nothing",
        subject=_fixed(KeepsBatches),
    ),
    Mutant(
        name="events-of-combines-are-kept",
        clause="M16",
        broken="Every combine leaves an event behind.",
        property="steps-leak-nothing",
        subject=_fixed(KeepsEvents),
    ),
    Mutant(
        name="closing-a-group-again-raises",
        clause="M16",
        broken="A group that is closed cannot be closed again.",
        property="steps-leak-nothing",
        subject=_fixed(ClosesOnce),
    ),
)
