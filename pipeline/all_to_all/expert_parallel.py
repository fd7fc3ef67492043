"""The expert exchange as an expert-parallel library, in both of its forms.

An engine uses the exchanges themselves, which leave the sum to it. This adds the weighted sum, and
is what the conformance suite judges.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.capabilities import Available, Probe
from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.errors import CapacityExceeded, ExchangeError, ExchangeMisuse
from equipoise.hal.expert_parallel import (
    ExpertParallelCapabilities,
    ExpertParallelConfig,
    ExpertParallelGroup,
    ReceivedTokens,
    StepStatus,
    wait_checked,
)
from equipoise.hal.stream import Stream
from equipoise.pipeline.all_to_all.fallback import DispatchHandle, FallbackExchange, TokenExchange
from equipoise.pipeline.all_to_all.fixed_capacity import FixedCapacityExchange
from equipoise.pipeline.all_to_all.formats import (
    Batch,
    ExchangeFormat,
    ReceivedRows,
    RowFormat,
    check_rows,
)
from equipoise.pipeline.all_to_all.status import StatusReadback, StepOverflowed
from equipoise.pipeline.all_to_all.torch_kernels import (
    NUM_BUFFER_SETS,
    TorchKernels,
    device_allocator,
)
from equipoise.pipeline.all_to_all.transport import (
    ActiveRanksTransport,
    AllRanksTransport,
    AllToAllTransport,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class ExchangeHandle:
    """What a combine needs of its dispatch.

    Attributes:
        dispatched: handle of the exchange.
        weights: float32 [n, top_k], a copy that the caller cannot overwrite.
    """

    dispatched: DispatchHandle
    weights: Tensor


class ExchangeGroup(ExpertParallelGroup):
    """Dispatch and combine over a `TokenExchange`.

    Args:
        form: of the exchange.
        accelerator: of all streams.
        exchange: sends the rows.
        communicator: that the exchange uses; closed with the group.
        deadline: seconds that the host waits for a stream, or for counts.
    """

    def __init__(
        self,
        form: ExchangeFormat,
        accelerator: Accelerator,
        exchange: TokenExchange,
        communicator: Communicator,
        deadline: float,
    ) -> None:
        super().__init__(accelerator, deadline)
        self._form = form
        self._exchange = exchange
        self._communicator = communicator
        self._loads = torch.zeros(0, dtype=torch.int32).to(accelerator.device)
        self.set_generation(0)

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        """Send each token's row to the ranks of its experts.

        Raises:
            ExchangeError: an argument does not fit the configuration.
            ExchangeMisuse: as many dispatches are open as there are buffer sets.
        """
        form = self._form
        check_rows("weights", weights, expert_ids.shape[0], RowFormat((form.top_k,), torch.float32))
        batch = Batch(expert_ids, (tokens,), self._generation, self._loads)
        dispatched = self._exchange.dispatch(batch, stream)
        received = dispatched.wait(stream)
        entries = received.entry_slots
        with stream.current():  # an allocator then reuses them in the order of the stream
            kept_weights = torch.empty_like(weights)
            rows = tokens.new_empty((entries.shape[0], *form.result.shape))
            experts = torch.empty_like(entries)
            counts = entries.new_empty(form.slots_per_rank)
        stream.launch(partial(kept_weights.copy_, weights))
        stream.launch(partial(self._list_rows, received, rows, experts, counts))
        return ReceivedTokens(rows, experts, counts, ExchangeHandle(dispatched, kept_weights))

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        """Return the results, and sum them in float32 in the order of the choices.

        Raises:
            ExchangeError: `outputs` does not fit the rows of the dispatch.
            ExchangeMisuse: a handle of another group, or one whose buffers were released.
        """
        if not isinstance(handle, ExchangeHandle):
            raise ExchangeMisuse(f"expected the handle of a dispatch, got {handle!r}")
        combined = handle.dispatched.combine(outputs, stream)
        results = combined.wait(stream)
        with stream.current():
            out = outputs.new_empty((handle.weights.shape[0], *self._form.result.shape))
        stream.launch(partial(_sum_by_weight, out, results, handle.weights))
        combined.release(stream)
        return out

    def set_generation(self, generation: int) -> None:
        """The generation that the headers of the next dispatches carry."""
        self._generation = torch.tensor([generation]).to(self._accelerator.device)

    def close(self) -> None:
        """Close the communicator."""
        self._communicator.close()

    def _list_rows(
        self, received: ReceivedRows, rows: Tensor, experts: Tensor, counts: Tensor
    ) -> None:
        slots, invalid = received.entry_slots, self._form.invalid_slot
        rows.copy_(received.gather_payload(0))
        experts.copy_(torch.where(slots == invalid, -1, slots))
        local = torch.arange(invalid, dtype=slots.dtype, device=slots.device)
        counts.copy_((slots[None, :] == local[:, None]).sum(1))


def _sum_by_weight(out: Tensor, results: Tensor, weights: Tensor) -> None:
    """One choice after the other, so that the sum does not depend on the placement."""
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for choice in range(weights.shape[1]):
        total += results[:, choice].float() * weights[:, choice, None]
    out.copy_(total)


class VariableSizeGroup(ExchangeGroup):
    """Dispatch and combine with variable sizes.

    Args:
        form: of the exchange.
        accelerator: of all streams.
        fabric: opens a communicator among the ranks that take part.
        purpose: of the communicators.
        deadline: seconds that the host waits for counts.
    """

    def __init__(
        self,
        form: ExchangeFormat,
        accelerator: Accelerator,
        fabric: Fabric,
        purpose: str,
        deadline: float,
    ) -> None:
        self._fabric = fabric
        self._purpose = purpose
        self._reopenings = 0
        communicator = fabric.open(purpose)
        ranks = range(form.ranks)
        exchange = FallbackExchange(form, communicator, accelerator, deadline, ranks)
        super().__init__(form, accelerator, exchange, communicator, deadline)

    def set_active(self, ranks: Sequence[int]) -> None:
        """Go on over a communicator among `ranks` only.

        Raises:
            CommunicatorFailed: one of them did not arrive by the deadline.
            Unsupported: this rank is not one of them.
        """
        self._reopenings += 1
        before, purpose = self._communicator, f"{self._purpose}/{self._reopenings}"
        self._communicator = self._fabric.open(purpose, ranks)
        self._exchange = FallbackExchange(
            self._form, self._communicator, self._accelerator, self._deadline, ranks
        )
        before.close()


class FixedCapacityGroup(ExchangeGroup):
    """Dispatch and combine over a `FixedCapacityExchange`.

    Args:
        form: of the exchange.
        accelerator: of all streams.
        communicator: of all ranks; closed with the group.
        deadline: seconds that the host waits for a stream, where the communicator needs it.
    """

    def __init__(
        self,
        form: ExchangeFormat,
        accelerator: Accelerator,
        communicator: Communicator,
        deadline: float,
    ) -> None:
        transport = AllRanksTransport(communicator, accelerator, deadline)
        self._fixed = self._make_exchange(form, accelerator, transport)
        super().__init__(form, accelerator, self._fixed, communicator, deadline)

    def finish(self, stream: Stream) -> StepStatus:
        """Launch reading the status of the step."""
        return FixedCapacityStatus(self._fixed.read_status(stream), stream)

    def set_active(self, ranks: Sequence[int]) -> None:
        """Go on with an exchange among `ranks`, over the same communicator.

        Raises:
            ExchangeError: a rank is not in the group, or this rank is not in `ranks`.
        """
        transport = ActiveRanksTransport(
            self._communicator, self._accelerator, self._deadline, ranks
        )
        self._fixed = self._make_exchange(self._form, self._accelerator, transport)
        self._exchange = self._fixed

    def _make_exchange(
        self, form: ExchangeFormat, accelerator: Accelerator, transport: AllToAllTransport
    ) -> FixedCapacityExchange:
        kernels = TorchKernels(form, transport, device_allocator(accelerator.device))
        return FixedCapacityExchange(form, kernels, accelerator)


class FixedCapacityStatus:
    """The status of a step with fixed capacities.

    Args:
        readback: of the exchange's status.
        stream: that it was launched on.
    """

    def __init__(self, readback: StatusReadback, stream: Stream) -> None:
        self._readback = readback
        self._stream = stream

    def ready(self) -> bool:
        """Whether `result` would return at once."""
        return self._readback.ready()

    def result(self, timeout: float) -> None:
        """Wait for the status.

        Raises:
            CapacityExceeded: rows did not fit; on all ranks.
            GenerationMismatch: a rank dispatched with another generation.
            StreamFailed: a call failed.
        """
        match wait_checked(self._readback.result, self._stream, timeout):
            case StepOverflowed(rows_over=rows, results_over=results):
                raise CapacityExceeded(
                    f"the fullest message exceeded its capacity by {rows} rows, {results} results"
                )


@dataclass(frozen=True)
class FixedCapacityLibrary:
    """Our exchange with fixed capacities; the host reads no counts."""

    name: str = "fixed-capacity"

    @property
    def capabilities(self) -> ExpertParallelCapabilities:
        """All but graphs: collectives are not captured."""
        return ExpertParallelCapabilities(
            dtypes=DTYPES,
            accumulation=torch.float32,
            empty_batches=True,
            padding=True,
            repeated_experts=True,
            counts=True,
            checked_batches=True,
            in_flight=NUM_BUFFER_SETS,
            masks=True,
            row_capacity=True,
            deadline=True,
            generations=True,
        )

    def probe(self) -> Probe:
        """Always there."""
        return Available("torch operations over any communicator")

    def open(
        self, config: ExpertParallelConfig, accelerator: Accelerator, fabric: Fabric, purpose: str
    ) -> FixedCapacityGroup:
        """Open a group over a communicator of its own.

        Raises:
            ExchangeError: the experts cannot be divided evenly, or a size is too small.
            CommunicatorFailed: a rank did not arrive by the deadline.
        """
        form = exchange_format(config, fabric.control.size)
        return FixedCapacityGroup(form, accelerator, fabric.open(purpose), config.deadline)


@dataclass(frozen=True)
class VariableSizeLibrary:
    """Our exchange with variable sizes; the host reads the counts of every dispatch."""

    name: str = "variable-size"

    @property
    def capabilities(self) -> ExpertParallelCapabilities:
        """Any number of dispatches may be open; two are judged."""
        return ExpertParallelCapabilities(
            dtypes=DTYPES,
            accumulation=torch.float32,
            empty_batches=True,
            padding=True,
            repeated_experts=True,
            counts=True,
            checked_batches=True,
            in_flight=NUM_BUFFER_SETS,
            masks=True,
            deadline=True,
            generations=True,
        )

    def probe(self) -> Probe:
        """Always there."""
        return Available("uneven all-to-alls over any communicator")

    def open(
        self, config: ExpertParallelConfig, accelerator: Accelerator, fabric: Fabric, purpose: str
    ) -> VariableSizeGroup:
        """Open a group over a communicator of its own; raises as `FixedCapacityLibrary.open`."""
        form = exchange_format(config, fabric.control.size)
        return VariableSizeGroup(form, accelerator, fabric, purpose, config.deadline)


def exchange_format(config: ExpertParallelConfig, ranks: int) -> ExchangeFormat:
    """The format of an exchange among `ranks`; `ExchangeError` for experts that do not divide."""
    if config.experts % ranks:
        raise ExchangeError(f"experts: expected a multiple of {ranks} ranks, got {config.experts}")
    row = RowFormat((config.hidden,), config.dtype)
    form = ExchangeFormat.without_overflow(
        ranks, config.experts // ranks, 0, config.max_tokens, config.top_k, (row,), row
    )
    if config.row_capacity is None:
        return form
    return form.with_capacities(config.row_capacity, config.row_capacity * config.top_k)


FIXED_CAPACITY = FixedCapacityLibrary()
VARIABLE_SIZE = VariableSizeLibrary()
