"""Mutants of family *expert_parallel*: our exchange as a library, with one behaviour broken."""

from collections.abc import Callable, Sequence
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

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric
from equipoise.hal.errors import CapacityExceeded, ExchangeMisuse, GenerationMismatch, StreamFailed
from equipoise.hal.expert_parallel import ReceivedTokens, StepStatus
from equipoise.hal.stream import Event, Stream
from equipoise.pipeline.all_to_all.expert_parallel import (
    ExchangeHandle,
    FixedCapacityGroup,
    FixedCapacityStatus,
    VariableSizeGroup,
)
from equipoise.pipeline.all_to_all.formats import ExchangeFormat, ReceivedRows

Inputs = tuple[Tensor, Tensor, Tensor]
"""Tokens, expert ids and weights of a dispatch."""


class AlteredGroup(FixedCapacityGroup):
    """Our exchange, with places where a mutant changes what goes in and what comes out."""

    def change_inputs(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> Inputs:
        """What is dispatched instead; called on the host."""
        return tokens, expert_ids, weights

    def change_rows(self, rows: Tensor, experts: Tensor, counts: Tensor) -> None:
        """Change what was received, in place; launched."""

    def change_handle(self, handle: ExchangeHandle, inputs: Inputs, stream: Stream) -> object:
        """What stands for the dispatch of these inputs; called on the host."""
        return handle

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        inputs = tokens, expert_ids, weights
        received = super().dispatch(*self.change_inputs(*inputs, stream), stream)
        assert isinstance(received.handle, ExchangeHandle)
        return replace(received, handle=self.change_handle(received.handle, inputs, stream))

    def _list_rows(
        self, received: ReceivedRows, rows: Tensor, experts: Tensor, counts: Tensor
    ) -> None:
        super()._list_rows(received, rows, experts, counts)
        self.change_rows(rows, experts, counts)


def launched(like: Tensor, stream: Stream, compute: Callable[[], Tensor]) -> Tensor:
    """A tensor like another one, which a launch fills."""
    out = torch.empty_like(like)
    stream.launch(lambda: out.copy_(compute()))
    return out


# ----- M1, M2: results and rows -------------------------------------------------------------------


class IgnoresWeights(AlteredGroup):
    """Sums results as if every weight were one."""

    def change_inputs(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> Inputs:
        return tokens, expert_ids, torch.ones_like(weights)


class TakesPositiveWeights(AlteredGroup):
    """Negative weights count as zero."""

    def change_inputs(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> Inputs:
        return tokens, expert_ids, launched(weights, stream, lambda: weights.clamp(min=0))


class Saturates(AlteredGroup):
    """Elements of rows are within the range of float8_e4m3fn."""

    def change_rows(self, rows: Tensor, experts: Tensor, counts: Tensor) -> None:
        rows.clamp_(-448, 448)


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


class SumsThreeChoices(AlteredGroup):
    """The fourth choice is left out of the sum."""

    def change_inputs(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> Inputs:
        first = torch.arange(weights.shape[1], device=weights.device) < 3
        return tokens, expert_ids, launched(weights, stream, lambda: weights * first)


class SwapsLocalExperts(AlteredGroup):
    """Rows of a rank's last two experts are taken for each other's."""

    def change_rows(self, rows: Tensor, experts: Tensor, counts: Tensor) -> None:
        last = self._form.slots_per_rank - 1
        if last > 0:
            swapped = torch.where(experts == last, last - 1, experts)
            experts.copy_(torch.where(experts == last - 1, last, swapped))


class RepeatsFirstRow(AlteredGroup):
    """Every row of a rank that received more than three is its first one."""

    def change_rows(self, rows: Tensor, experts: Tensor, counts: Tensor) -> None:
        used = (experts >= 0).nonzero().view(-1)
        if used.numel() > 3:
            rows[used[3:]] = rows[used[0]].clone()


class SendsWholeBlocks(AlteredGroup):
    """Columns after the last whole block of 128 are lost."""

    def change_rows(self, rows: Tensor, experts: Tensor, counts: Tensor) -> None:
        whole = rows.shape[1] // 128 * 128
        if whole:
            rows[:, whole:] = 0


class HasIdsOfOneByte(AlteredGroup):
    """Expert ids are taken modulo 256."""

    def change_inputs(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> Inputs:
        return tokens, launched(expert_ids, stream, lambda: expert_ids % 256), weights


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
        kept = handle.weights
        places = torch.arange(kept.shape[0], device=kept.device) % 64
        weights = launched(kept, stream, lambda: kept[places])
        return super().combine(outputs, replace(handle, weights=weights), stream)


# ----- M3, M4, M5: loads, choices and counts ------------------------------------------------------


class SharesRoomEvenly(AlteredGroup):
    """An expert has room for three quarters of all tokens; the rows after them are dropped."""

    def change_rows(self, rows: Tensor, experts: Tensor, counts: Tensor) -> None:
        room = max(2, self._form.ranks * self._form.max_tokens * 3 // 4)
        for local in range(self._form.slots_per_rank):
            own = (experts == local).nonzero().view(-1)
            experts[own[room:]] = -1


class PadsWithExpertZero(AlteredGroup):
    """A choice of -1 is sent to expert 0, with its weight."""

    def change_inputs(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> Inputs:
        return tokens, launched(expert_ids, stream, lambda: expert_ids.clamp(min=0)), weights


class CountsRepetitionOnce(AlteredGroup):
    """An expert that a token repeats in its next choice gets its row once."""

    def change_inputs(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> Inputs:
        return tokens, launched(expert_ids, stream, lambda: self._once(expert_ids)), weights

    def _once(self, expert_ids: Tensor) -> Tensor:
        ids = expert_ids.clone()
        repeated = expert_ids[:, 1:] == expert_ids[:, :-1]
        ids[:, 1:] = torch.where(repeated, -1, expert_ids[:, 1:])
        return ids


class CountsUnusedRows(AlteredGroup):
    """Unused rows are counted for the last local expert."""

    def change_rows(self, rows: Tensor, experts: Tensor, counts: Tensor) -> None:
        counts[-1] += (experts < 0).sum()


class TellsPrefixSums(AlteredGroup):
    """Counts are added up over the local experts."""

    def change_rows(self, rows: Tensor, experts: Tensor, counts: Tensor) -> None:
        counts.copy_(counts.cumsum(0))


# ----- M6, M7: what is passed ---------------------------------------------------------------------


class LocalisesIdsInPlace(AlteredGroup):
    """Leaves local ids in the caller's tensor."""

    def change_handle(self, handle: ExchangeHandle, inputs: Inputs, stream: Stream) -> object:
        stream.launch(lambda: inputs[1].remainder_(self._form.slots_per_rank))
        return handle


class PadsTokensInPlace(AlteredGroup):
    """Clears the memory after the tokens, up to a multiple of 64 bytes."""

    def change_inputs(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> Inputs:
        begin = tokens.storage_offset() + tokens.numel()
        end = tokens.untyped_storage().nbytes() // tokens.dtype.itemsize
        extra = min(-tokens.numel() % 64, end - begin)
        padding = torch.as_strided(tokens, (extra,), (1,), begin)
        stream.launch(padding.zero_)
        return tokens, expert_ids, weights


class WritesBesideOutputs(FixedCapacityGroup):
    """Leaves a flag in front of the experts' outputs."""

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        if outputs.storage_offset() > 0:
            flag = torch.as_strided(outputs, (1,), (1,), outputs.storage_offset() - 1)
            stream.launch(flag.zero_)
        return super().combine(outputs, handle, stream)


class ClearsOutputs(FixedCapacityGroup):
    """The experts' outputs are cleared after they were sent."""

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        result = super().combine(outputs, handle, stream)
        stream.launch(outputs.zero_)
        return result


class KeepsWeightsOfCaller(AlteredGroup):
    """Combines with the caller's own tensor of weights."""

    def change_handle(self, handle: ExchangeHandle, inputs: Inputs, stream: Stream) -> object:
        return replace(handle, weights=inputs[2])


class ReadsIdsAgain(AlteredGroup):
    """Combines by the ids that the caller's tensor holds by then."""

    def change_handle(self, handle: ExchangeHandle, inputs: Inputs, stream: Stream) -> object:
        self._ids = {**getattr(self, "_ids", {}), id(handle): inputs[1]}
        return handle

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        assert isinstance(handle, ExchangeHandle)
        ids, kept = self._ids.pop(id(handle), None), handle.weights
        if ids is None:
            return super().combine(outputs, handle, stream)
        weights = launched(kept, stream, lambda: kept * (ids < self._form.num_slots).float())
        return super().combine(outputs, replace(handle, weights=weights), stream)


# ----- M8, M9: handles ----------------------------------------------------------------------------


class CombinesNewest(AlteredGroup):
    """A handle that has ended stands for the dispatch that came last."""

    def change_handle(self, handle: ExchangeHandle, inputs: Inputs, stream: Stream) -> object:
        self._newest = handle
        return handle

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


class HasOneBufferForWeights(AlteredGroup):
    """All dispatches in flight have their weights in one buffer."""

    def change_handle(self, handle: ExchangeHandle, inputs: Inputs, stream: Stream) -> object:
        shape = (self._form.max_tokens, self._form.top_k)
        buffer: Tensor = vars(self).setdefault("_buffer", inputs[2].new_empty(shape))
        kept = buffer[: inputs[2].shape[0]]
        stream.launch(partial(kept.copy_, inputs[2]))
        return replace(handle, weights=kept)


class HasOneBufferForRows(FixedCapacityGroup):
    """All dispatches in flight hand out their rows in one buffer."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        received = super().dispatch(tokens, expert_ids, weights, stream)
        buffer: Tensor = vars(self).setdefault("_rows", torch.empty_like(received.rows))
        stream.launch(partial(buffer.copy_, received.rows))
        return replace(received, rows=buffer)


class HasOneBufferForResults(FixedCapacityGroup):
    """All results are handed out in one buffer."""

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        result = super().combine(outputs, handle, stream)
        shape = (self._form.max_tokens, *result.shape[1:])
        buffer: Tensor = vars(self).setdefault("_results", result.new_empty(shape))
        stream.launch(partial(buffer[: len(result)].copy_, result))
        return buffer[: len(result)]


class CombinesOldest(AlteredGroup):
    """Of the dispatches that are open, the oldest one is combined."""

    def change_handle(self, handle: ExchangeHandle, inputs: Inputs, stream: Stream) -> object:
        vars(self).setdefault("_open", []).append(handle)
        return handle

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        opened: list[object] = vars(self).setdefault("_open", [])
        if handle not in opened:
            return super().combine(outputs, handle, stream)
        return super().combine(outputs, opened.pop(0), stream)


# ----- M10: masks ---------------------------------------------------------------------------------


class ScalesUpForLost(AlteredGroup):
    """The weights of the choices that are left make up for those on lost ranks."""

    def set_active(self, ranks: Sequence[int]) -> None:
        super().set_active(ranks)
        self._scale = self._form.ranks / len(ranks)

    def change_inputs(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> Inputs:
        scale = getattr(self, "_scale", 1.0)
        return tokens, expert_ids, launched(weights, stream, lambda: weights * scale)


class SendsOwnForLost(AlteredGroup):
    """Choices on lost ranks are computed by this rank's first expert."""

    def set_active(self, ranks: Sequence[int]) -> None:
        super().set_active(ranks)
        self._present = list(ranks)

    def change_inputs(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> Inputs:
        return tokens, launched(expert_ids, stream, lambda: self._redirect(expert_ids)), weights

    def _redirect(self, expert_ids: Tensor) -> Tensor:
        per_rank = self._form.slots_per_rank
        present = torch.tensor(getattr(self, "_present", list(range(self._form.ranks))))
        homes = torch.div(expert_ids, per_rank, rounding_mode="floor")
        own = self._communicator.rank * per_rank
        return torch.where(torch.isin(homes, present) | (expert_ids < 0), expert_ids, own)


# ----- M11: graphs --------------------------------------------------------------------------------


class CapturesChoices(AlteredGroup, LoneGroup):
    """Choices are read by the host at the call, and so captured with the graph."""

    def change_inputs(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> Inputs:
        return tokens, expert_ids.clone(), weights


class CapturesWeights(AlteredGroup, LoneGroup):
    """Weights are read at the call."""

    def change_inputs(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> Inputs:
        return tokens, expert_ids, weights.clone()


# ----- M12, M13: what does not fit ----------------------------------------------------------------


class TruncatesBatch(AlteredGroup):
    """Tokens after the most that a batch may have are left out."""

    def change_inputs(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> Inputs:
        most = self._form.max_tokens
        return tokens[:most], expert_ids[:most], weights[:most]


class CountsRefusedBatches(AlteredGroup):
    """The number of the batch, which peers compare, is counted before the batch is checked."""

    def change_inputs(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> Inputs:
        self._generation = self._generation + 1
        return tokens, expert_ids, weights


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


class KeepsBatches(AlteredGroup):
    """Keeps the weights of every dispatch."""

    def change_handle(self, handle: ExchangeHandle, inputs: Inputs, stream: Stream) -> object:
        vars(self).setdefault("_batches", []).append(inputs[2])
        return handle


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


# ----- M14, M17: late ranks, and the form of what is returned -------------------------------------


class GivesUpEarly(VariableSizeGroup):
    """Waits for its peers for a tenth of the deadline."""

    def __init__(
        self,
        form: ExchangeFormat,
        accelerator: Accelerator,
        fabric: Fabric,
        purpose: str,
        deadline: float,
    ) -> None:
        super().__init__(form, accelerator, fabric, purpose, deadline / 10)


class TellsOneCountTooMany(FixedCapacityGroup):
    """A rank with several experts has one count more than experts."""

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        received = super().dispatch(tokens, expert_ids, weights, stream)
        if self._form.slots_per_rank == 1:
            return received
        counts = received.experts.new_zeros(self._form.slots_per_rank + 1)
        return replace(received, counts=counts)


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
    "a-late-rank-is-waited-for",
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
        name="negative-weights-count-as-zero",
        clause="M1",
        broken="A negative weight is taken for zero.",
        property="real-numbers-keep-the-declared-precision",
        subject=_fixed(TakesPositiveWeights),
    ),
    Mutant(
        name="rows-saturate",
        clause="M1",
        broken="Elements beyond the range of float8_e4m3fn are cut to it, though rows are exact.",
        property="real-numbers-keep-the-declared-precision",
        subject=_fixed(Saturates),
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
        name="columns-after-whole-blocks-are-lost",
        clause="M2",
        broken="Columns after the last whole block of 128 arrive as zero.",
        property="many-tokens-arrive-at-many-experts",
        subject=_fixed(SendsWholeBlocks),
    ),
    Mutant(
        name="expert-ids-have-one-byte",
        clause="M2",
        broken="Expert ids are taken modulo 256.",
        property="many-tokens-arrive-at-many-experts",
        subject=_fixed(HasIdsOfOneByte),
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
        name="outputs-are-cleared",
        clause="M6",
        broken="The experts' outputs are cleared by the combine.",
        property="what-is-passed-is-only-read",
        subject=_fixed(ClearsOutputs),
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
        name="dispatches-share-a-buffer-of-rows",
        clause="M9",
        broken="The rows of a second dispatch overwrite those of the first before its combine.",
        property="dispatches-in-flight-do-not-mix",
        subject=_fixed(HasOneBufferForRows),
    ),
    Mutant(
        name="combines-share-a-buffer-of-results",
        clause="M9",
        broken="A second combine overwrites the result of the first.",
        property="dispatches-in-flight-do-not-mix",
        subject=_fixed(HasOneBufferForResults),
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
        name="a-late-rank-is-given-up",
        clause="M14",
        broken="Peers are waited for a tenth of the deadline.",
        property="a-late-rank-is-waited-for",
        subject=gloo_library_with(VariableLibrary(group=GivesUpEarly)),
        real=True,
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
    Mutant(
        name="a-count-too-many-is-told",
        clause="M17",
        broken="A rank of several experts is told a count more than it has experts.",
        property="a-group-has-the-methods-of-its-protocol",
        subject=_fixed(TellsOneCountTooMany),
        # Every ordinary step reads counts.
        also=(
            *RESULTS,
            "a-rank-that-stays-away-is-told",
        ),
    ),
)
