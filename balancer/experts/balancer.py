"""The expert balancer of one rank and one layer group, and `open_balancer`, which builds it."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace

from equipoise.balancer.experts.agreement.key_collector import KeyCollector
from equipoise.balancer.experts.agreement.members import EPGroup
from equipoise.balancer.experts.agreement.same_on_all_ranks import check_same_on_all_ranks
from equipoise.balancer.experts.batch_sampler import BatchSampler
from equipoise.balancer.experts.closing import close_quietly
from equipoise.balancer.experts.config import BalancerConfig, Locality, RoutingRule, ShareMode
from equipoise.balancer.experts.context import (
    NO_REBALANCING,
    STAGED_FROM_PEERS,
    BalancerContext,
    InPlaceFromHost,
    NoRebalancing,
    StagedFromPeers,
    UpdatePathConfig,
)
from equipoise.balancer.experts.engine.engine import EngineContext, RebalanceEngine, UpdatePath
from equipoise.balancer.experts.engine.in_place_path import InPlacePath
from equipoise.balancer.experts.engine.recorder import EventRecorder
from equipoise.balancer.experts.engine.serving_state import ServingState
from equipoise.balancer.experts.engine.share_refresh import LaggedShares, ShareRefresh, StaticShares
from equipoise.balancer.experts.engine.staged_path import StagedPath
from equipoise.balancer.experts.load_window import LoadWindow, WindowSchedule
from equipoise.balancer.experts.placement import SHARE_ONE, ExpertShape, Layout, imbalance
from equipoise.balancer.experts.recovery import (
    check_same_survivors,
    reload_lost_experts,
    rewrite_half_written,
    surviving_config,
    surviving_layout,
)
from equipoise.balancer.experts.routing.levelled import GroupShareRouter, LocalShareRouter
from equipoise.balancer.experts.routing.local_first import LocalFirstRouter
from equipoise.balancer.experts.routing.routers import (
    BlockRoundRobinRouter,
    Router,
    RowHashRouter,
    TableRouter,
)
from equipoise.balancer.experts.runtime.events import NO_EVENTS, EventSink, Track
from equipoise.balancer.experts.runtime.jobs import stream_idle
from equipoise.balancer.experts.runtime.workers import (
    Worker,
    WorkerFactory,
    Workers,
    thread_workers,
)
from equipoise.balancer.experts.startup_check import check_start, start_values
from equipoise.balancer.experts.transfer.layer_locks import UNLOCKED, LayerLocks, StepKind
from equipoise.balancer.experts.transfer.p2p import P2PTransfer
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.errors import EngineError, Unsupported
from equipoise.hal.slots import Reader, SlotStore
from equipoise.hal.stream import Role, Stream

__all__ = [
    "NO_REBALANCING",
    "ExpertBalancer",
    "InPlaceFromHost",
    "StagedFromPeers",
    "UpdatePathConfig",
    "open_balancer",
]


@dataclass(frozen=True, eq=False)
class ExpertBalancer:
    """Routes tokens and rebalances experts on one rank.

    Attributes:
        context: the arguments that it was opened with.
        shape: numbers of layers, experts, slots and ranks.
        serving_state: slots, tables and layout.
        load: the load over all ranks.
        router: routes the rows of a step.
        engine: runs the boundaries.
        locks: locks of layers that are rewritten in place; None on other paths.
        communicators: all communicators that were opened for it.
    """

    context: BalancerContext
    shape: ExpertShape
    serving_state: ServingState
    load: LoadWindow
    router: Router
    engine: RebalanceEngine
    locks: LayerLocks | None
    communicators: tuple[Communicator, ...]

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Returns the context for the launches of `step`, on every rank; raises as its boundary.

        Jobs start after the launch, so that the host is free to launch.
        """
        self.engine.before_step(step)
        try:
            yield
        finally:
            self.engine.after_launch()

    def before_step(self, step: int) -> None:
        """Runs the boundary for loops that cannot tell when they launch; jobs start at once."""
        self.engine.before_step(step)
        self.engine.after_launch()

    def reading_slots(self, layer: int, step: int) -> AbstractContextManager[None]:
        """Returns the context for everything `step` launches that reads slots of `layer`."""
        return UNLOCKED if self.locks is None else self.locks.reading_slots(layer, step)

    def step_kind(self, step: int) -> StepKind:
        """Returns which locks `step` uses, for engines that capture one graph per kind."""
        return StepKind.SKIP if self.locks is None else self.locks.step_kind(step)

    def close(self) -> None:
        """Closes the engine and its communicators.

        Every rank closes after the same step; no rank waits for another. The compute stream is
        waited for first, at most `timeout` seconds, so that the work of its steps is done. Peers
        that are a step behind are not harmed: what has ended here was issued there too. An open
        rebalance is left; its unfinished exchanges fail on their own communicator only.

        A second call does nothing. Afterwards nothing can be routed, a boundary raises
        `EngineError`, and the name must not be used again: the control plane may still hold keys
        under it.

        Raises:
            StreamTimeout: the compute stream did not finish in time.
            StreamError, CommunicatorError: the stream, or the last sum of load, failed. In every
                case all communicators are closed.
        """
        # In reverse: the engine first, which uses the communicators; then the stream, on which some
        # of their operations are launched; then the communicators.
        with ExitStack() as ends:
            for communicator in reversed(self.communicators):
                ends.callback(communicator.close)
            ends.callback(self._wait_for_compute)
            ends.callback(self.engine.close)

    def _wait_for_compute(self) -> None:
        """Waits until the compute stream has finished its operations of the communicators.

        Node and exact shares launch a gather per layer on it, which a program may only issue when
        the stream reaches it: closing the communicator earlier would fail the stream.
        """
        accelerator = self.context.accelerator
        idle = stream_idle(accelerator, accelerator.stream(Role.COMPUTE))
        idle.wait(self.context.config.timeout)

    def reconfigure(self, active_ranks: Sequence[int], step: int) -> "ExpertBalancer":
        """Continues without lost ranks; collective among `active_ranks`. Returns a new balancer.

        This balancer is closed; streams have to be attached to the new one again. Every expert with
        a remaining replica is served from it; one without is reloaded from host memory, in place of
        a replica that is not the last of its expert. Layers that were being rewritten are written
        again. Slots keep their order; the remaining ranks keep ascending order.

        Args:
            active_ranks: control-plane numbers of the remaining ranks.
            step: the next boundary.

        Raises:
            ExpertsLost: names the experts that neither a rank nor host memory has.
            PlacementError: the remaining slots are too few for all experts.
            RanksDiffer: other ranks have another group, step or layout.
            BallotIncomplete: one of `active_ranks` did not take part in time.
        """
        before = self.context.members
        members = before.shrunk_to(active_ranks)
        config = surviving_config(self.context.config, self.shape, before, members)
        context = replace(self.context, members=members, first_step=step, config=config)
        half_written, layout = self.engine.half_written_layers, self.serving_state.layout
        # Quietly: communicators and streams may have failed with the lost ranks, as expected.
        close_quietly([self])
        key = check_same_survivors(context.fabric.control, members, config, layout, step)
        context = replace(context, uncollected=(*self.engine.uncollected, key))
        recovered = surviving_layout(layout, self.shape, before, members)
        reload_lost_experts(context, recovered)
        rewrite_half_written(context, recovered, half_written)
        return build(context, recovered.shape, recovered.layout)

    def imbalance(self) -> float:
        """Returns the imbalance of the last summed sub-window with the installed layout, or nan.

        Mean over layers of max / mean - 1 over ranks, with the shares that the router applies.
        """
        if not self.load.sums:
            return float("nan")
        load, layout = self.load.latest, self.serving_state.layout
        applied = replace(layout, shares=self.router.shares(load, layout, self.shape))
        return float(imbalance(load, applied, self.shape).mean()) / SHARE_ONE

    def attach(self, stream: Stream) -> Reader:
        """Attaches another stream that reads slots or tables, until it is detached or the close.

        Every change waits for what an attached stream has launched, so detach idle streams.
        """
        return self.serving_state.attach(stream)


def open_balancer(  # noqa: PLR0913 - one argument per part
    accelerator: Accelerator,
    fabric: Fabric,
    store: SlotStore,
    shape: ExpertShape,
    layout: Layout,
    config: BalancerConfig,
    path: UpdatePathConfig = STAGED_FROM_PEERS,
    new_worker: WorkerFactory | None = None,
    event_sink: EventSink = NO_EVENTS,
) -> ExpertBalancer:
    """Builds a balancer; collective: it opens one communicator per purpose.

    Args:
        accelerator: this rank's device.
        fabric: this rank's connection to the other ranks.
        store: this rank's slots, which hold `layout`.
        shape: numbers of layers, experts, slots and ranks.
        layout: the layout at the start.
        config: intervals, bounds and share mode.
        path: how weights get into slots; `NO_REBALANCING` to never change them.
        new_worker: makes the workers; threads by default, which emit spans to the event sink.
        event_sink: receives events from threads that must not wait; the caller closes it.

    Raises:
        Unsupported: the accelerator lacks what the path needs.
        EngineError: log lines are configured without an event sink; the store does not have the
            slots of the shape, or no staging although weights come from peers.
        PlacementError: layout and shape do not fit together or to these ranks, or not to the loss
            that plans have to survive.
        RanksDiffer: ranks differ in what they open; nothing is opened on any rank.
        BallotIncomplete: a rank did not take part in time.
    """
    config = _with_share_mode(config, accelerator)
    if config.log_balancedness and event_sink is NO_EVENTS:
        raise EngineError("log_balancedness takes an event sink, and none was given")
    control, start = fabric.control, (store, shape, layout, config, path)
    check_start(*start, control.size)
    values = {f"balancer {config.name!r}": start_values(*start)}
    has_sink = event_sink is not NO_EVENTS
    sinks_by_rank = check_same_on_all_ranks(
        control, f"{config.name}/opened", config.timeout, values, note="watched" if has_sink else ""
    )
    context = BalancerContext(
        accelerator,
        fabric,
        store,
        config,
        path,
        new_worker or thread_workers(config, event_sink),
        EPGroup(tuple(range(control.size)), control.rank),
        events=event_sink,
        loads_watched=any(sinks_by_rank),
    )
    return build(context, shape, layout)


def _with_share_mode(config: BalancerConfig, accelerator: Accelerator) -> BalancerConfig:
    """Chooses the share mode where the configuration leaves it open."""
    if config.shares is not None:
        return config
    on_device = accelerator.kernels.levels_on_device
    return replace(config, shares=ShareMode.LOCAL if on_device else ShareMode.LAGGED)


def build(context: BalancerContext, shape: ExpertShape, layout: Layout) -> ExpertBalancer:
    """Builds the parts of a balancer; collective. On an error, opened parts are closed.

    Raises `Unsupported` if the accelerator lacks what the path needs.
    """
    serving_state = ServingState(context.accelerator, context.store, shape, layout)
    locks = _locks(context, serving_state, shape)
    with ExitStack() as undo:
        loads, *more_communicators = opened = _communicators(context, undo)
        workers = _workers(context, undo)
        sampler = _batch_sampler(context, loads, workers.load, serving_state)
        load = _load_window(context, loads, shape, workers.load, sampler)
        share_refresh = _share_refresh(context, serving_state, load, shape, workers)
        router = _router(context, serving_state, load, more_communicators)
        path = _path(context, serving_state, locks, more_communicators, workers, shape)
        keys = _key_collector(context, workers.vote)
        engine_context = EngineContext(
            context.fabric.control, context.members, context.first_step, keys
        )
        recorder = _recorder(context, shape, router)
        engine = RebalanceEngine(
            serving_state,
            load,
            path,
            share_refresh,
            engine_context,
            context.config,
            workers,
            recorder,
        )
        undo.pop_all()
    parts = serving_state, load, router, engine, locks, tuple(opened)
    return ExpertBalancer(context, shape, *parts)


def _workers(context: BalancerContext, undo: ExitStack) -> Workers:
    def new_worker(kind: Track) -> Worker:
        worker = context.new_worker(kind)
        undo.callback(worker.close)
        return worker

    return Workers.create(new_worker)


def _key_collector(context: BalancerContext, worker: Worker) -> KeyCollector | None:
    """Returns the collector of the lowest member, None on other ranks: one rank deletes keys."""
    members = context.members
    if members.rank_in_group:
        return None
    return KeyCollector(context.fabric.control, members.ranks, worker, context.uncollected)


def _recorder(context: BalancerContext, shape: ExpertShape, router: Router) -> EventRecorder:
    """Returns the recorder of the engine's boundaries."""
    slot_bytes, sub_window = context.store.layout.slot_bytes, context.config.sub_window
    rank = context.members.rank_in_group
    return EventRecorder(context.events, shape, rank, slot_bytes, sub_window, router)


def _communicators(context: BalancerContext, undo: ExitStack) -> list[Communicator]:
    """Opens one communicator per purpose, in the same order on all ranks."""
    purposes = ["loads"]
    if isinstance(context.path, StagedFromPeers):
        purposes.append("moves")
    opened = []
    for purpose in purposes:
        opened.append(context.open(purpose))
        undo.callback(opened[-1].close)
    routing = _routing_communicator(context)
    if routing is not None:
        opened.append(routing)
        undo.callback(routing.close)
    return opened


def check_whole_batches(context: BalancerContext) -> None:
    """Raises `EngineError` where a part of the ranks that route the same rows was lost.

    Ranks of a group count each batch once, by the position of its ranks.
    """
    sharing, ranks = context.config.ranks_sharing_rows, context.members.ranks
    whole = [rank + n for rank in ranks if rank % sharing == 0 for n in range(sharing)]
    if list(ranks) != whole:
        raise EngineError(
            f"shares {context.config.shares} count a batch once, and of {sharing} ranks with the "
            f"same rows some are lost: {ranks} are left"
        )


def _routing_communicator(context: BalancerContext) -> Communicator | None:
    """Opens the communicator that a step's routing uses, if its share mode takes one."""
    if context.config.shares in (ShareMode.NODE, ShareMode.EXACT):
        check_whole_batches(context)
    match context.config.shares:
        case ShareMode.EXACT:
            return context.open("routing")
        case ShareMode.NODE:
            return context.open(f"routing{context.node}", context.ranks_of_node)
    return None


def _locks(
    context: BalancerContext, serving_state: ServingState, shape: ExpertShape
) -> LayerLocks | None:
    """Returns the layer locks of the in-place path, else None. Raises `Unsupported`."""
    path, accelerator = context.path, context.accelerator
    if not isinstance(path, InPlaceFromHost):
        return None
    if not path.capabilities.stream_lock or not path.capabilities.copy_independent_of_launch:
        # Otherwise a copy may wait for a launch that waits for the copy: TensorRT-LLM's first copy
        # engine deadlocked this way.
        raise Unsupported(
            f"{accelerator.name} cannot rewrite layers under a lock: it takes stream_lock and "
            "copy_independent_of_launch"
        )
    timeout, entries = context.config.timeout, path.entries_per_step
    return LayerLocks(accelerator, shape.layers, serving_state.readers, timeout, entries)


def _batch_sampler(
    context: BalancerContext, loads: Communicator, worker: Worker, serving_state: ServingState
) -> BatchSampler | None:
    """Returns the sampler of steps, None if no rank has an event sink: a gather is collective."""
    if not context.loads_watched:
        return None
    sharing = context.config.ranks_sharing_rows
    return BatchSampler(context.accelerator, loads, worker, lambda: serving_state.layout, sharing)


def _load_window(
    context: BalancerContext,
    loads: Communicator,
    shape: ExpertShape,
    worker: Worker,
    sampler: BatchSampler | None,
) -> LoadWindow:
    """Returns the load window; all sub-windows are summed if more than plans use them."""
    config = context.config
    never, lagged = isinstance(context.path, NoRebalancing), config.shares is ShareMode.LAGGED
    every = never or lagged or context.loads_watched
    period = config.window_size if every else config.step_interval
    cadence = config.sub_window, config.window_size, period, config.step_offset
    schedule = WindowSchedule(*cadence, first_step=context.first_step)
    return LoadWindow(context.accelerator, loads, shape, schedule, worker, sampler)


def _share_refresh(
    context: BalancerContext,
    serving_state: ServingState,
    load: LoadWindow,
    shape: ExpertShape,
    workers: Workers,
) -> ShareRefresh:
    if context.config.shares is ShareMode.LAGGED and not isinstance(context.path, NoRebalancing):
        return LaggedShares(
            serving_state, load, shape, context.config.min_gain_parts, workers.shares
        )
    return StaticShares(serving_state, shape)


def _router(
    context: BalancerContext,
    serving_state: ServingState,
    load: LoadWindow,
    opened: Sequence[Communicator],
) -> Router:
    accelerator, tables, counters = context.accelerator, serving_state.tables, load.counters
    sharing = context.config.ranks_sharing_rows
    # By the numbers of the run: after a loss, too, ranks with the same rows have the same.
    place = context.members.global_rank // sharing
    match context.config.routing_rule, context.config.shares:
        case RoutingRule.VLLM_ROW_HASH, _:
            return RowHashRouter(accelerator, tables, counters)
        case RoutingRule.TRTLLM_ROUND_ROBIN, _:
            return BlockRoundRobinRouter(accelerator, tables, place, counters)
        case _, ShareMode.EXACT:
            if context.config.locality is Locality.PREFER:
                return LocalFirstRouter(accelerator, opened[-1], tables, counters)
            group = 0, counters, context.config.timeout, sharing
            return GroupShareRouter(accelerator, opened[-1], tables, *group)
        case _, ShareMode.NODE:
            group = context.node, counters, context.config.timeout, sharing
            return GroupShareRouter(accelerator, opened[-1], tables, *group)
        case _, ShareMode.LOCAL:
            return LocalShareRouter(accelerator, tables, place, counters)
    return TableRouter(accelerator, tables, place, counters)


def _path(
    context: BalancerContext,
    serving_state: ServingState,
    locks: LayerLocks | None,
    opened: Sequence[Communicator],
    workers: Workers,
    shape: ExpertShape,
) -> UpdatePath | None:
    rank, config = context.members.rank_in_group, context.config
    match context.path, locks:
        case NoRebalancing(), _:
            return None
        case InPlaceFromHost(host_weights), LayerLocks():
            return InPlacePath(
                context.accelerator,
                serving_state,
                locks,
                host_weights,
                workers.transfer,
                rank,
                shape,
                config,
            )
    ranks, event_sink = context.members.ranks, context.events
    ends = context.accelerator, opened[0], context.store
    transfer = P2PTransfer(*ends, ranks, config.timeout, event_sink, config.slots_per_message)
    return StagedPath(serving_state, transfer, workers.transfer, rank, shape, config)
