"""One rank's expert balancer: what a model's serve loop holds."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from equipoise.balancer.experts.agreement.members import EPGroup
from equipoise.balancer.experts.agreement.same_on_all_ranks import check_same_on_all_ranks
from equipoise.balancer.experts.builder import (
    NO_REBALANCING,
    STAGED_FROM_PEERS,
    Assembly,
    BuildContext,
    InPlaceFromHost,
    StagedFromPeers,
    UpdatePathConfig,
    build,
)
from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.engine.engine import RebalanceEngine
from equipoise.balancer.experts.engine.serving_state import ServingState
from equipoise.balancer.experts.load_window import LoadWindow
from equipoise.balancer.experts.placement import SHARE_ONE, ExpertShape, Layout, imbalance
from equipoise.balancer.experts.planning.topology import max_survivable
from equipoise.balancer.experts.recovery import (
    check_same_survivors,
    reload_lost_experts,
    rewrite_half_written,
    surviving_layout,
)
from equipoise.balancer.experts.routing.routers import Router
from equipoise.balancer.experts.runtime.events import NO_EVENTS, EventSink
from equipoise.balancer.experts.runtime.workers import WorkerFactory, thread_workers
from equipoise.balancer.experts.startup_check import StartupSpec
from equipoise.balancer.experts.transfer.layer_locks import UNLOCKED, StepKind
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric
from equipoise.hal.errors import EngineError, PlacementError
from equipoise.hal.slots import Reader, SlotStore
from equipoise.hal.stream import Stream

__all__ = [
    "NO_REBALANCING",
    "ExpertBalancer",
    "InPlaceFromHost",
    "StagedFromPeers",
    "UpdatePathConfig",
    "open_balancer",
]

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExpertBalancer:
    """Routes tokens, moves experts, and says what it sees.

    Attributes:
        context: what it was opened with.
        shape: how many of everything.
        components: what it is put together from.
    """

    context: BuildContext
    shape: ExpertShape
    components: Assembly

    @property
    def router(self) -> Router:
        """For the step path."""
        return self.components.router

    @property
    def installed(self) -> ServingState:
        """Slots, tables and their layout."""
        return self.components.installed

    @property
    def load(self) -> LoadWindow:
        """Global loads."""
        return self.components.load

    @property
    def engine(self) -> RebalanceEngine:
        """Of the boundaries."""
        return self.components.engine

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around what launches `step`, on every rank; raises as `RebalanceEngine.boundary` does.

        Work beside the forward begins behind the launch, so that the host is free to launch.
        """
        self.components.engine.before_step(step)
        try:
            yield
        finally:
            self.components.engine.after_launch()

    def before_step(self, step: int) -> None:
        """The same where nothing says when the forward is launched: work beside begins at once."""
        self.components.engine.before_step(step)
        self.components.engine.after_launch()

    def reading(self, layer: int, step: int) -> AbstractContextManager[None]:
        """Around everything that `step` launches that reads the slots of `layer`."""
        locks = self.components.locks
        return UNLOCKED if locks is None else locks.reading(layer, step)

    def step_kind(self, step: int) -> StepKind:
        """Which locks `step` carries, for engines that capture one graph a kind."""
        locks = self.components.locks
        return StepKind.SKIP if locks is None else locks.kind(step)

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
        self.components.close()

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
        members = self.context.members.shrunk_to(active_ranks)
        config = self._within(
            replace(self.context.config, nodes=self._nodes(members)), len(members.ranks)
        )
        means = replace(self.context, members=members, first_step=step, config=config)
        unsettled, layout = self.engine.half_written_layers, self.installed.layout
        self.components.retire()
        asked = check_same_survivors(means.fabric.control, members, means.config, layout, step)
        means = replace(means, uncollected=(*self.engine.uncollected, asked))
        saved = surviving_layout(layout, self.shape, self.context.members, members)
        reload_lost_experts(means, saved)
        rewrite_half_written(means, saved, unsettled)
        parts = build(means, saved.shape, saved.layout)
        return ExpertBalancer(means, saved.shape, parts)

    def _nodes(self, left: EPGroup) -> int:
        """Among how many nodes those who are left divide evenly; 1 where they do not.

        A rank stays on the node that it was on: two that are left of one are no two nodes.
        """
        before = self.context.members.ranks
        size = len(before) // self.context.config.nodes
        counts = Counter(before.index(rank) // size for rank in left.ranks)
        return len(counts) if len(set(counts.values())) == 1 else 1

    def _within(self, config: BalancerConfig, ranks: int) -> BalancerConfig:
        """What so many ranks can still aim at; less than was asked for is said."""
        per, aims = self.shape.slots_per_rank, config.planner
        try:
            left = ExpertShape(self.shape.layers, self.shape.experts, ranks * per, ranks)
        except PlacementError:
            return config  # too few slots for all experts: refused in its turn
        survive = max_survivable(left, config.nodes, aims.survive)
        if survive < aims.survive:
            LOG.warning("%d ranks are left: survive is %d from now on", ranks, survive)
        return replace(config, planner=replace(aims, survive=survive))

    def imbalance(self) -> float:
        """Imbalance of the last summed sub-window under the installed layout; nan before one.

        Mean over layers of max / mean - 1 over ranks, with the shares that the router applies.
        """
        if not self.load.sums:
            return float("nan")
        load, layout = self.load.latest, self.installed.layout
        applied = replace(layout, shares=self.router.shares(load, layout, self.shape))
        return float(imbalance(load, applied, self.shape).mean()) / SHARE_ONE

    def attach(self, stream: Stream) -> Reader:
        """A further stream reads slots or tables, until it is detached or the balancer is closed.

        Every change waits for what an attached stream has launched, so detach one that is idle.
        """
        return self.installed.attach(stream)


def open_balancer(  # noqa: PLR0913 - what a rank balances with, each told apart
    accelerator: Accelerator,
    fabric: Fabric,
    store: SlotStore,
    shape: ExpertShape,
    layout: Layout,
    config: BalancerConfig,
    path: UpdatePathConfig = STAGED_FROM_PEERS,
    hire: WorkerFactory | None = None,
    journal: EventSink = NO_EVENTS,
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
        hire: makes who works beside the forward: by default threads, which tell the journal.
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
    opening = StartupSpec(store, shape, layout, config, path)
    workers = hire or thread_workers(config, journal)
    means = _build_context(accelerator, fabric, opening, workers, journal)
    return ExpertBalancer(means, shape, build(means, shape, layout))


def _build_context(
    accelerator: Accelerator,
    fabric: Fabric,
    opening: StartupSpec,
    hire: WorkerFactory,
    journal: EventSink,
) -> BuildContext:
    config, control = opening.config, fabric.control
    if config.log_balancedness and journal is NO_EVENTS:
        raise EngineError("log_balancedness takes a journal, and none was given")
    opening.check(control.size)
    watched = check_same_on_all_ranks(
        control,
        f"{config.name}/opened",
        config.timeout,
        {f"balancer {config.name!r}": opening.values()},
        told="" if journal is NO_EVENTS else "watched",
    )
    return BuildContext(
        accelerator,
        fabric,
        opening.store,
        config,
        opening.path,
        hire,
        EPGroup(tuple(range(control.size)), control.rank),
        events=journal,
        loads_watched=any(watched),
    )
