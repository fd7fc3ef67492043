"""Fallback of the expert exchange: steps that exceed a capacity run again without capacities.

`ExchangeWithFallback` runs a step on the exchange with fixed capacities, and runs it again on
`FallbackExchange` if a capacity was exceeded. Both implement `TokenExchange`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator
from equipoise.hal.errors import ExchangeError
from equipoise.hal.stream import Stream
from equipoise.pipeline.all_to_all.fixed_capacity import FixedCapacityExchange
from equipoise.pipeline.all_to_all.formats import Batch, ExchangeFormat, ReceivedRows, check_rows
from equipoise.pipeline.all_to_all.status import StepFitted, StepOverflowed
from equipoise.pipeline.all_to_all.variable_size import DispatchRoute, VariableSizeExchange


class CombineHandle(Protocol):
    """Handle of a combined batch."""

    def wait(self, stream: Stream) -> Tensor:
        """Make `stream` wait for the results, [n, top_k, ...]."""
        ...

    def release(self, stream: Stream) -> None:
        """Free the buffers; readers of the results were launched on `stream`, or before."""
        ...


class DispatchHandle(Protocol):
    """Handle of a dispatched batch."""

    def wait(self, stream: Stream) -> ReceivedRows:
        """Make `stream` wait for the rows."""
        ...

    def combine(self, rows: Tensor, stream: Stream) -> CombineHandle:
        """Return results, [entries, ...], to the ranks of their tokens."""
        ...


class TokenExchange(Protocol):
    """Sends rows to the ranks of their experts, and results back."""

    def dispatch(self, batch: Batch, stream: Stream) -> DispatchHandle:
        """Send a batch."""
        ...


T = TypeVar("T")


class FallbackExchange:
    """`VariableSizeExchange` with the interface of the exchange with fixed capacities.

    It takes any number of rows. The host reads the counts, and waits for the stream in each method.

    Args:
        form: of the exchange with fixed capacities; the capacities are ignored here.
        communicator: among the active ranks, used by this exchange only.
        accelerator: of all streams.
        deadline: seconds that the host waits for a stream, or for counts.
        active: for each rank of `communicator`, its rank in the other exchange.

    Raises:
        ExchangeError: `active` does not have one rank for each of the communicator's.
    """

    def __init__(
        self,
        form: ExchangeFormat,
        communicator: Communicator,
        accelerator: Accelerator,
        deadline: float,
        active: Sequence[int],
    ) -> None:
        if len(set(active)) != communicator.size or not set(active) <= set(range(form.ranks)):
            raise ExchangeError(
                f"active ranks: expected {communicator.size} of {form.ranks}, got {tuple(active)}"
            )
        self._form = form
        self._communicator = communicator
        self._event = accelerator.event()
        self._deadline = deadline
        self._active = torch.tensor(active).to(accelerator.device)
        self._renumbered = _renumbered(form, active).to(accelerator.device)

    def dispatch(self, batch: Batch, stream: Stream) -> "FallbackDispatchHandle":
        """Send a batch; returns when its rows are being sent.

        Raises:
            ExchangeError: the batch does not fit the format.
            GenerationMismatch: as `VariableSizeExchange.prepare`, as the cause of a `StreamFailed`
                unless the call comes from a program of `stream`.
        """
        batch.check(self._form)
        exchange = VariableSizeExchange(
            self._communicator, self._form.slots_per_rank, stream, self._deadline
        )
        route, rows = self.run(stream, lambda: self._dispatch(exchange, batch))
        return FallbackDispatchHandle(self, exchange, route, rows)

    def run(self, stream: Stream, program: Callable[[], T]) -> T:
        """Run `program` on `stream` and return its result.

        The host waits for it, since the shapes of later tensors depend on counts.
        """
        results: list[T] = []
        stream.launch(lambda: results.append(program()))
        stream.record(self._event)
        self._event.synchronize(self._deadline)
        return results[0]

    @property
    def form(self) -> ExchangeFormat:
        """The format."""
        return self._form

    def wait(self, stream: Stream) -> None:
        """Make `stream` wait for the latest program."""
        stream.wait(self._event)

    def _dispatch(
        self, exchange: VariableSizeExchange, batch: Batch
    ) -> tuple[DispatchRoute, ReceivedRows]:
        last = self._form.num_slots
        slots = batch.slots.long()
        inside = (slots >= 0) & (slots < last)
        renumbered = self._renumbered[torch.where(inside, slots, last)]
        route = exchange.prepare(renumbered, int(batch.generation.item()))
        rows = exchange.dispatch(route, batch.payloads)
        return route, ReceivedRows(
            payloads=tuple(payload[None] for payload in rows),
            entry_rows=torch.arange(sum(route.recv_counts), device=slots.device),
            entry_slots=route.local_slots.int(),
            rows_from_rank=self._by_rank(torch.tensor(route.recv_counts, dtype=torch.int32)),
            loads=self._by_rank(self._gather(batch.loads)),
        )

    def _gather(self, loads: Tensor) -> Tensor:
        out = loads.new_empty((self._communicator.size, *loads.shape))
        self._communicator.all_gather(out, loads).result(self._deadline)
        return out

    def _by_rank(self, by_member: Tensor) -> Tensor:
        """Scatter rows from communicator ranks to exchange ranks; zeros for inactive ranks."""
        out = torch.zeros(self._form.ranks, *by_member.shape[1:], dtype=by_member.dtype)
        out = out.to(self._active.device)
        out[self._active] = by_member.to(out.device)
        return out


class FallbackDispatchHandle:
    """Handle of a dispatched batch."""

    def __init__(
        self,
        owner: FallbackExchange,
        exchange: VariableSizeExchange,
        route: DispatchRoute,
        received: ReceivedRows,
    ) -> None:
        self._owner = owner
        self._exchange = exchange
        self._route = route
        self._arrivals = received

    def wait(self, stream: Stream) -> ReceivedRows:
        """Make `stream` wait for the rows; they have memory of their own, and stay valid."""
        self._owner.wait(stream)
        return self._arrivals

    def combine(self, rows: Tensor, stream: Stream) -> "FallbackCombineHandle":
        """Return results to the ranks of their tokens.

        Raises:
            ExchangeError: `rows` does not fit the format.
        """
        entries = self._arrivals.entry_rows.shape[0]
        check_rows("results", rows, entries, self._owner.form.result)
        exchange, route = self._exchange, self._route
        results = self._owner.run(stream, lambda: exchange.combine(route, rows))
        return FallbackCombineHandle(self._owner, results)


class FallbackCombineHandle:
    """Handle of a combined batch whose results have arrived."""

    def __init__(self, owner: FallbackExchange, results: Tensor) -> None:
        self._owner = owner
        self._results = results

    def wait(self, stream: Stream) -> Tensor:
        """Make `stream` wait for the results, [n, top_k, ...], and return them."""
        self._owner.wait(stream)
        return self._results

    def release(self, stream: Stream) -> None:
        """Do nothing: every batch has memory of its own."""


def _renumbered(form: ExchangeFormat, active: Sequence[int]) -> Tensor:
    """Return int32 [slots + 1], slot ids as numbered by communicator rank; the last is invalid."""
    out = torch.full((form.num_slots + 1,), len(active) * form.slots_per_rank, dtype=torch.int32)
    for member, rank in enumerate(active):
        for local in range(form.slots_per_rank):
            number = member * form.slots_per_rank + local
            out[rank * form.slots_per_rank + local] = number
    return out


@dataclass(frozen=True)
class ExchangeStatistics:
    """Counts of the steps so far.

    Attributes:
        fitted: steps that ran once.
        rerun: steps that ran again, because some rank exceeded a capacity.
        max_rows_over: most rows by which a message exceeded its capacity.
        max_results_over: most results by which one did.
        inactive_rank_hits: choices of this rank that fell on inactive ranks, in steps that ran
            once.
    """

    fitted: int = 0
    rerun: int = 0
    max_rows_over: int = 0
    max_results_over: int = 0
    inactive_rank_hits: int = 0

    def with_step(self, outcome: StepFitted | StepOverflowed) -> "ExchangeStatistics":
        """Return the counts with one more step."""
        match outcome:
            case StepFitted(inactive_rank_hits=hits):
                return ExchangeStatistics(
                    self.fitted + 1,
                    self.rerun,
                    self.max_rows_over,
                    self.max_results_over,
                    self.inactive_rank_hits + hits,
                )
            case StepOverflowed(rows_over=rows, results_over=results):
                maxima = max(self.max_rows_over, rows), max(self.max_results_over, results)
                return ExchangeStatistics(
                    self.fitted, self.rerun + 1, *maxima, self.inactive_rank_hits
                )


class ExchangeWithFallback:
    """Runs whole steps. All ranks get the same type of outcome, so all run a step again or none.

    Args:
        fixed: the exchange with fixed capacities, which reports overflow after the step.
        fallback: takes any number of rows.
        stream: that the status is read on, after the step.
    """

    def __init__(
        self, fixed: FixedCapacityExchange, fallback: TokenExchange, stream: Stream
    ) -> None:
        self._fixed = fixed
        self._fallback = fallback
        self._stream = stream
        self._statistics = ExchangeStatistics()

    @property
    def statistics(self) -> ExchangeStatistics:
        """Counts of the steps so far."""
        return self._statistics

    def run(self, step: Callable[[TokenExchange], T], timeout: float) -> T:
        """Run a step, again if it exceeded a capacity, and return its result.

        Args:
            step: dispatches, combines and releases. It may run twice, so it must be repeatable, and
                nothing that it computes may be used before this returns.
            timeout: seconds that the host waits for the status.

        Raises:
            GenerationMismatch: a rank dispatched with tables of another generation.
            StreamTimeout: the status was not read in time.
        """
        value = step(self._fixed)
        outcome = self._fixed.read_status(self._stream).result(timeout)
        self._statistics = self._statistics.with_step(outcome)
        match outcome:
            case StepFitted():
                return value
            case StepOverflowed():
                return step(self._fallback)
