"""How rows come to the ranks that hold their experts, and back: on either form of the exchange."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator
from equipoise.hal.errors import ExchangeError
from equipoise.hal.stream import Stream
from equipoise.pipeline.exchange import ExpertExchange
from equipoise.pipeline.expert_exchange.batch import Batch
from equipoise.pipeline.expert_exchange.fixed import FixedExchange
from equipoise.pipeline.expert_exchange.format import ExchangeFormat
from equipoise.pipeline.expert_exchange.torch_kernels import TorchKernels, device_memory
from equipoise.pipeline.expert_exchange.wire import WholeGroup
from equipoise.pipeline.expert_exchange.words import Fitted

Compute = Callable[[Tensor, Tensor], Tensor]
"""From rows [m, hidden] and their local slots [m] to results [m, hidden]; what stands in rows of
the slot behind the last one is of no account."""


class Carrier(Protocol):
    """Called by programs of the compute stream."""

    def carry(
        self, layer: int, x: Tensor, slots: Tensor, generation: int, compute: Compute
    ) -> Tensor:
        """Results by token and choice.

        Args:
            layer: the layer's number here.
            x: [n, hidden].
            slots: int32 [n, top_k], global ids.
            generation: of the tables that made them.
            compute: on the rows that come to this rank.

        Returns:
            [n, top_k, hidden].
        """
        ...


class PortableCarrier:
    """See `ExchangeForm.PORTABLE`."""

    def __init__(self, exchange: ExpertExchange) -> None:
        self._exchange = exchange

    def carry(
        self, layer: int, x: Tensor, slots: Tensor, generation: int, compute: Compute
    ) -> Tensor:
        """See `Carrier`."""
        route = self._exchange.prepare(slots, generation)
        (rows,) = self._exchange.dispatch(route, [x])
        return self._exchange.combine(route, compute(rows, route.local_slots))


class FixedCarrier:
    """See `ExchangeForm.FIXED`.

    Args:
        exchange: whose capacity cannot overflow.
        layers: of a forward; behind the last one its words are read.
        stream: whose programs call.
        deadline: seconds that the host waits for the words.
    """

    def __init__(
        self, exchange: FixedExchange, layers: int, stream: Stream, deadline: float
    ) -> None:
        self._exchange = exchange
        self._last = layers - 1
        self._stream = stream
        self._deadline = deadline

    def carry(
        self, layer: int, x: Tensor, slots: Tensor, generation: int, compute: Compute
    ) -> Tensor:
        """See `Carrier`. Raises `GenerationMismatch` behind the last layer."""
        stream = self._stream
        stamp = torch.tensor([generation], dtype=torch.int64).to(x.device)
        none = torch.zeros(0, dtype=torch.int32).to(x.device)
        sent = self._exchange.dispatch(Batch(slots, (x,), stamp, none), stream)
        arrivals = sent.wait(stream)
        back = sent.combine(compute(arrivals.gather(0), arrivals.slots.long()), stream)
        results = back.wait(stream).clone()
        back.release(stream)
        if layer == self._last:
            self._check()
        return results

    def _check(self) -> None:
        verdict = self._exchange.read(self._stream).result(self._deadline)
        if not isinstance(verdict, Fitted):
            raise ExchangeError(f"a capacity that cannot overflow has: {verdict}")


def fixed_exchange(
    communicator: Communicator,
    accelerator: Accelerator,
    form: ExchangeFormat,
    deadline: float,
) -> FixedExchange:
    """By the reference kernels, among all ranks of a communicator that is used for nothing else."""
    wire = WholeGroup(communicator, accelerator, deadline)
    kernels = TorchKernels(form, wire, device_memory(accelerator.device))
    return FixedExchange(form, kernels, accelerator)
