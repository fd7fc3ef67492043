"""The expert-parallel MoE layer of the demo: route rows, dispatch them, compute, combine.

Two dispatchers carry rows to the ranks that hold their experts: over the portable exchange, whose
host reads the counts, and over the exchange of fixed capacity, which a captured graph can replay.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from equipoise.balancer.experts.routing.routers import Router
from equipoise.balancer.experts.weights.expert_weights import LayerGroup
from equipoise.balancer.experts.weights.registry import ModelRegistry
from equipoise.demo.model import (
    HOST,
    ModelConfig,
    MoeLayer,
    combine_in_order,
    expert_rows,
)
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator
from equipoise.hal.errors import ExchangeError
from equipoise.hal.routing import DispatchCounts
from equipoise.hal.stream import Stream
from equipoise.pipeline.all_to_all.fixed_capacity import FixedCapacityExchange
from equipoise.pipeline.all_to_all.formats import Batch, ExchangeFormat
from equipoise.pipeline.all_to_all.status import StepFitted
from equipoise.pipeline.all_to_all.torch_kernels import TorchKernels, device_allocator
from equipoise.pipeline.all_to_all.transport import AllRanksTransport
from equipoise.pipeline.all_to_all.variable_size import VariableSizeExchange

Compute = Callable[[Tensor, Tensor], Tensor]
"""From rows [m, hidden] and their local slots [m] to results [m, hidden]; the contents of rows
of the slot after the last one are ignored."""


class TokenDispatcher(Protocol):
    """Called by programs of the compute stream."""

    def dispatch_and_combine(
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


class PortableDispatcher:
    """See `ExchangeForm.PORTABLE`.

    Args:
        exchange: of the ranks that hold experts.
        counts: what all ranks send by the last pass of a layer's router, if that knows it.
    """

    def __init__(
        self, exchange: VariableSizeExchange, counts: Callable[[int], DispatchCounts | None]
    ) -> None:
        self._exchange = exchange
        self._counts = counts

    def dispatch_and_combine(
        self, layer: int, x: Tensor, slots: Tensor, generation: int, compute: Compute
    ) -> Tensor:
        """See `TokenDispatcher`."""
        route = self._exchange.prepare(slots, generation, self._counts(layer))
        (rows,) = self._exchange.dispatch(route, [x])
        return self._exchange.combine(route, compute(rows, route.local_slots))


class FixedCapacityDispatcher:
    """See `ExchangeForm.FIXED`.

    Args:
        exchange: with a capacity that cannot overflow.
        layers: of a forward; after the last one its words are read.
        stream: that the calls run on.
        deadline: seconds that the host waits for the words.
    """

    def __init__(
        self, exchange: FixedCapacityExchange, layers: int, stream: Stream, deadline: float
    ) -> None:
        self._exchange = exchange
        self._last = layers - 1
        self._stream = stream
        self._deadline = deadline

    def dispatch_and_combine(
        self, layer: int, x: Tensor, slots: Tensor, generation: int, compute: Compute
    ) -> Tensor:
        """See `TokenDispatcher`. Raises `GenerationMismatch` after the last layer."""
        stream = self._stream
        stamp = torch.tensor([generation], dtype=torch.int64).to(x.device)
        none = torch.zeros(0, dtype=torch.int32).to(x.device)
        handle = self._exchange.dispatch(Batch(slots, (x,), stamp, none), stream)
        arrivals = handle.wait(stream)
        back = handle.combine(
            compute(arrivals.gather_payload(0), arrivals.entry_slots.long()), stream
        )
        results = back.wait(stream).clone()
        back.release(stream)
        if layer == self._last:
            self._check()
        return results

    def _check(self) -> None:
        verdict = self._exchange.read_status(self._stream).result(self._deadline)
        if not isinstance(verdict, StepFitted):
            raise ExchangeError(f"a capacity that cannot overflow has: {verdict}")


def fixed_exchange(
    communicator: Communicator,
    accelerator: Accelerator,
    form: ExchangeFormat,
    deadline: float,
) -> FixedCapacityExchange:
    """By the reference kernels, among all ranks of a communicator that is used for nothing else."""
    wire = AllRanksTransport(communicator, accelerator, deadline)
    kernels = TorchKernels(form, wire, device_allocator(accelerator.device))
    return FixedCapacityExchange(form, kernels, accelerator)


class SlotWeights:
    """The expert weights of one rank's slots: what the balancer moves.

    `gate_up` float32 [layers, slots_per_rank, hidden, 2 * width] and `down` float32
    [layers, slots_per_rank, width, hidden]; a slot is one row of each, so all but the first have
    an offset into a shared storage. Zeroed on the host, so that no stream can come before it.
    """

    def __init__(
        self,
        config: ModelConfig,
        slots_per_rank: int,
        device: torch.device = HOST,
    ) -> None:
        self._experts = config.experts
        lead = (config.layers, slots_per_rank)
        self.gate_up = torch.zeros(*lead, config.hidden, 2 * config.expert_width).to(device)
        self.down = torch.zeros(*lead, config.expert_width, config.hidden).to(device)

    def layer_group(self) -> LayerGroup:
        """All slots: every layer has the same descriptor."""
        registry = ModelRegistry("demo", self.down.shape[1], self._experts)
        for layer, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            registry.register(layer, gate_up=gate_up, down=down)
        model = registry.finalize([("gate_up", self.gate_up), ("down", self.down)])
        (group,) = model.groups
        return group


ReadGuard = Callable[[int, int], AbstractContextManager[None]]


class ForwardClock(Protocol):
    """Says which forward is being computed."""

    forward_number: int


class ExpertParallel:
    """A `MoeLayer` with experts on all ranks.

    Args:
        router: chooses a slot for every (token, k).
        generation: of a layer's routing tables.
        dispatcher: takes rows to their experts and back.
        weights: of this rank's slots.
        clock: enters the routing hash.
        reading: around what reads the slots of (layer, step).
        received: called with (layer, rows computed here).
    """

    def __init__(
        self,
        router: Router,
        generation: Callable[[int], int],
        dispatcher: TokenDispatcher,
        weights: SlotWeights,
        clock: ForwardClock,
        reading: ReadGuard,
        received: Callable[[int, int], None],
    ) -> None:
        self._router = router
        self._generation = generation
        self._dispatcher = dispatcher
        self._weights = weights
        self._clock = clock
        self._reading = reading
        self._received = received

    def __call__(self, layer: int, x: Tensor, expert_ids: Tensor, gates: Tensor) -> Tensor:
        """See `equipoise.demo.model.MoeLayer`."""
        slots = self._router.route(layer, self._clock.forward_number, expert_ids)
        compute, generation = partial(self._compute, layer), self._generation(layer)
        return combine_in_order(
            self._dispatcher.dispatch_and_combine(layer, x, slots, generation, compute), gates
        )

    def _compute(self, layer: int, rows: Tensor, slots: Tensor) -> Tensor:
        """Each slot's expert on the rows sent to it; the slot after the last has no expert."""
        by_slot = torch.argsort(slots, stable=True)
        local = self._weights.down.shape[1]
        counts = torch.bincount(slots, minlength=local)[:local].tolist()
        by_slot = by_slot[: sum(counts)]
        self._received(layer, sum(counts))
        with self._reading(layer, self._clock.forward_number):
            return self._by_slot(layer, rows, by_slot, counts)

    def _by_slot(self, layer: int, rows: Tensor, by_slot: Tensor, counts: list[int]) -> Tensor:
        parts = torch.split(rows[by_slot], counts)
        outputs = [
            expert_rows(part, self._weights.gate_up[layer, slot], self._weights.down[layer, slot])
            for slot, part in enumerate(parts)
            if part.shape[0]
        ]
        out = torch.empty_like(rows)
        if outputs:
            out[by_slot] = torch.cat(outputs)
        return out


class SlicedMoe:
    """A `MoeLayer` of which every rank of a group computes a slice of the rows; all get all.

    A row's result does not depend on its company, so it is the same to the bit.

    Args:
        inner: computes a slice.
        communicator: of the ranks that hold the same rows; used for nothing else.
        stream: that the calls run on.
    """

    def __init__(self, inner: MoeLayer, communicator: Communicator, stream: Stream) -> None:
        self._inner = inner
        self._communicator = communicator
        self._stream = stream

    def __call__(self, layer: int, x: Tensor, expert_ids: Tensor, gates: Tensor) -> Tensor:
        """See `MoeLayer`."""
        parts, rows = self._communicator.size, x.shape[0]
        share = -(-rows // parts)
        first = min(self._communicator.rank * share, rows)
        own = slice(first, min(first + share, rows))
        own_output = self._inner(layer, x[own], expert_ids[own], gates[own])
        padded_output = torch.cat(
            (own_output, own_output.new_zeros(share - own_output.shape[0], x.shape[1]))
        )
        every = padded_output.new_empty(parts, share, x.shape[1])
        self._communicator.all_gather(every, padded_output).wait(self._stream)
        return every.flatten(0, 1)[:rows]
