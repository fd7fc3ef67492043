"""Replaces vLLM's `EplbState`: our balancer, called by the model runner like vLLM's own.

runner                                  here
add_model(model)          collective    register its tensors, open a balancer, boundary 0
prepare_forward(n)        host          number of rows that hold a token
forward                   device        `LayerState.map_and_record`, layer by layer
step(is_dummy)            host          the boundary before the next step
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.eplb.eplb_state import EplbState
from vllm.distributed.parallel_state import get_ep_group, get_pp_group, get_tp_group

from equipoise.balancer.experts.closing import close_all
from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.context import STAGED_FROM_PEERS
from equipoise.balancer.experts.model_balancer import ModelBalancer
from equipoise.balancer.experts.open import LayerGroupContext, ModelStart, open_balancers
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
from equipoise.integrations.vllm.eplb.in_place import HostPools, SlotReads
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
    """Counts rebalances that were not aborted."""

    def emit(self, event: Event) -> None:
        """See `EventSink`."""
        if not isinstance(event, RebalanceMeasured):
            return
        match event.record.outcome:
            case events.COMMITTED:
                COUNTERS.add("rebalances")
                COUNTERS.add("moved_slots", event.record.copies)
            case events.UNCHANGED:
                COUNTERS.add("unchanged_rebalances")

    def close(self) -> None:
        """See `EventSink`."""


class EventSinks:
    """Creates an event sink per layer group, and closes them all.

    Args:
        config: selects the log lines.
        rank: in the expert-parallel group; the first one logs.
        registry: of the metrics; None: no metrics.
    """

    def __init__(self, config: BalancerConfig, rank: int, registry: Any | None = None) -> None:
        self._config = config
        self._rank = rank
        self._registry = registry
        self._async_sinks: list[AsyncEventSink] = []

    def __call__(self, context: LayerGroupContext) -> EventSink:
        """Return the sink of one layer group."""
        name = f"{self._config.name}.{context.group_number}"
        metric_sinks = () if self._registry is None else (PrometheusSink(self._registry, name),)
        lines = log_sinks(self._config, self._rank)
        self._async_sinks.append(AsyncEventSink((*lines, *metric_sinks, RebalanceCounter())))
        return self._async_sinks[-1]

    def close(self) -> None:
        """Write pending events and close the sinks; bounded."""
        for sink in self._async_sinks:
            sink.close()


class LayerCoverage(StrEnum):
    """Which layers have to ask for slots in a forward pass."""

    EVERY_LAYER = "every layer"
    SOME_LAYER = "some layer"
    """A draft model may skip layers for tokens that are not drafted."""


@dataclass(frozen=True)
class BalancedModel:
    """A balanced model.

    Attributes:
        balancer: of the model.
        event_sinks: report its rebalances.
        unpadded_rows: int32 scalars on the device, one per micro-batch: rows that hold a token.
        step_counter: has the step number.
        counts_before_step: load counters before this step, int32 [layers, experts] per layer group.
        streams: the engine's streams.
        coverage: layers that have to ask for slots in every forward pass with tokens.
        slot_reads: holds the lock of the layer that is read, with `commit` `in_place`.
        host_pools: of the experts in the host's memory, with `commit` `in_place`.
        routers: by layer.
    """

    balancer: ModelBalancer
    event_sinks: EventSinks
    unpadded_rows: Sequence[Tensor]
    step_counter: StepCounter
    counts_before_step: Sequence[Tensor]
    streams: EngineStreams
    coverage: LayerCoverage
    slot_reads: SlotReads | None = None
    host_pools: HostPools | None = None
    routers: list[PhysicalExpertRouter] = field(default_factory=list)

    def set_unpadded_rows(self, counts: Sequence[int]) -> None:
        """Set the number of rows with a token in the next forward pass, by micro-batch."""
        self.step_counter.announced_forwards += 1
        for tensor, count in zip(self.unpadded_rows, counts, strict=False):
            tensor.fill_(count)

    def count_all_rows(self) -> None:
        """Count every row: the number of rows with a token is unknown."""
        for tensor in self.unpadded_rows:
            tensor.fill_(ALL_ROWS)

    def install_routers(self, model: Any) -> None:
        """Make the model's layers ask this balancer for slots."""
        indices = PrecomputedIndices(model.num_physical_experts, self.unpadded_rows[0].device)
        for number, layer in enumerate(model.moe_layers):
            layer.eplb_state.num_unpadded_tokens_tensors = self.unpadded_rows
            self.routers.append(self._router(number, indices))
            layer.router.eplb_state = LayerState(self.routers[-1], layer.eplb_state)

    def _router(self, number: int, indices: PrecomputedIndices) -> PhysicalExpertRouter:
        router = self.balancer.router(number)
        if self.slot_reads is None:
            return PhysicalExpertRouter(router, self.step_counter, self.streams, indices)
        begin_reading = partial(self.slot_reads.enter, number)
        return PhysicalExpertRouter(router, self.step_counter, self.streams, indices, begin_reading)

    def end_step(self) -> None:
        """Go on to the next step: a forward pass was launched. Within an ordered section."""
        self.step_counter.step += 1
        if self.slot_reads is None:
            self.begin_step()
        else:
            self.slot_reads.end_step(self.begin_step)

    def begin_step(self) -> None:
        """Run the boundary before the next step, and save the load counters."""
        self.balancer.before_step(self.step_counter.step)
        for saved, counters in zip(self.counts_before_step, self.balancer.counters, strict=True):
            self.streams.compute_stream.launch(partial(saved.copy_, counters))

    def verify_routed(self) -> bool:
        """Return True once a forward pass with tokens has run and its layers have asked for slots.

        Raises `IntegrationError` if layers have not: they would use tables that are never updated.
        """
        if not self.step_counter.announced_forwards:
            return False
        uncalled = [number for number, router in enumerate(self.routers) if not router.was_called]
        allowed = 0 if self.coverage is LayerCoverage.EVERY_LAYER else max(0, len(self.routers) - 1)
        if len(uncalled) > allowed:
            raise IntegrationError(
                f"layers {uncalled} of {len(self.routers)} have run a forward pass without "
                "asking for slots: they bypass the router that vLLM's EPLB maps experts in"
            )
        return True

    def discard_step(self) -> None:
        """Restore the load counters: the launched step had no real tokens."""
        for saved, counters in zip(self.counts_before_step, self.balancer.counters, strict=True):
            self.streams.compute_stream.launch(partial(counters.copy_, saved))

    def close(self) -> None:
        """Close the balancer and its sinks; bounded."""
        with ExitStack() as ends:
            if self.host_pools is not None:
                ends.callback(self.host_pools.close)
            ends.callback(self.event_sinks.close)
            ends.callback(self.balancer.close)
            if self.slot_reads is not None:
                ends.callback(self.slot_reads.leave_in_order)


def unpadded_row_tensors(micro_batches: int, device: torch.device) -> list[Tensor]:
    """Return int32 scalars per micro-batch; initially every row counts as a token."""
    return [torch.tensor(ALL_ROWS, dtype=torch.int32, device=device) for _ in range(micro_batches)]


class EquipoiseEplbState(EplbState):  # type: ignore[misc]  # vLLM is not installed where types are
    """Our balancer for one worker, in place of vLLM's `EplbState`.

    It derives from that, so that runners find every attribute that they read of a state, also those
    that a later release adds; what they call is all here. A test compares the two.

    Args:
        parallel_config: vLLM's; its `eplb_config` has window and interval, in steps.
        device: the worker's device.
        settings: of `eplb`.
        target: configuration of the target model; other models are drafts.
    """

    def __init__(
        self, parallel_config: Any, device: torch.device, settings: EplbSettings, target: Any
    ):
        super().__init__(parallel_config, device)  # sets fields, and does nothing else
        self.is_async = False
        """vLLM starts no thread of its own: overlapped work runs on our threads."""
        self._settings = settings
        self._target = target
        self._worker_context: WorkerContext | None = None
        self._registry: Any | None = None
        self._exporter: metrics.MetricsServer | None = None
        self.model_states: dict[str, BalancedModel] = {}
        """By hash of the model's configuration, as in vLLM."""
        self._unverified: list[BalancedModel] = []
        """Models whose layers have not been seen asking for slots yet."""
        self._by_config: dict[int, tuple[Any, BalancedModel]] = {}
        """By `id()` of the configuration, which the value keeps alive. Looked up in every forward
        pass; hashing a configuration takes longer than the rest of a step's host work."""

    @torch.inference_mode(False)
    def add_model(self, model: Any, model_config: Any, model_name: str | None = None) -> None:
        """Balance a loaded model; collective over the expert-parallel group.

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
        start = ModelStart(initial_layout(model), config)
        host_pools = (
            HostPools(context, start.layout.placement, experts.name)
            if self._settings.commit == "in_place"
            else None
        )
        with ExitStack() as opened:
            if host_pools is not None:
                opened.callback(host_pools.close)
            opened.callback(event_sinks.close)
            balancers = open_balancers(
                context.accelerator,
                context.fabric,
                ModelSet((experts,)),
                {experts.name: start},
                staging_bytes=staging_budget(self._settings, experts.groups),
                update_path=host_pools or (lambda group: STAGED_FROM_PEERS),
                event_sinks=event_sinks,
            )
            balancer = balancers[experts.name]
            opened.callback(balancer.close)
            balanced = BalancedModel(
                balancer,
                event_sinks,
                unpadded_row_tensors(max(1, self.parallel_config.num_ubatches), self.device),
                StepCounter(),
                [counters.clone() for counters in balancer.counters],
                context.streams,
                LayerCoverage.EVERY_LAYER
                if model_config is self._target
                else LayerCoverage.SOME_LAYER,
                slot_reads=SlotReads(balancer.reading_slots, context.streams)
                if host_pools
                else None,
                host_pools=host_pools,
            )
            balanced.install_routers(model)
            with context.streams.ordered_section():
                balanced.begin_step()
            opened.pop_all()
        self._unverified.append(balanced)
        self.model_states[model_config.compute_hash()] = balanced
        self._by_config[id(model_config)] = model_config, balanced

    def prepare_forward(
        self, model_config: Any, num_unpadded_tokens: int, ubatch_slices: Any = None
    ) -> None:
        """Announce the number of rows with a token in a model's next forward pass."""
        entry = self._by_config.get(id(model_config))
        if entry is None:
            # The configuration object was replaced, so the model is unknown.
            for balanced in self.model_states.values():
                balanced.count_all_rows()
            return
        balanced = entry[1]
        if not balanced.step_counter.announced_forwards:
            with self._connect().streams.ordered_section():
                balanced.discard_step()  # forward passes of the warm-up are not traffic
        balanced.set_unpadded_rows(_rows(num_unpadded_tokens, ubatch_slices))

    @torch.inference_mode(False)
    def step(
        self, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False
    ) -> None:
        """Run the boundary before the next step; a forward pass was launched.

        Args:
            is_dummy: it had no real tokens.
            is_profile: it only measures memory; ours was allocated with the model.
            log_stats: ignored; our log lines read it from the configuration.

        Raises what `ModelBalancer.before_step` raises: a rank that cannot know the outcome of a
        vote has to end. Raises `IntegrationError` if a layer never asks for slots.
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
                balanced.end_step()

    def start_async_loop(self) -> None:
        """Do nothing: our threads have started already."""

    def rearrange(self, *_: Any, **__: Any) -> None:
        """Raise `IntegrationError`: vLLM calls it to scale the group up or down."""
        raise IntegrationError("equipoise does not support elastic expert parallelism")

    update_mapping = rearrange

    def close(self) -> None:
        """Close all balancers, and disconnect from the other ranks; bounded."""
        balanced, self.model_states = list(self.model_states.values()), {}
        self._by_config.clear()
        close_all(balanced)
        if self._exporter is not None:
            self._exporter.close()
        if self._worker_context is not None:
            self._worker_context.close()
            self._worker_context = None

    def _metrics_registry(self, rank: int) -> Any | None:
        """Return the registry of metrics; the first call starts the server."""
        port = self._settings.metrics_port
        if port is None:
            return None
        if self._registry is None:
            metrics.require_prometheus()
            from prometheus_client import CollectorRegistry

            self._registry = CollectorRegistry()
            stage, ranks = get_pp_group().rank_in_group, get_ep_group().world_size
            self._exporter = metrics.serve_metrics(
                self._registry,
                port + stage * ranks + rank,
                self._settings.metrics_address or metrics.LOOPBACK,
            )
        return self._registry

    def _connect(self) -> WorkerContext:
        if self._worker_context is None:
            deadline, communicator = self._settings.timeout, self._settings.communicator
            self._worker_context = open_worker_context(
                get_ep_group(), self.device, deadline, communicator
            )
        return self._worker_context

    def _list_expert_weights(self, model: Any) -> None:
        """Make the model list its expert weights; the tables that it requires for that are
        unused."""
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
    """Return the number of rows with a token, by micro-batch."""
    if ubatch_slices is None:
        return [tokens]
    slices = [each.token_slice for each in ubatch_slices]
    return [
        max(0, min(tokens, tokens_of_batch.stop) - tokens_of_batch.start)
        for tokens_of_batch in slices
    ]
