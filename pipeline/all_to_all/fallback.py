"""The verbs that every exchange of this package has, so that a step may run on any of them.

The portable exchange behind the verbs of the fixed one: what a step that did not fit runs on.

Steps on the fast exchange, and again on the sure one where they did not fit.
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
    """A batch whose results were sent."""

    def wait(self, stream: Stream) -> Tensor:
        """Order `stream` behind the results, [n, top_k, ...]."""
        ...

    def release(self, stream: Stream) -> None:
        """All that reads the results has been launched on `stream`, or before."""
        ...


class DispatchHandle(Protocol):
    """A batch whose rows were sent."""

    def wait(self, stream: Stream) -> ReceivedRows:
        """Order `stream` behind the rows."""
        ...

    def combine(self, rows: Tensor, stream: Stream) -> CombineHandle:
        """Send results back, [entries, ...]."""
        ...


class TokenExchange(Protocol):
    """Rows to the ranks that hold their experts, and back."""

    def dispatch(self, batch: Batch, stream: Stream) -> DispatchHandle:
        """Send a batch."""
        ...


T = TypeVar("T")


class FallbackExchange:
    """Any number of rows: the host reads the counts, and waits for the stream at each verb.

    Args:
        form: of the fixed exchange that it stands in for; its capacities do not matter here.
        communicator: among the ranks that take part, used for nothing else.
        accelerator: of all streams.
        deadline: seconds that the host waits for a stream, or for counts.
        active: for each rank of `communicator` its rank in the fixed exchange.

    Raises:
        ExchangeError: not one rank for each of the communicator's.
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
        """Send a batch; returns when its rows are on their way.

        Raises:
            ExchangeError: it does not fit the format.
            GenerationMismatch: as `VariableSizeExchange.prepare`, as the cause of a `StreamFailed`
                unless the call comes from a program of `stream`.
        """
        batch.check(self._form)
        exchange = VariableSizeExchange(
            self._communicator, self._form.slots_per_rank, stream, self._deadline
        )
        route, arrivals = self.run(stream, lambda: self._dispatch(exchange, batch))
        return FallbackDispatchHandle(self, exchange, route, arrivals)

    def run(self, stream: Stream, program: Callable[[], T]) -> T:
        """What a program of `stream` returns. The host waits for it: shapes depend on counts."""
        made: list[T] = []
        stream.launch(lambda: made.append(program()))
        stream.record(self._event)
        self._event.synchronize(self._deadline)
        return made[0]

    @property
    def form(self) -> ExchangeFormat:
        """Of the rows."""
        return self._form

    def wait(self, stream: Stream) -> None:
        """Order `stream` behind the latest verb."""
        stream.wait(self._event)

    def _dispatch(
        self, exchange: VariableSizeExchange, batch: Batch
    ) -> tuple[DispatchRoute, ReceivedRows]:
        last = self._form.num_slots
        slots = batch.slots.long()
        inside = (slots >= 0) & (slots < last)
        numbers = self._renumbered[torch.where(inside, slots, last)]
        route = exchange.prepare(numbers, int(batch.generation.item()))
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

    def _by_rank(self, members: Tensor) -> Tensor:
        """From ranks of the communicator to ranks of the fixed exchange; zeros for the others."""
        out = torch.zeros(self._form.ranks, *members.shape[1:], dtype=members.dtype)
        out = out.to(self._active.device)
        out[self._active] = members.to(out.device)
        return out


class FallbackDispatchHandle:
    """A batch whose rows were sent."""

    def __init__(
        self,
        owner: FallbackExchange,
        exchange: VariableSizeExchange,
        route: DispatchRoute,
        arrivals: ReceivedRows,
    ) -> None:
        self._owner = owner
        self._exchange = exchange
        self._route = route
        self._arrivals = arrivals

    def wait(self, stream: Stream) -> ReceivedRows:
        """Order `stream` behind the rows; nothing but `combine` ends them."""
        self._owner.wait(stream)
        return self._arrivals

    def combine(self, rows: Tensor, stream: Stream) -> "FallbackCombineHandle":
        """Send results back.

        Raises:
            ExchangeError: rows that do not fit the format.
        """
        entries = self._arrivals.entry_rows.shape[0]
        check_rows("results", rows, entries, self._owner.form.result)
        exchange, route = self._exchange, self._route
        found = self._owner.run(stream, lambda: exchange.combine(route, rows))
        return FallbackCombineHandle(self._owner, found)


class FallbackCombineHandle:
    """A batch whose results have come."""

    def __init__(self, owner: FallbackExchange, results: Tensor) -> None:
        self._owner = owner
        self._results = results

    def wait(self, stream: Stream) -> Tensor:
        """[n, top_k, ...], as of the fixed exchange."""
        self._owner.wait(stream)
        return self._results

    def release(self, stream: Stream) -> None:
        """Nothing to give back: every batch has memory of its own."""


def _renumbered(form: ExchangeFormat, active: Sequence[int]) -> Tensor:
    """int32 [slots + 1], slots as the communicator's ranks number them; the last is invalid."""
    out = torch.full((form.num_slots + 1,), len(active) * form.slots_per_rank, dtype=torch.int32)
    for member, rank in enumerate(active):
        for local in range(form.slots_per_rank):
            number = member * form.slots_per_rank + local
            out[rank * form.slots_per_rank + local] = number
    return out


@dataclass(frozen=True)
class ExchangeStatistics:
    """What became of the steps so far.

    Attributes:
        fitted: steps that ran once.
        rerun: steps that ran again, because some rank had more rows than fit.
        max_rows_over: the most rows by which a message exceeded its capacity.
        max_results_over: the most results by which one did.
        inactive_rank_hits: choices of this rank that fell on inactive ranks, in steps that ran once.
    """

    fitted: int = 0
    rerun: int = 0
    max_rows_over: int = 0
    max_results_over: int = 0
    inactive_rank_hits: int = 0

    def with_step(self, verdict: StepFitted | StepOverflowed) -> "ExchangeStatistics":
        """One step more."""
        match verdict:
            case StepFitted(inactive_rank_hits=stray):
                return ExchangeStatistics(
                    self.fitted + 1,
                    self.rerun,
                    self.max_rows_over,
                    self.max_results_over,
                    self.inactive_rank_hits + stray,
                )
            case StepOverflowed(rows_over=rows, results_over=results):
                most = max(self.max_rows_over, rows), max(self.max_results_over, results)
                return ExchangeStatistics(
                    self.fitted, self.rerun + 1, *most, self.inactive_rank_hits
                )


class ExchangeWithFallback:
    """Runs whole steps; all ranks come to the same verdict, so all run again or none does.

    Args:
        fast: has a capacity, and says behind the step whether it was enough.
        sure: carries any number of rows.
        stream: on which the words are read, behind the step.
    """

    def __init__(self, fast: FixedCapacityExchange, sure: TokenExchange, stream: Stream) -> None:
        self._fixed = fast
        self._fallback = sure
        self._stream = stream
        self._statistics = ExchangeStatistics()

    @property
    def statistics(self) -> ExchangeStatistics:
        """What became of the steps so far."""
        return self._statistics

    def run(self, step: Callable[[TokenExchange], T], timeout: float) -> T:
        """One step.

        Args:
            step: dispatches, combines and releases; what else it writes it writes again when it
                runs again. Nothing of it may be used, or shown, before this returns.
            timeout: seconds that the host waits for the words.

        Raises:
            GenerationMismatch: a rank dispatched with tables of another generation.
            StreamTimeout: the words were not read in time.
        """
        value = step(self._fixed)
        verdict = self._fixed.read_status(self._stream).result(timeout)
        self._statistics = self._statistics.with_step(verdict)
        match verdict:
            case StepFitted():
                return value
            case StepOverflowed():
                return step(self._fallback)
