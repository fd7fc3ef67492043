"""One rank's expert balancer: what a model's serve loop holds."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace

from equipoise.balancer.experts.agreement.key_collector import KeyCollector
from equipoise.balancer.experts.agreement.members import EPGroup
from equipoise.balancer.experts.agreement.same_on_all_ranks import check_same_on_all_ranks
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
from equipoise.balancer.experts.routing.local_first import LocalFirstRouter
from equipoise.balancer.experts.routing.routers import (
    BlockRoundRobinRouter,
    ExactShareRouter,
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
    """Routes tokens, moves experts, and says what it sees.

    Attributes:
        context: what it was opened with.
        shape: how many of everything.
        serving_state: slots, tables and their layout.
        load: over all ranks.
        router: for the step path.
        engine: of the boundaries.
        locks: of layers that are rewritten in place; None where none are.
        communicators: all that were opened for it.
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
        """Around what launches `step`, on every rank; raises as its boundary does.

        Work beside the forward begins behind the launch, so that the host is free to launch.
        """
        self.engine.before_step(step)
        try:
            yield
        finally:
            self.engine.after_launch()

    def before_step(self, step: int) -> None:
        """The same where nothing says when the forward is launched: work beside begins at once."""
        self.engine.before_step(step)
        self.engine.after_launch()

    def reading_slots(self, layer: int, step: int) -> AbstractContextManager[None]:
        """Around everything that `step` launches that reads the slots of `layer`."""
        return UNLOCKED if self.locks is None else self.locks.reading_slots(layer, step)

    def step_kind(self, step: int) -> StepKind:
        """Which locks `step` carries, for engines that capture one graph a kind."""
        return StepKind.SKIP if self.locks is None else self.locks.step_kind(step)

    def close(self) -> None:
        """End the engine and give back the communicators that were opened for it.

        Every rank closes behind the same step; nobody waits for another. This rank's compute
        stream is waited for first, `deadline` seconds at most: what its steps launched is done as
        ever. Peers that are a step behind are not harmed: what has ended here was issued there. An
        epoch under way is left; what its exchanges still lack fails on their communicator alone.

        Again is harmless. Nothing is routed behind it, a boundary raises `EngineError`, and the
        label stays used: the control plane may still hold what was asked under it.

        Raises:
            StreamTimeout: the compute stream did not come to its end.
            StreamError, CommunicatorError: what the stream, or the last sum of loads, failed with.
                In every case all communicators have been closed.
        """
        with ExitStack() as ends:
            for communicator in reversed(self.communicators):
                ends.callback(communicator.close)
            ends.callback(self._wait_for_compute)
            ends.callback(self.engine.close)

    def _wait_for_compute(self) -> None:
        """Wait until the compute stream has left the communicators.

        Exact shares put a sum a layer on it, which a program may only issue when the stream comes
        to it: a group that was given back before would fail the stream.
        """
        accelerator = self.context.accelerator
        idle = stream_idle(accelerator, accelerator.stream(Role.COMPUTE))
        idle.wait(self.context.config.timeout)

    def reconfigure(self, active_ranks: Sequence[int], step: int) -> "ExpertBalancer":
        """Go on without the ranks that are gone; collective among `active_ranks`.

        This balancer is closed; streams that were attached to it are attached to the new one anew.
        Every expert that has a copy left is served from there; one that
        has none is written anew from the host's memory, in the place of a copy that is not the
        last of its expert. Layers that were being rewritten are written once more. Slots keep
        their places; ranks close up, in ascending order.

        Args:
            active_ranks: numbers on the control plane of those that are left.
            step: the next boundary to come.

        Raises:
            ExpertsLost: names the experts that no rank and no host has any more.
            PlacementError: too few slots are left for all experts.
            AgreementLost: the others mean another group, another step, or hold another layout.
            BallotIncomplete: one of `active_ranks` does not come.
        """
        before = self.context.members
        members = before.shrunk_to(active_ranks)
        config = surviving_config(self.context.config, self.shape, before, members)
        context = replace(self.context, members=members, first_step=step, config=config)
        unsettled, layout = self.engine.half_written_layers, self.serving_state.layout
        # Communicators and streams may have failed with the ranks that are gone, and that is known.
        close_quietly([self])
        asked = check_same_survivors(context.fabric.control, members, config, layout, step)
        context = replace(context, uncollected=(*self.engine.uncollected, asked))
        recovered = surviving_layout(layout, self.shape, before, members)
        reload_lost_experts(context, recovered)
        rewrite_half_written(context, recovered, unsettled)
        return build(context, recovered.shape, recovered.layout)

    def imbalance(self) -> float:
        """Imbalance of the last summed sub-window under the installed layout; nan before one.

        Mean over layers of max / mean - 1 over ranks, with the shares that the router applies.
        """
        if not self.load.sums:
            return float("nan")
        load, layout = self.load.latest, self.serving_state.layout
        applied = replace(layout, shares=self.router.shares(load, layout, self.shape))
        return float(imbalance(load, applied, self.shape).mean()) / SHARE_ONE

    def attach(self, stream: Stream) -> Reader:
        """A further stream reads slots or tables, until it is detached or the balancer is closed.

        Every change waits for what an attached stream has launched, so detach one that is idle.
        """
        return self.serving_state.attach(stream)


def open_balancer(  # noqa: PLR0913 - what a rank balances with, each told apart
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
    """Put a balancer together; collective: it opens one communicator a purpose.

    Args:
        accelerator: this rank's device.
        fabric: this rank's connection to the others.
        store: this rank's slots, holding `layout`.
        shape: how many of everything.
        layout: what is installed at the start.
        config: cadence, bounds and share mode.
        path: how weights come into slots; `NO_REBALANCING` where they never do.
        new_worker: makes who works beside the forward: by default threads, which tell the journal.
        journal: told what happens, by threads that cannot wait; whoever opened it closes it.

    Raises:
        Unsupported: the accelerator lacks what the path needs.
        EngineError: the configuration asks for log lines, and there is no journal; the store has
            other slots than the shape, or no staging where weights come from peers.
        PlacementError: the layout is not of the shape; the shape is not of these ranks; there is
            not what it takes to survive what the aims say.
        AgreementLost: a rank opens something else; nothing is opened anywhere.
        BallotIncomplete: a rank does not come.
    """
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


def build(context: BalancerContext, shape: ExpertShape, layout: Layout) -> ExpertBalancer:
    """Put the parts of a balancer together; collective.

    Where anything raises, what was opened by then is closed. Raises `Unsupported` where the
    accelerator lacks what the path needs.
    """
    installed = ServingState(context.accelerator, context.store, shape, layout)
    locks = _locks(context, installed, shape)
    with ExitStack() as undo:
        loads, *others = opened = _communicators(context, undo)
        workers = _workers(context, undo)
        load = _load_window(context, loads, shape, workers.load)
        share_refresh = _share_refresh(context, installed, load, shape, workers)
        router = _router(context, installed, load, others)
        path = _path(context, installed, locks, others, workers, shape)
        keys = _key_collector(context, workers.vote)
        group = EngineContext(context.fabric.control, context.members, context.first_step, keys)
        recorder = _recorder(context, shape, router)
        engine = RebalanceEngine(
            installed, load, path, share_refresh, group, context.config, workers, recorder
        )
        undo.pop_all()
    parts = installed, load, router, engine, locks, tuple(opened)
    return ExpertBalancer(context, shape, *parts)


def _workers(context: BalancerContext, undo: ExitStack) -> Workers:
    def new_worker(kind: Track) -> Worker:
        worker = context.new_worker(kind)
        undo.callback(worker.close)
        return worker

    return Workers.create(new_worker)


def _key_collector(context: BalancerContext, worker: Worker) -> KeyCollector | None:
    """The lowest member's."""
    members = context.members
    if members.rank_in_group:
        return None
    return KeyCollector(context.fabric.control, members.ranks, worker, context.uncollected)


def _recorder(context: BalancerContext, shape: ExpertShape, router: Router) -> EventRecorder:
    """What boundaries are told to."""
    slot_bytes, sub_window = context.store.layout.slot_bytes, context.config.sub_window
    place = context.members.rank_in_group
    return EventRecorder(context.events, shape, place, slot_bytes, sub_window, router.shares)


def _communicators(context: BalancerContext, undo: ExitStack) -> list[Communicator]:
    """One a purpose: loads; then, as configured, moves and routing. All ranks open alike."""
    wanted = ["loads"]
    if isinstance(context.path, StagedFromPeers):
        wanted.append("moves")
    if context.config.shares is ShareMode.EXACT:
        wanted.append("routing")
    opened = []
    for what in wanted:
        opened.append(context.open(what))
        undo.callback(opened[-1].close)
    return opened


def _locks(
    context: BalancerContext, installed: ServingState, shape: ExpertShape
) -> LayerLocks | None:
    """Locks by layer where layers are rewritten in place. Raises `Unsupported`."""
    path, accelerator = context.path, context.accelerator
    if not isinstance(path, InPlaceFromHost):
        return None
    if not path.capabilities.stream_lock or not path.capabilities.copy_independent_of_launch:
        # TensorRT-LLM's first copy engine deadlocked so: a copy that waits for a launch that waits
        # for the copy.
        raise Unsupported(
            f"{accelerator.name} cannot rewrite layers under a lock: it takes stream_lock and "
            "copy_independent_of_launch"
        )
    timeout, entries = context.config.timeout, path.entries_per_step
    return LayerLocks(accelerator, shape.layers, installed.readers, timeout, entries)


def _load_window(
    context: BalancerContext, loads: Communicator, shape: ExpertShape, worker: Worker
) -> LoadWindow:
    """All sub-windows are summed where others look at loads than plans."""
    config = context.config
    never, lagged = isinstance(context.path, NoRebalancing), config.shares is ShareMode.LAGGED
    every = never or lagged or context.loads_watched
    period = config.window_size if every else config.step_interval
    cadence = config.sub_window, config.window_size, period, config.step_offset
    schedule = WindowSchedule(*cadence, first_step=context.first_step)
    return LoadWindow(context.accelerator, loads, shape, schedule, worker)


def _share_refresh(
    context: BalancerContext,
    installed: ServingState,
    load: LoadWindow,
    shape: ExpertShape,
    workers: Workers,
) -> ShareRefresh:
    if context.config.shares is ShareMode.LAGGED and not isinstance(context.path, NoRebalancing):
        return LaggedShares(installed, load, shape, context.config.min_gain, workers.shares)
    return StaticShares(installed, shape)


def _router(
    context: BalancerContext,
    installed: ServingState,
    load: LoadWindow,
    opened: Sequence[Communicator],
) -> Router:
    accelerator, tables, counters = context.accelerator, installed.tables, load.counters
    place = context.members.rank_in_group // context.config.ranks_sharing_rows
    match context.config.rule, context.config.shares:
        case RoutingRule.VLLM_ROW_HASH, _:
            return RowHashRouter(accelerator, tables, counters)
        case RoutingRule.TRTLLM_ROUND_ROBIN, _:
            return BlockRoundRobinRouter(accelerator, tables, place, counters)
        case _, ShareMode.EXACT:
            if context.config.locality is Locality.PREFER:
                return LocalFirstRouter(accelerator, opened[-1], tables, counters)
            return ExactShareRouter(accelerator, opened[-1], tables, place, counters)
    return TableRouter(accelerator, tables, place, counters)


def _path(
    context: BalancerContext,
    installed: ServingState,
    locks: LayerLocks | None,
    opened: Sequence[Communicator],
    workers: Workers,
    shape: ExpertShape,
) -> UpdatePath | None:
    place, config = context.members.rank_in_group, context.config
    match context.path, locks:
        case NoRebalancing(), _:
            return None
        case InPlaceFromHost(host_weights), LayerLocks():
            return InPlacePath(
                context.accelerator,
                installed,
                locks,
                host_weights,
                workers.transfer,
                place,
                shape,
                config,
            )
    ranks, event_sink = context.members.ranks, context.events
    ends = context.accelerator, opened[0], context.store
    transfer = P2PTransfer(*ends, ranks, config.timeout, event_sink, config.slots_per_message)
    return StagedPath(installed, transfer, workers.transfer, place, shape, config)
