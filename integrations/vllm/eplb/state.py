"""One model that our engine balances inside vLLM.

What stands where vLLM's runner has its `EplbState`: our engine, called as the runner calls it.

runner                                  here
add_model(model)          collective    register its tensors, open a balancer, boundary 0
prepare_forward(n)        host          how many rows hold a token
forward                   device        `LayerState.map_and_record`, layer by layer
step(is_dummy)            host          the boundary before the next step
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_ep_group, get_pp_group, get_tp_group

from equipoise.balancer.experts.closing import close_all
from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.model_balancer import LayerGroupContext, ModelBalancer
from equipoise.balancer.experts.open import ModelStart, open_balancers
from equipoise.balancer.experts.runtime import events
from equipoise.balancer.experts.runtime.events import Event, EventSink, RebalanceMeasured
from equipoise.balancer.experts.weights.memory_spans import ModelSet
from equipoise.balancer.observe import metrics
from equipoise.balancer.observe.async_sink import AsyncEventSink
from equipoise.balancer.observe.log_lines import log_sinks
from equipoise.balancer.observe.metrics import PrometheusSink
from equipoise.hal.errors import IntegrationError
from equipoise.integrations.vllm.counters import COUNTERS
from equipoise.integrations.vllm.eplb.config import balancer_config, node_count, staging_budget
from equipoise.integrations.vllm.eplb.layer_state import LayerState
from equipoise.integrations.vllm.eplb.model import (
    check_shared_scales,
    expert_model,
    initial_layout,
    ranks_sharing_rows,
    shared_scales,
)
from equipoise.integrations.vllm.eplb.router import (
    PhysicalExpertRouter,
    PrecomputedIndices,
    StepCounter,
)
from equipoise.integrations.vllm.settings import EplbSettings
from equipoise.integrations.vllm.streams import EngineStreams
from equipoise.integrations.vllm.worker_context import WorkerContext, open_worker_context

ALL_ROWS = torch.iinfo(torch.int32).max


class RebalanceCounter:
    """A journal that counts epochs that were not aborted."""

    def emit(self, entry: Event) -> None:
        """See `StatLogger`."""
        if not isinstance(entry, RebalanceMeasured):
            return
        match entry.record.outcome:
            case events.COMMITTED:
                COUNTERS.add("rebalances")
                COUNTERS.add("moved_slots", entry.record.copies)
            case events.UNCHANGED:
                COUNTERS.add("unchanged_rebalances")

    def close(self) -> None:
        """See `StatLogger`."""


class EventSinks:
    """One for each family of layers, all of them closed at the end.

    Args:
        config: says which lines are written.
        rank: of the expert-parallel group; the first one writes.
        registry: where metrics are kept; None where nobody asks for them.
    """

    def __init__(self, config: BalancerConfig, rank: int, registry: Any | None = None) -> None:
        self._config = config
        self._rank = rank
        self._registry = registry
        self._opened: list[AsyncEventSink] = []

    def __call__(self, context: LayerGroupContext) -> EventSink:
        """Of one family."""
        name = f"{self._config.name}.{context.group_number}"
        metric_sinks = () if self._registry is None else (PrometheusSink(self._registry, name),)
        lines = log_sinks(self._config, self._rank)
        self._opened.append(AsyncEventSink((*lines, *metric_sinks, RebalanceCounter())))
        return self._opened[-1]

    def close(self) -> None:
        """Tell what waits; bounded."""
        for sink in self._opened:
            sink.close()


class LayerCoverage(StrEnum):
    """Which layers come for slots in a forward."""

    EVERY_LAYER = "every layer"
    SOME_LAYER = "some layer"
    """A draft may leave layers out that are for later tokens than are drafted."""


@dataclass(frozen=True)
class BalancedModel:
    """A model that is balanced.

    Attributes:
        balancer: of the model.
        event_sinks: tell of its epochs.
        unpadded_rows: int32 scalars on the device, one a micro-batch: rows that hold a token.
        step_counter: its step.
        counts_before_step: what was counted before this step, int32 [layers, experts] a family.
        streams: the engine's.
        coverage: which layers have to, in every forward with tokens.
        routers: what asks for slots, by layer.
    """

    balancer: ModelBalancer
    event_sinks: EventSinks
    unpadded_rows: Sequence[Tensor]
    step_counter: StepCounter
    counts_before_step: Sequence[Tensor]
    streams: EngineStreams
    coverage: LayerCoverage
    routers: list[PhysicalExpertRouter] = field(default_factory=list)

    def set_unpadded_rows(self, counts: Sequence[int]) -> None:
        """The next forward has so many rows with a token, by micro-batch."""
        self.step_counter.announced_forwards += 1
        for tensor, count in zip(self.unpadded_rows, counts, strict=False):
            tensor.fill_(count)

    def count_all_rows(self) -> None:
        """Nobody says how many rows hold a token: every row is taken for one."""
        for tensor in self.unpadded_rows:
            tensor.fill_(ALL_ROWS)

    def install_routers(self, model: Any) -> None:
        """Have the model's layers ask this balancer for slots."""
        indices = PrecomputedIndices(model.num_physical_experts, self.unpadded_rows[0].device)
        for number, layer in enumerate(model.moe_layers):
            layer.eplb_state.num_unpadded_tokens_tensors = self.unpadded_rows
            router = self.balancer.router(number)
            self.routers.append(
                PhysicalExpertRouter(router, self.step_counter, self.streams, indices)
            )
            layer.router.eplb_state = LayerState(self.routers[-1], layer.eplb_state)

    def begin_step(self) -> None:
        """The boundary before the next step."""
        self.balancer.before_step(self.step_counter.step)
        for saved, counters in zip(self.counts_before_step, self.balancer.counters, strict=True):
            self.streams.compute_stream.launch(partial(saved.copy_, counters))

    def verify_routed(self) -> bool:
        """Whether a forward with tokens has come by, and every layer of it for slots.

        Raises `IntegrationError` where one has not: it computes by tables that nobody renews.
        """
        if not self.step_counter.announced_forwards:
            return False
        uncalled = [number for number, router in enumerate(self.routers) if not router.was_called]
        allowed = 0 if self.coverage is LayerCoverage.EVERY_LAYER else max(0, len(self.routers) - 1)
        if len(uncalled) > allowed:
            raise IntegrationError(
                f"layers {uncalled} of {len(self.routers)} have computed a forward without asking for "
                "slots: they route in a way of their own"
            )
        return True

    def discard_step(self) -> None:
        """The step that was launched carried no tokens of anybody: it does not count."""
        for saved, counters in zip(self.counts_before_step, self.balancer.counters, strict=True):
            self.streams.compute_stream.launch(partial(counters.copy_, saved))

    def close(self) -> None:
        """End it; bounded."""
        self.balancer.close()
        self.event_sinks.close()


def unpadded_row_tensors(micro_batches: int, device: torch.device) -> list[Tensor]:
    """int32 scalars; until somebody says otherwise every row holds a token."""
    return [torch.tensor(ALL_ROWS, dtype=torch.int32, device=device) for _ in range(micro_batches)]


class EquipoiseEplbState:
    """Our engine, for one worker.

    Args:
        parallel_config: vLLM's; its `eplb_config` says window and interval, in steps.
        device: the worker's.
        settings: of the part.
        target: configuration of the model that is served; others are drafts.
    """

    is_async = False
    """vLLM need not start anything: what works beside the forward is ours."""

    def __init__(
        self, parallel_config: Any, device: torch.device, settings: EplbSettings, target: Any
    ):
        self.parallel_config = parallel_config
        self.device = device
        self._settings = settings
        self._target = target
        self._worker_context: WorkerContext | None = None
        self._registry: Any | None = None
        self._exporter: metrics.MetricsServer | None = None
        self.model_states: dict[str, BalancedModel] = {}
        """By the hash of the model's configuration, as vLLM has them."""
        self._unverified: list[BalancedModel] = []
        """Models whose layers have still to be seen asking for slots."""
        self._by_config: dict[int, tuple[Any, BalancedModel]] = {}
        """By the id of the configuration, which is kept beside: every forward asks, and to hash one
        takes longer than a step's other work on the host."""

    @torch.inference_mode(False)
    def add_model(self, model: Any, model_config: Any, model_name: str | None = None) -> None:
        """Balance a model that has its weights; collective over the expert-parallel group.

        Raises what `expert_model` and `open_balancers` raise.
        """
        context = self._connect()
        self._list_expert_weights(model)
        number = len(self.model_states)
        experts = expert_model(model, f"model{number}", self.device)
        group = get_ep_group()
        check_shared_scales(shared_scales(model), group.cpu_group)
        rows_shared = ranks_sharing_rows(model, group.world_size, get_tp_group().world_size)
        eplb, nodes = self.parallel_config.eplb_config, node_count(context.node_of_rank)
        config = balancer_config(self._settings, eplb, number, rows_shared, nodes)
        event_sinks = EventSinks(
            config, group.rank_in_group, self._metrics_registry(group.rank_in_group)
        )
        balancers = open_balancers(
            context.accelerator,
            context.fabric,
            ModelSet((experts,)),
            {experts.name: ModelStart(initial_layout(model), config)},
            budget=staging_budget(self._settings, experts.groups),
            journals=event_sinks,
        )
        balancer = balancers[experts.name]
        counts_before = [counters.clone() for counters in balancer.counters]
        unpadded_rows = unpadded_row_tensors(max(1, self.parallel_config.num_ubatches), self.device)
        coverage = (
            LayerCoverage.EVERY_LAYER if model_config is self._target else LayerCoverage.SOME_LAYER
        )
        balanced = BalancedModel(
            balancer,
            event_sinks,
            unpadded_rows,
            StepCounter(),
            counts_before,
            context.streams,
            coverage,
        )
        balanced.install_routers(model)
        with context.streams.ordered_section():
            balanced.begin_step()
        self._unverified.append(balanced)
        self.model_states[model_config.compute_hash()] = balanced
        self._by_config[id(model_config)] = model_config, balanced

    def prepare_forward(
        self, model_config: Any, num_unpadded_tokens: int, ubatch_slices: Any = None
    ) -> None:
        """The next forward of a model has so many rows with a token."""
        known = self._by_config.get(id(model_config))
        if known is None:
            # The configuration was replaced: whose rows these are, nobody says.
            for balanced in self.model_states.values():
                balanced.count_all_rows()
            return
        balanced = known[1]
        if not balanced.step_counter.announced_forwards:
            with self._connect().streams.ordered_section():
                balanced.discard_step()  # what engines warm up with is nobody's traffic
        balanced.set_unpadded_rows(_rows(num_unpadded_tokens, ubatch_slices))

    @torch.inference_mode(False)
    def step(
        self, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False
    ) -> None:
        """A forward was launched: the boundary before the next one.

        Args:
            is_dummy: it carried nobody's tokens.
            is_profile: it only measures memory; ours was taken when the model came.
            log_stats: the configuration says so, and our lines have read it there.

        Raises what `RebalanceEngine.boundary` raises: a rank that cannot know what was agreed ends.
        And `IntegrationError` where a layer never asks for slots.
        """
        if is_profile:
            return
        self._unverified = [
            balanced for balanced in self._unverified if not balanced.verify_routed()
        ]
        with self._connect().streams.ordered_section():
            for balanced in self.model_states.values():
                if is_dummy:
                    balanced.discard_step()
                balanced.step_counter.step += 1
                balanced.begin_step()

    def start_async_loop(self) -> None:
        """Nothing: threads of ours have started."""

    def rearrange(self, *_: Any, **__: Any) -> None:
        """Raises: who asks scales the group up or down."""
        raise IntegrationError("equipoise does not follow elastic expert parallelism")

    def close(self) -> None:
        """End all engines, and part from the other ranks; bounded."""
        balanced, self.model_states = list(self.model_states.values()), {}
        self._by_config.clear()
        close_all(balanced)
        if self._exporter is not None:
            self._exporter.close()
        if self._worker_context is not None:
            self._worker_context.close()
            self._worker_context = None

    def _metrics_registry(self, rank: int) -> Any | None:
        """Where metrics are kept; answers on the port from the first model on."""
        port = self._settings.metrics_port
        if port is None:
            return None
        if self._registry is None:
            metrics.require_prometheus()
            from prometheus_client import CollectorRegistry

            self._registry = CollectorRegistry()
            stage, ranks = get_pp_group().rank_in_group, get_ep_group().world_size
            self._exporter = metrics.serve_metrics(self._registry, port + stage * ranks + rank)
        return self._registry

    def _connect(self) -> WorkerContext:
        if self._worker_context is None:
            deadline, communicator = self._settings.timeout_seconds, self._settings.communicator
            self._worker_context = open_worker_context(
                get_ep_group(), self.device, deadline, communicator
            )
        return self._worker_context

    def _list_expert_weights(self, model: Any) -> None:
        """Have the model list what moves; it takes tables for that, which nobody reads here."""
        layers, slots = len(model.moe_layers), model.num_physical_experts
        counts = torch.zeros(layers, slots, dtype=torch.int32, device=self.device)
        unused = torch.full((layers, model.num_logical_experts, 1), -1, device=self.device)
        model.set_eplb_state(counts, unused, unused[..., 0])
        enabled = torch.zeros((), dtype=torch.bool, device=self.device)
        for layer in model.moe_layers:
            if layer.eplb_state is None:
                raise IntegrationError(f"a layer takes no state of a balancer: {layer}")
            layer.eplb_state.should_record_tensor = enabled


def _rows(tokens: int, ubatch_slices: Any) -> list[int]:
    """Rows with a token by micro-batch."""
    if ubatch_slices is None:
        return [tokens]
    slices = [each.token_slice for each in ubatch_slices]
    return [
        max(0, min(tokens, tokens_of_batch.stop) - tokens_of_batch.start)
        for tokens_of_batch in slices
    ]
