"""The expert-parallel layer of the demo: route, dispatch, compute, combine."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from equipoise.balancer.experts.routing.routers import Router
from equipoise.balancer.experts.weights.expert_weights import LayerGroup
from equipoise.balancer.experts.weights.registry import ModelRegistry
from equipoise.demo.carriers import Carrier
from equipoise.demo.model import (
    HOST,
    ModelConfig,
    combine_in_order,
    expert_rows,
)


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

    def family(self) -> LayerGroup:
        """All slots: every layer has the same descriptor."""
        registry = ModelRegistry("demo", self.down.shape[1], self._experts)
        for layer, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            registry.register(layer, gate_up=gate_up, down=down)
        model = registry.finalize([("gate_up", self.gate_up), ("down", self.down)])
        (family,) = model.groups
        return family


Reading = Callable[[int, int], AbstractContextManager[None]]


class Clock(Protocol):
    """Says which forward is being computed."""

    turn: int


class ExpertParallel:
    """A `MoeLayer` whose experts live on all ranks.

    Args:
        router: chooses a slot for every (token, k).
        generation: of a layer's routing tables.
        carrier: takes rows to their experts and back.
        weights: of this rank's slots.
        clock: enters the routing hash.
        reading: around what reads the slots of (layer, step).
        received: called with (layer, rows computed here).
    """

    def __init__(
        self,
        router: Router,
        generation: Callable[[int], int],
        carrier: Carrier,
        weights: SlotWeights,
        clock: Clock,
        reading: Reading,
        received: Callable[[int, int], None],
    ) -> None:
        self._router = router
        self._generation = generation
        self._carrier = carrier
        self._weights = weights
        self._clock = clock
        self._reading = reading
        self._received = received

    def __call__(self, layer: int, x: Tensor, expert_ids: Tensor, gates: Tensor) -> Tensor:
        """See `equipoise.demo.model.MoeLayer`."""
        slots = self._router.route(layer, self._clock.turn, expert_ids)
        compute, generation = partial(self._compute, layer), self._generation(layer)
        return combine_in_order(self._carrier.carry(layer, x, slots, generation, compute), gates)

    def _compute(self, layer: int, rows: Tensor, slots: Tensor) -> Tensor:
        """Each slot's expert on the rows sent to it; those of the slot behind the last are none."""
        by_slot = torch.argsort(slots, stable=True)
        local = self._weights.down.shape[1]
        counts = torch.bincount(slots, minlength=local)[:local].tolist()
        by_slot = by_slot[: sum(counts)]
        self._received(layer, sum(counts))
        with self._reading(layer, self._clock.turn):
            return self._by_slot(layer, rows, by_slot, counts)

    def _by_slot(self, layer: int, rows: Tensor, by_slot: Tensor, counts: list[int]) -> Tensor:
        parts = torch.split(rows[by_slot], counts)
        computed = [
            expert_rows(part, self._weights.gate_up[layer, slot], self._weights.down[layer, slot])
            for slot, part in enumerate(parts)
            if part.shape[0]
        ]
        out = torch.empty_like(rows)
        if computed:
            out[by_slot] = torch.cat(computed)
        return out
