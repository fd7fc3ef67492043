"""Ways to serve: without balancing, and with systems that bring new weights in different ways.

All are given the same plans, by the same schedule of messages (`plan_migration`), over the same
link. What differs is who waits for what. None of the others plans, builds a migration plan, or
looks at what it has copied, while it is timed; ours does the latter two.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from equipoise.balancer.experts import plan
from equipoise.balancer.experts.balancer import (
    InPlaceFromHost,
    StagedFromPeers,
    UpdatePathConfig,
    open_balancer,
)
from equipoise.balancer.experts.config import BalancerConfig, ShareMode
from equipoise.balancer.experts.engine.serving_state import ServingState
from equipoise.balancer.experts.placement import (
    ExpertShape,
    Layout,
    Load,
    even_shares,
    initial_placement,
)
from equipoise.balancer.experts.planning.migration import MigrationPlan, plan_migration
from equipoise.balancer.experts.planning.proposal import (
    Proposal,
    TransferLimits,
    in_place_proposal,
    staged_proposal,
)
from equipoise.balancer.experts.planning.rebalance_plan import RebalancePlan
from equipoise.balancer.experts.routing.layer_update import LayerUpdate, layer_update
from equipoise.balancer.experts.routing.routers import Router, TableRouter
from equipoise.balancer.experts.runtime.events import COMPLETED, Track
from equipoise.balancer.experts.runtime.jobs import Job, JobHandle, run_blocking
from equipoise.balancer.experts.runtime.workers import ThreadWorker
from equipoise.balancer.experts.transfer.host_writes import HostWeights, StreamWriter
from equipoise.balancer.experts.transfer.p2p import P2PTransfer, StagedChunk
from equipoise.hal import registry
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role
from lib.emulated_device import (
    ANEW,
    EXPERTS,
    FOLLOWING,
    INTERVAL,
    LAYERS,
    RANKS,
    REBALANCES,
    ROWS,
    SEED,
    SLOTS,
    SLOTS_PER_MESSAGE,
    UPDATES,
    WINDOW,
    Emulated,
    EmulatedStore,
    Library,
    Point,
    Unchecked,
)
from lib.emulated_link import LinkedFabric
from lib.loads import Model, windows
from lib.rivals import InUse, install

SHAPE = ExpertShape(LAYERS, EXPERTS, SLOTS, RANKS)
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Traffic:
    """Expert ids of every rank, step and layer.

    Attributes:
        skew: sigma of the logarithm of an expert's popularity.
        stages: how many.
        interval: steps between two plans.
    """

    skew: float
    stages: int
    interval: int = INTERVAL

    @property
    def switches(self) -> tuple[int, ...]:
        """Steps at which a stage begins."""
        return tuple(self.warm + REBALANCES * self.interval * stage for stage in range(self.stages))

    @property
    def warm(self) -> int:
        """Steps before the first stage: its first plan is made from its first steps."""
        return self.interval - WINDOW

    @property
    def steps(self) -> int:
        """All of them; no further plan is due."""
        return self.interval + REBALANCES * self.interval * self.stages

    def stage(self, step: int) -> int:
        """Which stage a step is of; -1 before the first."""
        return min((step - self.warm) // (REBALANCES * self.interval), self.stages - 1)

    def ids(self, step: int, rank: int) -> Ids:
        """int32 (layers, rows) of a rank's tokens."""
        stage = self.stage(step)
        odds = self._odds[stage]  # -1 is the last: a topic of the warm-up's own
        draw = np.random.default_rng((SEED, step, rank)).random((LAYERS, ROWS[max(stage, 0)]))
        experts = [np.searchsorted(edges, row) for edges, row in zip(odds, draw, strict=True)]
        return np.minimum(np.stack(experts), EXPERTS - 1).astype(np.int32)

    def load(self, steps: range) -> Load:
        """(layers, experts): rows over these steps and all ranks."""
        total = np.zeros((LAYERS, EXPERTS), dtype=np.int64)
        for step in steps:
            for rank in range(RANKS):
                for layer, row in enumerate(self.ids(step, rank)):
                    total[layer] += np.bincount(row, minlength=EXPERTS)
        return total

    @cached_property
    def _odds(self) -> list[npt.NDArray[np.float64]]:
        """Cumulative popularity by stage, (layers, experts); the last is the warm-up's."""
        model = Model(
            layers=LAYERS, experts=EXPERTS, ranks=RANKS, sigma=self.skew, domains=self.stages + 1,
            period=1, sub_windows=1,
        )  # fmt: skip
        return [window.odds.cumsum(axis=1) for window in windows(model, SEED, self.stages + 1)]


def digest(ids: Sequence[Ids]) -> str:
    """Of all that a rank serves, by step."""
    state = blake2b(digest_size=8)
    for step in ids:
        state.update(step.data)
    return state.hexdigest()


def traffic_of(point: Point) -> Traffic:
    """What a point is measured on."""
    return Traffic(point.skew, point.stages)


@dataclass(frozen=True)
class PlannedRebalance:
    """A plan that every system executes.

    Attributes:
        due: the boundary at which its load is known.
        stage: the load stage that it is for.
        anew: whether the topic is that of the plan before: weights move between placements that are
            both balanced.
        layout: to be installed.
        moves: copies that their rank did not hold.
    """

    due: int
    stage: int
    anew: bool
    layout: Layout
    moves: int


def start() -> Layout:
    """Installed at first."""
    placement = initial_placement(SHAPE)
    return Layout(placement, even_shares(placement, EXPERTS))


Planner = Callable[[Load, Layout, bool], tuple[Layout, int]]
"""From load, what is installed, and whether to plan anew, to a layout and its moves."""


def planned_rebalances(traffic: Traffic, planner: Planner) -> Iterator[PlannedRebalance]:
    """All plans, each from where the one before leads."""
    layout = start()
    for number in range(REBALANCES * traffic.stages):
        window_end = (number + 1) * traffic.interval
        load = traffic.load(range(window_end - WINDOW, window_end))
        stage, anew = number // REBALANCES, number % REBALANCES > 0
        layout, moves = planner(load, layout, anew)
        yield PlannedRebalance(window_end + 1, stage, anew, layout, moves)


def common(load: Load, layout: Layout, anew: bool) -> tuple[Layout, int]:
    """What all systems execute: what the engine plans by default behind a switch of topic.

    Of a topic that stays plans are made anew, so that weights really move.
    """
    new_plan = plan(
        load,
        slots=SLOTS,
        ranks=RANKS,
        installed=layout.placement,
        policy="connected" if anew else "incremental",
        max_copies=ANEW if anew else FOLLOWING,
    )
    return Layout(new_plan.placement, new_plan.shares), new_plan.moves


def as_today(load: Load, layout: Layout, anew: bool) -> tuple[Layout, int]:
    """What other systems plan: greedily, anew every time, for an even split."""
    new_plan = plan(load, slots=SLOTS, ranks=RANKS, installed=layout.placement, policy="greedy")
    return Layout(new_plan.placement, even_shares(new_plan.placement, EXPERTS)), new_plan.moves


PER_RANK = SHAPE.slots_per_rank


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        device: emulated.
        fabric: whose exchanges of weights go over the emulated link.
        rank: this one.
        label: of the run; no two have the same.
        rows: int64 (layers, experts, 2), the weights in the host's memory.
        plans: to be executed, in order.
    """

    device: Emulated
    fabric: LinkedFabric
    rank: int
    label: str
    rows: torch.Tensor
    plans: Sequence[PlannedRebalance]


def weights() -> torch.Tensor:
    """int64 (layers, experts, 2): what stands for every expert: its layer and its number."""
    layers = torch.arange(SHAPE.layers).view(-1, 1).expand(-1, SHAPE.experts)
    experts = torch.arange(SHAPE.experts).view(1, -1).expand(SHAPE.layers, -1)
    return torch.stack([layers, experts], dim=2).contiguous()


def slots_of(
    place: Place, kind: type[EmulatedStore], staging: int
) -> tuple[torch.Tensor, EmulatedStore]:
    """This rank's slots, filled with the start layout, and their store."""
    mine = slice(place.rank * PER_RANK, (place.rank + 1) * PER_RANK)
    experts_of_layers = torch.from_numpy(start().placement[:, mine].astype(np.int64))
    contents = torch.stack(
        [place.rows[layer, experts] for layer, experts in enumerate(experts_of_layers)]
    )
    slots = tuple((Segment("stands for an expert", row),) for row in contents.flatten(0, 1))
    inner = place.device.slot_store(SlotLayout(slots, staging))
    return contents, kind(inner, place.device)


DEADLINE = 30.0
NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class RebalanceRecord:
    """A rebalance: the boundaries at which it was due and ended, and copies between ranks."""

    due: int
    step: int
    copies: int


class System(Protocol):
    """What the step loop asks of a way to serve."""

    router: Router
    installed: ServingState
    slot_contents: torch.Tensor
    """int64 [layers, slots of a rank, 2]: what the slots hold."""
    rebalances: list[RebalanceRecord]

    def free(self, step: int) -> bool:
        """What nobody has to wait for, before the clock starts; whether there was anything."""
        ...

    def boundary(self, step: int) -> None:
        """Between two steps."""
        ...

    def launched(self) -> None:
        """The step's forward is on its way."""
        ...

    def reading(self, layer: int, step: int) -> AbstractContextManager[None]:
        """Around what reads the slots of a layer."""
        ...

    def close(self) -> None:
        """End what runs beside."""
        ...


class Base:
    """Slots, tables and a router; nothing ever changes.

    Args:
        place: where.
        kind: of slot store.
        staging: buffers.
    """

    def __init__(
        self, place: Place, kind: type[EmulatedStore] = Unchecked, staging: int = 0
    ) -> None:
        self._place = place
        self._mine = slice(place.rank * PER_RANK, (place.rank + 1) * PER_RANK)
        self.slot_contents, self._store = slots_of(place, kind, staging)
        self.rebalances: list[RebalanceRecord] = []
        self._prepare()

    def _prepare(self) -> None:
        self.installed = ServingState(self._place.device, self._store, SHAPE, start())
        counters = torch.zeros((SHAPE.layers, SHAPE.experts), dtype=torch.int32)
        device, tables = self._place.device, self.installed.tables
        self.router: Router = TableRouter(device, tables, self._place.rank, counters)

    def free(self, step: int) -> bool:
        """Nothing."""
        return False

    def boundary(self, step: int) -> None:
        """Nothing."""

    def launched(self) -> None:
        """Nothing."""

    def reading(self, layer: int, step: int) -> AbstractContextManager[None]:
        """No lock."""
        return NOTHING

    def close(self) -> None:
        """Nothing."""


class Perfect(Base):
    """The last placement of each stage, there from its first step on, at no cost."""

    def __init__(self, place: Place, switches: Sequence[int]) -> None:
        last = {plan.stage: plan for plan in place.plans}
        self._by_step = {step: last[stage] for stage, step in enumerate(switches)}
        super().__init__(place)

    def free(self, step: int) -> bool:
        """Install a stage's placement."""
        rebalance = self._by_step.get(step)
        if rebalance is None:
            return False
        mine = torch.from_numpy(rebalance.layout.placement[:, self._mine].astype(np.int64))
        compute = self._place.device.stream(Role.COMPUTE)
        for layer, experts in enumerate(mine):
            self.slot_contents[layer].copy_(self._place.rows[layer, experts])
        self.installed.commit(layer_update(rebalance.layout, SHAPE, range(SHAPE.layers)), ())
        compute.synchronize(DEADLINE)
        self.rebalances.append(RebalanceRecord(step, step, rebalance.moves))
        return True


@dataclass(frozen=True)
class PreparedTransfer:
    """What is known of a transfer before: how weights travel, and what is installed with them."""

    migration: MigrationPlan
    change: LayerUpdate


def prepare_transfers(
    plans: Sequence[PlannedRebalance], groups: Sequence[Sequence[int]]
) -> Mapping[int, Sequence[PreparedTransfer]]:
    """By due step, a transfer for each group of layers."""
    transfers, before = {}, start()
    for rebalance in plans:
        steps = []
        for layers in groups:
            travel = plan_migration(
                before.placement,
                _mixed(before, rebalance.layout, layers).placement,
                layers,
                SHAPE,
                staging=2 * SHAPE.layers * PER_RANK,
                slots_per_message=SLOTS_PER_MESSAGE,
            )
            steps.append(PreparedTransfer(travel, layer_update(rebalance.layout, SHAPE, layers)))
        transfers[rebalance.due] = steps
        before = rebalance.layout
    return transfers


def _mixed(before: Layout, after: Layout, layers: Sequence[int]) -> Layout:
    placement, shares = before.placement.copy(), before.shares.copy()
    placement[list(layers)] = after.placement[list(layers)]
    shares[list(layers)] = after.shares[list(layers)]
    return Layout(placement, shares)


class Travelling(Base):
    """A system that lets weights travel by itself.

    Args:
        place: where.
        staging: buffers.
        groups: layers that travel together.
    """

    def __init__(self, place: Place, staging: int, groups: Sequence[Sequence[int]]) -> None:
        super().__init__(place, staging=staging)
        moves = place.fabric.open(f"{place.label}.moves")
        self._transfer = P2PTransfer(place.device, moves, self._store, range(SHAPE.ranks), DEADLINE)
        self._votes = place.fabric.open(f"{place.label}.votes")
        self._prepared_transfers = prepare_transfers(place.plans, groups)

    def _travel(self, work: PreparedTransfer) -> Job[StagedChunk]:
        """Stage what is on its way; where nothing moves, nothing."""
        if not work.migration.chunks:
            yield from ()
            return StagedChunk(0, 0, (), 0)
        transfers = work.migration.for_rank(self._place.rank, 0)
        return (yield from self._transfer.stage(transfers, self.installed.last_change))


class StopTheWorld(Travelling):
    """At the step of a rebalance everybody waits until all weights of all layers have moved."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, 2 * SHAPE.layers * PER_RANK, [range(SHAPE.layers)])

    def boundary(self, step: int) -> None:
        """Move, meet, install, meet."""
        for work in self._prepared_transfers.get(step, ()):
            staged = run_blocking(self._travel(work), DEADLINE)
            self._votes.barrier().result(DEADLINE)
            self.installed.commit(work.change, staged.copies)
            self._place.device.stream(Role.COMPUTE).synchronize(DEADLINE)
            self._votes.barrier().result(DEADLINE)
            self.rebalances.append(RebalanceRecord(step, step, work.migration.remote_copies))


class OneLayer(Travelling):
    """One layer in flight; every step of a cycle all ranks vote on it, and wait for the vote.

    A layer that does not change goes the same way. Maps are built one slot at a time, on the thread
    that steps. The next layer leaves when this one is installed; a plan that falls due in a cycle
    waits for its end.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place, PER_RANK, [[layer] for layer in range(SHAPE.layers)])
        self._worker = ThreadWorker(Track.TRANSFER, DEADLINE, owner=place.label)
        self._maps = InUse.empty(SHAPE.experts)
        self._due_steps: deque[int] = deque()
        self._remaining: deque[PreparedTransfer] = deque()
        self._in_flight: JobHandle[StagedChunk] | None = None
        self._moved_copies = 0

    def boundary(self, step: int) -> None:
        """Vote, install what has come everywhere, and let the next leave."""
        if step in self._prepared_transfers:
            self._due_steps.append(step)
        if self._in_flight is not None:
            self._vote(self._in_flight, step)
        if self._in_flight is None and self._due_steps:
            self._remaining.extend(self._prepared_transfers[self._due_steps[0]])
            self._moved_copies = 0
            self._leave()

    def close(self) -> None:
        """End the thread."""
        self._worker.close()

    def _vote(self, job: JobHandle[StagedChunk], step: int) -> None:
        votes = torch.tensor([int(job.done())], dtype=torch.int32)
        self._votes.all_reduce(votes).result(DEADLINE)
        if int(votes[0]) < SHAPE.ranks:
            return
        work, staged = self._remaining.popleft(), job.result(DEADLINE)
        self.installed.commit(work.change, staged.copies)
        install(torch.from_numpy(work.change.placement[0].astype(np.int64)), self._maps)
        self._moved_copies += work.migration.remote_copies
        self._in_flight = None
        if self._remaining:
            self._leave()
        else:
            self.rebalances.append(
                RebalanceRecord(self._due_steps.popleft(), step, self._moved_copies)
            )

    def _leave(self) -> None:
        self._in_flight = self._worker.start(self._travel(self._remaining[0]), "move")
        self._worker.release()


class Ours(Base):
    """The engine, whose planner says what it is given.

    Args:
        place: where.
        way: how weights come into slots.
        shares: the share mode.
        own: whether the engine plans by itself instead.
    """

    def __init__(
        self,
        place: Place,
        way: Callable[[Place, EmulatedStore], UpdatePathConfig],
        shares: ShareMode = ShareMode.STATIC,
        own: bool = False,
    ) -> None:
        self._way, self._shares, self._own = way, shares, own
        super().__init__(place, EmulatedStore, staging=2 * PER_RANK)

    def _prepare(self) -> None:
        place = self._place
        config = BalancerConfig(
            name=place.label,
            shares=self._shares,
            window_size=WINDOW,
            step_interval=INTERVAL,
            sub_window=WINDOW,
            slots_per_message=SLOTS_PER_MESSAGE,
            layer_updates_per_iter=UPDATES,
            timeout=DEADLINE,
        )
        path = self._way(place, self._store)
        self._balancer = open_balancer(
            place.device, place.fabric, self._store, SHAPE, start(), config, path
        )
        self.installed, self.router = self._balancer.serving_state, self._balancer.router
        if not self._own:
            engine = self._balancer.engine
            # The engine, its protocol and its path run as they are; only what is planned is given.
            engine._path = FixedPlanPath(engine._path, place, isinstance(path, InPlaceFromHost))

    def boundary(self, step: int) -> None:
        """The engine's."""
        self._balancer.engine.before_step(step)
        reports = self._balancer.engine.reports
        for report in list(reports)[len(self.rebalances) :]:
            if report.outcome not in COMPLETED:
                raise RuntimeError(f"rebalance {report.number} ended with: {report.outcome}")
            self.rebalances.append(RebalanceRecord(report.opened_at, report.step, report.copies))

    def launched(self) -> None:
        """The engine's."""
        self._balancer.engine.after_launch()

    def reading(self, layer: int, step: int) -> AbstractContextManager[None]:
        """The engine's."""
        return self._balancer.reading_slots(layer, step)

    def close(self) -> None:
        """The engine's."""
        self._balancer.close()


class FixedPlanPath:
    """A path that proposes what it is given, one after the other; all else is the path's own."""

    def __init__(self, inner: Any, place: Place, locked: bool) -> None:
        self._inner = inner
        self._plans = iter(place.plans)
        self._limits = TransferLimits(SLOTS_PER_MESSAGE, 1, 2 * PER_RANK, place.rank)
        self._locked = locked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, load: Load, layout: Layout) -> Proposal:
        """The next plan, with its tables and its migration plan."""
        after = next(self._plans).layout
        changed = np.flatnonzero((after.placement != layout.placement).any(axis=1))
        nothing = np.zeros(SHAPE.layers, dtype=np.int64)
        drafted = RebalancePlan(after, tuple(changed.tolist()), nothing, nothing)
        if self._locked:
            return in_place_proposal(drafted, SHAPE, UPDATES)
        return staged_proposal(drafted, layout, SHAPE, self._limits)


def staged_from_peers(place: Place, store: EmulatedStore) -> UpdatePathConfig:
    """Weights come from peers."""
    return StagedFromPeers()


def in_place_from_host(place: Place, store: EmulatedStore) -> UpdatePathConfig:
    """Weights come from the host's memory."""
    supply = HostWeights(Library(place.rows), StreamWriter(place.device, store))
    return InPlaceFromHost(supply, registry.accelerator("cpu").capabilities)
