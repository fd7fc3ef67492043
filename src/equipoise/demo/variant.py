"""One variant of a run on one rank: its layout, update path, balancer, and pass over the traffic.

The update path brings weights into slots: from peers through staging, or from one copy in the
host's memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from equipoise.balancer.experts.balancer import (
    NO_REBALANCING,
    ExpertBalancer,
    InPlaceFromHost,
    StagedFromPeers,
    UpdatePathConfig,
    open_balancer,
)
from equipoise.balancer.experts.config import (
    BalancerConfig,
    CommitMode,
    Locality,
    PlannerOptions,
    ShareMode,
)
from equipoise.balancer.experts.engine.states import RebalanceReport
from equipoise.balancer.experts.host_pool.layout import PoolLayout
from equipoise.balancer.experts.host_pool.pool import HostExpertPool, ranks_on_node
from equipoise.balancer.experts.placement import (
    ExpertShape,
    Layout,
    Placement,
    even_shares,
    initial_placement,
)
from equipoise.balancer.experts.planning.planner import plan
from equipoise.balancer.experts.runtime.events import EventSink
from equipoise.balancer.experts.transfer.copy_threads import CopyThreadPool
from equipoise.balancer.experts.transfer.host_writes import (
    CpuWriter,
    HostWeights,
    SlotWriter,
    StreamWriter,
)
from equipoise.balancer.experts.weights.expert_weights import LayerGroup
from equipoise.balancer.observe.trace_buffer import TraceBuffer
from equipoise.demo.expert_parallel import (
    ExpertParallel,
    FixedCapacityDispatcher,
    PortableDispatcher,
    SlotWeights,
    TokenDispatcher,
    fixed_exchange,
)
from equipoise.demo.model import MoeLayer
from equipoise.demo.pipeline_stage import ModelStage, open_stage
from equipoise.demo.run_context import RunContext
from equipoise.demo.run_record import Counts
from equipoise.demo.scheduler import max_rows
from equipoise.demo.serve_loop import PassMeasurements, ServeLoop
from equipoise.demo.settings import (
    ExchangeForm,
    RunSettings,
    VariantName,
    served_variants,
    staging_buffers,
)
from equipoise.hal import registry
from equipoise.hal.communicator import Communicator
from equipoise.hal.slots import SlotStore
from equipoise.pipeline.all_to_all.formats import ExchangeFormat, RowFormat
from equipoise.pipeline.all_to_all.variable_size import VariableSizeExchange


@contextmanager
def open_update_path(
    run_context: RunContext, name: str, group: LayerGroup, store: SlotStore, shape: ExpertShape
) -> Iterator[UpdatePathConfig]:
    """The way that the run asks for, and what it takes as long as it is used; collective.

    Args:
        run_context: where this rank serves.
        name: of what is served; a pool's.
        group: of the slots.
        store: of the slots.
        shape: how many of everything.

    Raises:
        ExpertPoolError: there is no room for a copy of all experts in this machine's memory.
        ControlError: a rank did not come.
    """
    if run_context.settings.commit is CommitMode.STAGED:
        yield StagedFromPeers()
        return
    pool = _pool(run_context, name, group, shape)
    # The ranks of a machine share its cores, and so do their copy threads.
    with CopyThreadPool.near_accelerator(
        run_context.accelerator.topology(), accelerators=len(pool.ranks)
    ) as copy_pool:
        supply = HostWeights(pool, _writer(run_context, copy_pool, store))
        yield InPlaceFromHost(
            supply, registry.accelerator(run_context.settings.backend).capabilities
        )
    pool.close()


def _writer(run_context: RunContext, copy_pool: CopyThreadPool, store: SlotStore) -> SlotWriter:
    if run_context.accelerator.device.type == "cpu":
        return CpuWriter(copy_pool, store, run_context.serving.deadline)
    return StreamWriter(run_context.accelerator, store)


def _pool(
    run_context: RunContext, name: str, group: LayerGroup, shape: ExpertShape
) -> HostExpertPool:
    """Every expert once in this machine's memory, each written by one of its ranks."""
    control, deadline, weights = (
        run_context.serving.control,
        run_context.serving.deadline,
        run_context.serving.weights,
    )
    ranks = ranks_on_node(control, run_context.accelerator.topology(), name=name, timeout=deadline)
    layout = PoolLayout(group.descriptor, shape.layers, shape.experts)
    pool = HostExpertPool.open(control, ranks, layout, name=name, timeout=deadline)
    for layer, expert in pool.owned_experts():
        parts = {"gate_up": weights.gate_up[layer, expert], "down": weights.down[layer, expert]}
        pool.write(layer, expert, group.sources(parts))
    pool.seal(deadline)
    return pool


OnStep = Callable[[int, Counts, float], None]
"""Told after each step: its number, this rank's (layers, experts) rows, the imbalance last seen."""


@dataclass(frozen=True)
class Variant:
    """One pass over the traffic."""

    name: VariantName
    slots: int

    @property
    def balanced(self) -> bool:
        """Whether an engine runs."""
        return self.name not in (VariantName.UNBALANCED, VariantName.PLACEMENT)


def variants_of_run(settings: RunSettings, experts: int) -> tuple[Variant, ...]:
    """The variants that a run serves, in order; the one that it is about is the last."""
    return tuple(
        Variant(name, experts if name is VariantName.UNBALANCED else settings.slots)
        for name in served_variants(settings)
    )


@dataclass(frozen=True)
class PassWatchers:
    """Callbacks of a pass: after each step, and for each event of the engine."""

    watch: OnStep
    events: EventSink


@dataclass(frozen=True)
class PassResult:
    """What one rank brings home from one pass."""

    meter: PassMeasurements
    finished: dict[int, bytes]
    reports: tuple[RebalanceReport, ...]
    aborts: dict[str, int]
    spans: TraceBuffer


def serve_variant(run_context: RunContext, variant: Variant, watch: OnStep) -> PassResult:
    """Serve the whole traffic one way, under observation; collective."""
    with run_context.observers.observe(balancer_config(run_context, variant)) as observation:
        meter, finished, balancer = _serve(run_context, variant, watch, observation.events)
    reports, aborts = tuple(balancer.engine.reports), dict(balancer.engine.aborts)
    return PassResult(meter, finished, reports, aborts, observation.spans)


def _serve(
    run_context: RunContext, variant: Variant, watch: OnStep, event_sink: EventSink
) -> tuple[PassMeasurements, dict[int, bytes], ExpertBalancer]:
    run_context.serving.control.set_operation(f"the opening of communicators ({variant.name})")
    shape = run_context.shape(variant.slots)
    weights = SlotWeights(
        run_context.serving.weights.config, shape.slots_per_rank, run_context.accelerator.device
    )
    with _open_balancer(run_context, variant, weights, shape, event_sink) as balancer:
        meter, finished = _loop(
            run_context, variant, weights, balancer, PassWatchers(watch, event_sink)
        )
        return meter, finished, balancer


def _loop(
    run_context: RunContext,
    variant: Variant,
    weights: SlotWeights,
    balancer: ExpertBalancer,
    watchers: PassWatchers,
) -> tuple[PassMeasurements, dict[int, bytes]]:
    shape, layers = balancer.shape, run_context.layers
    total = run_context.weights.config.layers
    meter = PassMeasurements.sized(
        run_context.traffic.steps, total, shape.experts, layers.start, run_context.routing
    )
    experts = run_context.stage_fabric.open(f"{variant.name}.experts")
    moe = ExpertParallel(
        balancer.router,
        balancer.serving_state.generation,
        _carrier(run_context, experts, balancer),
        weights,
        meter,
        balancer.reading_slots,
        meter.count_computed,
    )
    finished = _run(run_context, variant.name, moe, meter, balancer, watchers)
    balancer.close()
    experts.close()
    return meter, finished


def _carrier(
    run_context: RunContext, experts: Communicator, balancer: ExpertBalancer
) -> TokenDispatcher:
    """As asked for; of fixed capacity, it has room for the largest batch that any rank can have."""
    compute, deadline = run_context.serving.compute, run_context.serving.deadline
    shape = balancer.shape
    if run_context.settings.exchange is ExchangeForm.PORTABLE:
        return PortableDispatcher(
            VariableSizeExchange(experts, shape.slots_per_rank, compute, deadline),
            balancer.router.dispatch_counts,
        )
    config = run_context.weights.config
    row = RowFormat((config.hidden,), torch.float32)
    form = ExchangeFormat.without_overflow(
        ranks=shape.ranks,
        slots_per_rank=shape.slots_per_rank,
        experts=0,
        max_tokens=max_rows(
            run_context.traffic,
            run_context.grid.data_parallel_size * run_context.settings.forwards_per_step,
        ),
        top_k=config.top_k,
        payloads=[row],
        result=row,
    )
    exchange = fixed_exchange(experts, run_context.accelerator, form, deadline)
    return FixedCapacityDispatcher(exchange, shape.layers, compute, deadline)


def _run(
    run_context: RunContext,
    name: str,
    moe: MoeLayer,
    meter: PassMeasurements,
    balancer: ExpertBalancer,
    watchers: PassWatchers,
) -> dict[int, bytes]:
    """Serve every step; returns the digests of the requests that got their logits here."""

    def watch(step: int) -> None:
        watchers.watch(step, meter.experts[step], balancer.imbalance())
        if (live := run_context.observers.live) is not None:
            live.follow(loop.newest_request, run_context.traffic.new_tokens)

    loop: ServeLoop | ModelStage
    if run_context.grid.data_parallel_only:
        loop = ServeLoop(
            run_context.serving,
            run_context.traffic,
            moe,
            meter,
            balancer.step,
            watch,
            name,
            watchers.events,
        )
        return loop.run().finished
    with open_stage(run_context, name) as stage:
        moe = stage.slice_moe(moe, run_context.serving.compute)
        loop = ModelStage(
            run_context.serving,
            stage,
            run_context.traffic,
            moe,
            meter,
            balancer.step,
            watch,
            name,
            watchers.events,
        )
        return loop.run()


@contextmanager
def _open_balancer(
    run_context: RunContext,
    variant: Variant,
    weights: SlotWeights,
    shape: ExpertShape,
    event_sink: EventSink,
) -> Iterator[ExpertBalancer]:
    """The variant's balancer over freshly filled slots."""
    layout, config = _layout(run_context, variant, shape), balancer_config(run_context, variant)
    staging = staging_buffers(run_context.settings) if variant.balanced else 0
    group = weights.layer_group()
    accelerator, fabric = run_context.accelerator, run_context.stage_fabric
    store = accelerator.slot_store(group.layout(staging))
    first_slot = run_context.serving.rank * shape.slots_per_rank
    _fill(
        run_context,
        store,
        group,
        layout.placement[:, first_slot : first_slot + shape.slots_per_rank],
    )
    update_path = (
        open_update_path(run_context, variant.name, group, store, shape)
        if variant.balanced
        else nullcontext(NO_REBALANCING)
    )
    with update_path as path:
        yield open_balancer(
            accelerator, fabric, store, shape, layout, config, path, event_sink=event_sink
        )


def _layout(run_context: RunContext, variant: Variant, shape: ExpertShape) -> Layout:
    """What is installed at the start of a variant."""
    if variant.name is VariantName.PLACEMENT:
        assert run_context.layout is not None
        first, last = run_context.layers.start, run_context.layers.stop
        return Layout(
            run_context.layout.placement[first:last], run_context.layout.shares[first:last]
        )
    placement = (
        initial_placement(shape)
        if not variant.balanced
        else first_placement(run_context.settings, shape)
    )
    return Layout(placement, even_shares(placement, shape.experts))


def first_placement(settings: RunSettings, shape: ExpertShape) -> Placement:
    """Where experts are before the first plan; what has to be survived, is from the first step on:
    the incremental planner goes on from nothing else."""
    if not settings.survive:
        return initial_placement(shape)
    even = np.ones((shape.layers, shape.experts), dtype=np.int64)
    return plan(
        even,
        slots=shape.slots,
        ranks=shape.ranks,
        nodes=settings.nodes,
        policy="connected",
        survive=settings.survive,
    ).placement


def _fill(
    run_context: RunContext, store: SlotStore, group: LayerGroup, placement: Placement
) -> None:
    """Write experts into this rank's slots; `placement` is the part that is here."""
    model = run_context.serving.weights
    sources = [
        group.sources({"gate_up": model.gate_up[layer, expert], "down": model.down[layer, expert]})
        for layer, row in enumerate(placement.tolist())
        for expert in row
    ]
    store.write(range(len(sources)), sources, run_context.serving.compute)
    run_context.serving.compute.synchronize(run_context.serving.deadline)


def balancer_config(run_context: RunContext, variant: Variant) -> BalancerConfig:
    """As asked for; two sub-windows a window where that is even. The engine counts forwards."""
    settings, forwards_per_step = (
        run_context.settings,
        1 if run_context.grid.data_parallel_only else run_context.settings.forwards_per_step,
    )
    half = settings.window_size // 2
    halves = settings.window_size % 2 == 0 and settings.step_interval % half == 0
    return BalancerConfig(
        name=variant.name,
        shares=ShareMode(variant.name) if variant.balanced else ShareMode.STATIC,
        window_size=settings.window_size * forwards_per_step,
        step_interval=settings.step_interval * forwards_per_step,
        sub_window=(half if halves else 1) * forwards_per_step,
        # The other share modes do not divide a batch.
        locality=settings.locality if variant.name is VariantName.EXACT else Locality.ANY,
        routing_rule=settings.routing_rule,
        planner=PlannerOptions(
            target=settings.target,
            slack=settings.slack,
            survive=settings.survive,
            sigma=settings.sigma,
            headroom=settings.headroom,
        ),
        min_gain=settings.min_gain,
        max_stalled_steps=settings.max_stalled_steps * forwards_per_step,
        slots_per_message=settings.slots_per_message,
        layer_updates_per_iter=settings.layer_updates_per_iter,
        nodes=settings.nodes,
        log_balancedness=settings.log_balancedness,
        log_balancedness_interval=settings.log_balancedness_interval * forwards_per_step,
        timeout=run_context.serving.deadline,
    )
