"""The parts of one rank's balancer, put together."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from equipoise.balancer.experts.agreement.key_collector import KeyCollector, StoredKey
from equipoise.balancer.experts.agreement.members import EPGroup
from equipoise.balancer.experts.closing import close_quietly
from equipoise.balancer.experts.config import BalancerConfig, Locality, RoutingRule, ShareMode
from equipoise.balancer.experts.engine.engine import Group, RebalanceEngine, UpdatePath
from equipoise.balancer.experts.engine.in_place_path import InPlacePath
from equipoise.balancer.experts.engine.recorder import EventRecorder
from equipoise.balancer.experts.engine.serving_state import ServingState
from equipoise.balancer.experts.engine.share_refresh import LaggedShares, ShareRefresh, StaticShares
from equipoise.balancer.experts.engine.staged_path import StagedPath
from equipoise.balancer.experts.load_window import LoadWindow, WindowSchedule
from equipoise.balancer.experts.placement import ExpertShape, Layout
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
from equipoise.balancer.experts.runtime.workers import Worker, WorkerFactory, Workers
from equipoise.balancer.experts.transfer.host_writes import HostWeights
from equipoise.balancer.experts.transfer.layer_locks import LayerLocks
from equipoise.balancer.experts.transfer.p2p import P2PTransfer
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.capabilities import Capabilities
from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.errors import Unsupported
from equipoise.hal.slots import SlotStore
from equipoise.hal.stream import Role


@dataclass(frozen=True)
class StagedFromPeers:
    """Weights come from peers, beside the forward, and are committed between two steps.

    Attributes:
        spare: where else weights are to be had when ranks are lost that held the last copies;
            None where they are nowhere else.
    """

    spare: HostWeights | None = None


@dataclass(frozen=True)
class InPlaceFromHost:
    """Weights come from the host's memory, and layers are rewritten in place, a few a step.

    Attributes:
        supply: the weights, and who writes them.
        capabilities: of the accelerator's backend, which has to have what this takes.
        entries: by layer, how often every step enters it; once where nothing is said.
    """

    supply: HostWeights
    capabilities: Capabilities
    entries: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class NoRebalancing:
    """Weights stay where they are, and shares too; loads are summed all the same."""


UpdatePathConfig = StagedFromPeers | InPlaceFromHost | NoRebalancing
STAGED_FROM_PEERS = StagedFromPeers()
NO_REBALANCING = NoRebalancing()


@dataclass(frozen=True)
class BuildContext:
    """What a rank balances with, whatever is installed.

    Attributes:
        accelerator: this rank's device.
        fabric: this rank's connection to the others.
        store: this rank's slots.
        config: cadence, bounds and share mode.
        path: how weights come into slots.
        new_worker: makes who works beside the forward.
        members: the ranks among which experts are spread.
        first_step: the step of the first boundary.
        events: told what happens; returns at once and never raises.
        uncollected: what a group before this one has asked, and nobody needs any more.
        loads_watched: whether any rank has an event sink: then all ranks sum every sub-window,
            since a sum takes all of them.
    """

    accelerator: Accelerator
    fabric: Fabric
    store: SlotStore
    config: BalancerConfig
    path: UpdatePathConfig
    new_worker: WorkerFactory
    members: EPGroup
    first_step: int = 0
    events: EventSink = NO_EVENTS
    uncollected: tuple[StoredKey, ...] = ()
    loads_watched: bool = False

    def open(self, what: str) -> Communicator:
        """A communicator among the members; collective."""
        name = f"{self.members.scoped_name(self.config.name)}.{what}"
        return self.fabric.open(name, self.members.ranks)


@dataclass(frozen=True)
class Assembly:
    """Router for the step path, engine for the boundaries, and what is installed.

    Attributes:
        means: what it was put together from.
        locks: of layers that are rewritten in place; None where none are.
        communicators: all that were opened for it.
    """

    means: BuildContext
    installed: ServingState
    load: LoadWindow
    router: Router
    engine: RebalanceEngine
    locks: LayerLocks | None
    communicators: tuple[Communicator, ...]

    def close(self) -> None:
        """End what works beside, then give the communicators back, whatever becomes of the first.

        Raises as the last of them did that raised. Any number of times.
        """
        with ExitStack() as ends:
            for communicator in reversed(self.communicators):
                ends.callback(communicator.close)
            ends.callback(self._settle)
            ends.callback(self.engine.close)

    def retire(self) -> None:
        """The same behind a loss: communicators and streams may have failed, and that is known."""
        close_quietly([self])

    def _settle(self) -> None:
        """Wait until the compute stream has left the communicators.

        Exact shares put a sum a layer on it, which a program may only issue when the stream comes
        to it: a group that was given back before would fail the stream.
        """
        means = self.means
        compute = means.accelerator.stream(Role.COMPUTE)
        stream_idle(means.accelerator, compute).take(means.config.timeout)


def build(means: BuildContext, shape: ExpertShape, layout: Layout) -> Assembly:
    """With an engine. Raises `Unsupported` where the accelerator lacks what the path needs.

    Where anything raises, what was opened by then is closed.
    """
    installed = ServingState(means.accelerator, means.store, shape, layout)
    locks = _locks(means, installed, shape)
    with ExitStack() as undoing:
        loads, *others = opened = _communicators(means, undoing)
        staff = _workers(means, undoing)
        load = _window(means, loads, shape, _period(means), staff.load)
        renewal = _renewal(means, installed, load, shape, staff)
        router = _router(means, installed, load, others)
        path = _path(means, installed, locks, others, staff, shape)
        archive = _key_collector(means, staff.vote)
        group = Group(means.fabric.control, means.members, means.first_step, archive)
        recorder = _recorder(means, shape, router)
        engine = RebalanceEngine(
            installed, load, path, renewal, group, means.config, staff, recorder
        )
        undoing.pop_all()
    return Assembly(means, installed, load, router, engine, locks, tuple(opened))


def _workers(means: BuildContext, undoing: ExitStack) -> Workers:
    def new_worker(kind: Track) -> Worker:
        worker = means.new_worker(kind)
        undoing.callback(worker.close)
        return worker

    return Workers.created(new_worker)


def _key_collector(means: BuildContext, worker: Worker) -> KeyCollector | None:
    """The lowest member's."""
    members = means.members
    if members.rank_in_group:
        return None
    return KeyCollector(means.fabric.control, members.ranks, worker, means.uncollected)


def _recorder(means: BuildContext, shape: ExpertShape, router: Router) -> EventRecorder:
    """What boundaries are told to."""
    slot_bytes, sub_window = means.store.layout.slot_bytes, means.config.sub_window
    place = means.members.rank_in_group
    return EventRecorder(means.events, shape, place, slot_bytes, sub_window, router.shares)


def _communicators(means: BuildContext, undoing: ExitStack) -> list[Communicator]:
    """One a purpose: loads; then, as configured, moves and routing. All ranks open alike."""
    wanted = ["loads"]
    if isinstance(means.path, StagedFromPeers):
        wanted.append("moves")
    if means.config.shares is ShareMode.EXACT:
        wanted.append("routing")
    opened = []
    for what in wanted:
        opened.append(means.open(what))
        undoing.callback(opened[-1].close)
    return opened


def _locks(means: BuildContext, installed: ServingState, shape: ExpertShape) -> LayerLocks | None:
    """Locks by layer where layers are rewritten in place. Raises `Unsupported`."""
    path, accelerator = means.path, means.accelerator
    if not isinstance(path, InPlaceFromHost):
        return None
    if not path.capabilities.stream_lock or not path.capabilities.copy_independent_of_launch:
        # TensorRT-LLM's first copy engine deadlocked so: a copy that waits for a launch that waits
        # for the copy.
        raise Unsupported(
            f"{accelerator.name} cannot rewrite layers under a lock: it takes stream_lock and "
            "copy_independent_of_launch"
        )
    deadline, entries = means.config.timeout, path.entries
    return LayerLocks(accelerator, shape.layers, installed.readers, deadline, entries)


def _window(
    means: BuildContext, loads: Communicator, shape: ExpertShape, period: int, teller: Worker
) -> LoadWindow:
    config = means.config
    cadence = config.sub_window, config.window_size, period, config.step_offset
    parts = WindowSchedule(*cadence, first=means.first_step)
    return LoadWindow(means.accelerator, loads, shape, parts, teller)


def _period(means: BuildContext) -> int:
    """Steps from one window of load to the next: all are summed where others look than plans."""
    config = means.config
    never, lagged = isinstance(means.path, NoRebalancing), config.shares is ShareMode.LAGGED
    return config.window_size if never or lagged or means.loads_watched else config.step_interval


def _renewal(
    means: BuildContext,
    installed: ServingState,
    load: LoadWindow,
    shape: ExpertShape,
    staff: Workers,
) -> ShareRefresh:
    if means.config.shares is ShareMode.LAGGED and not isinstance(means.path, NoRebalancing):
        return LaggedShares(installed, load, shape, means.config.min_gain, staff.shares)
    return StaticShares(installed, shape)


def _router(
    means: BuildContext, installed: ServingState, load: LoadWindow, opened: Sequence[Communicator]
) -> Router:
    accelerator, tables, counters = means.accelerator, installed.tables, load.counters
    place = means.members.rank_in_group // means.config.ranks_sharing_rows
    match means.config.rule, means.config.shares:
        case RoutingRule.VLLM_ROW_HASH, _:
            return RowHashRouter(accelerator, tables, counters)
        case RoutingRule.TRTLLM_ROUND_ROBIN, _:
            return BlockRoundRobinRouter(accelerator, tables, place, counters)
        case _, ShareMode.EXACT:
            if means.config.locality is Locality.PREFER:
                return LocalFirstRouter(accelerator, opened[-1], tables, counters)
            return ExactShareRouter(accelerator, opened[-1], tables, place, counters)
    return TableRouter(accelerator, tables, place, counters)


def _path(
    means: BuildContext,
    installed: ServingState,
    locks: LayerLocks | None,
    opened: Sequence[Communicator],
    staff: Workers,
    shape: ExpertShape,
) -> UpdatePath | None:
    place, config = means.members.rank_in_group, means.config
    match means.path, locks:
        case NoRebalancing(), _:
            return None
        case InPlaceFromHost(supply), LayerLocks():
            return InPlacePath(
                means.accelerator, installed, locks, supply, staff.transfer, place, shape, config
            )
    ranks, journal = means.members.ranks, means.events
    ends = means.accelerator, opened[0], means.store
    mover = P2PTransfer(*ends, ranks, config.timeout, journal, config.slots_per_message)
    return StagedPath(installed, mover, staff.transfer, place, shape, config)
