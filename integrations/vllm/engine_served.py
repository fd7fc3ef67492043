"""One model that our engine balances inside vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.model_balancer import ModelBalancer
from equipoise.balancer.experts.open import LayerGroupContext
from equipoise.balancer.experts.runtime import events
from equipoise.balancer.experts.runtime.events import Event, EventSink, RebalanceMeasured
from equipoise.balancer.observe.courier import Courier
from equipoise.balancer.observe.lines import lines_for
from equipoise.balancer.observe.metrics import Metrics
from equipoise.hal.errors import IntegrationError
from equipoise.integrations.vllm.counters import COUNTERS
from equipoise.integrations.vllm.engine_routing import LayerState
from equipoise.integrations.vllm.engine_streams import EngineStreams
from equipoise.integrations.vllm.routed_rows import BatchIndices, Clock, RoutedRows

EVERY_ROW = torch.iinfo(torch.int32).max


class CountedEpochs:
    """A journal that counts epochs that were not aborted."""

    def emit(self, entry: Event) -> None:
        """See `Journal`."""
        if not isinstance(entry, RebalanceMeasured):
            return
        match entry.record.outcome:
            case events.COMMITTED:
                COUNTERS.add("epochs")
                COUNTERS.add("moves", entry.record.copies)
            case events.UNCHANGED:
                COUNTERS.add("unchanged_epochs")

    def close(self) -> None:
        """See `Journal`."""


class Couriers:
    """One for each family of layers, all of them closed at the end.

    Args:
        config: says which lines are written.
        rank: of the expert-parallel group; the first one writes.
        told: where metrics are kept; None where nobody asks for them.
    """

    def __init__(self, config: BalancerConfig, rank: int, told: Any | None = None) -> None:
        self._config = config
        self._rank = rank
        self._told = told
        self._opened: list[Courier] = []

    def __call__(self, berth: LayerGroupContext) -> EventSink:
        """Of one family."""
        name = f"{self._config.name}.{berth.number}"
        kept = () if self._told is None else (Metrics(self._told, name),)
        lines = lines_for(self._config, self._rank)
        self._opened.append(Courier((*lines, *kept, CountedEpochs())))
        return self._opened[-1]

    def close(self) -> None:
        """Tell what waits; bounded."""
        for courier in self._opened:
            courier.close()


class Asks(StrEnum):
    """Which layers come for slots in a forward."""

    EVERY_LAYER = "every layer"
    SOME_LAYER = "some layer"
    """A draft may leave layers out that are for later tokens than are drafted."""


@dataclass(frozen=True)
class Served:
    """A model that is balanced.

    Attributes:
        balancer: of the model.
        couriers: tell of its epochs.
        filled: int32 scalars on the device, one a micro-batch: rows that hold a token.
        clock: its step.
        before: what was counted before this step, int32 [layers, experts] a family.
        streams: the engine's.
        asks: which layers have to, in every forward with tokens.
        layers: what asks for slots, by layer.
    """

    balancer: ModelBalancer
    couriers: Couriers
    filled: Sequence[Tensor]
    clock: Clock
    before: Sequence[Tensor]
    streams: EngineStreams
    asks: Asks
    layers: list[RoutedRows] = field(default_factory=list)

    def fill(self, counts: Sequence[int]) -> None:
        """The next forward has so many rows with a token, by micro-batch."""
        self.clock.announced += 1
        for tensor, count in zip(self.filled, counts, strict=False):
            tensor.fill_(count)

    def fill_all(self) -> None:
        """Nobody says how many rows hold a token: every row is taken for one."""
        for tensor in self.filled:
            tensor.fill_(EVERY_ROW)

    def route(self, model: Any) -> None:
        """Have the model's layers ask this balancer for slots."""
        indices = BatchIndices(model.num_physical_experts, self.filled[0].device)
        for number, layer in enumerate(model.moe_layers):
            layer.eplb_state.num_unpadded_tokens_tensors = self.filled
            router = self.balancer.router(number)
            self.layers.append(RoutedRows(router, self.clock, self.streams, indices))
            layer.router.eplb_state = LayerState(self.layers[-1], layer.eplb_state)

    def open_step(self) -> None:
        """The boundary before the next step."""
        self.balancer.before_step(self.clock.step)
        for kept, counters in zip(self.before, self.balancer.counters, strict=True):
            self.streams.home.launch(partial(kept.copy_, counters))

    def proven(self) -> bool:
        """Whether a forward with tokens has come by, and every layer of it for slots.

        Raises `IntegrationError` where one has not: it computes by tables that nobody renews.
        """
        if not self.clock.announced:
            return False
        silent = [number for number, rows in enumerate(self.layers) if not rows.asked]
        most = 0 if self.asks is Asks.EVERY_LAYER else max(0, len(self.layers) - 1)
        if len(silent) > most:
            raise IntegrationError(
                f"layers {silent} of {len(self.layers)} have computed a forward without asking for "
                "slots: they route in a way of their own"
            )
        return True

    def forget_step(self) -> None:
        """The step that was launched carried no tokens of anybody: it does not count."""
        for kept, counters in zip(self.before, self.balancer.counters, strict=True):
            self.streams.home.launch(partial(counters.copy_, kept))

    def close(self) -> None:
        """End it; bounded."""
        self.balancer.close()
        self.couriers.close()


def unfilled(micro_batches: int, device: torch.device) -> list[Tensor]:
    """int32 scalars; until somebody says otherwise every row holds a token."""
    return [torch.tensor(EVERY_ROW, dtype=torch.int32, device=device) for _ in range(micro_batches)]
