"""Plays a case to its end, and says what was seen."""

from contextlib import closing
from dataclasses import replace
from functools import partial

import torch
from exploration.engine.case import Case, FaultKind
from exploration.engine.driver import Driver, Hang
from exploration.engine.explored_rank import ExploredRank, explored_rank
from exploration.engine.fault_injector import Mischief
from exploration.engine.lane import LaneHost
from exploration.engine.patches import Patches, patched
from exploration.engine.random_planner import scripted
from exploration.engine.records import RankRecord, Record
from exploration.engine.world_profiles import WORLDS

from equipoise.backends.virtual.world import VirtualWorld
from equipoise.balancer.experts.engine.states import Draining, Idle
from equipoise.balancer.experts.placement import ExpertShape, Layout, Load
from equipoise.balancer.experts.planning.rebalance_plan import (
    RebalanceLimits,
    RebalancePlan,
    plan_rebalance,
)
from equipoise.balancer.experts.routing.layer_update import LayerUpdate
from equipoise.balancer.experts.runtime.jobs import Job
from equipoise.balancer.experts.transfer.p2p import ReadyChunk, StagedChunk, stage_chunk

OTHERWISE = 0x5EED
"""What a rank that plans otherwise adds to the script."""


class Play:
    """A case on its world.

    Args:
        case: what is played.
        world: where.
    """

    def __init__(self, case: Case, world: VirtualWorld) -> None:
        self.case = case
        self._acting = 0
        self._lurking: bool | None = None
        self._plans: dict[tuple[bytes, ...], RebalancePlan] = {}
        self.driver = Driver(world, case, self._remove_rank)
        self.ranks = [
            explored_rank(world, case, rank, self._set_acting) for rank in range(world.size)
        ]
        waiting = [(fault, fault.delay) for fault in case.faults]
        self.mischief = Mischief(self.ranks, self.driver, waiting)
        self.driver.watch = self.mischief.watch
        for one in self.ranks:
            job = one.serve(partial(self._turn, one))
            self.driver.hosts.append(LaneHost(one.rank, job, self._set_acting))
            self.driver.workers += one.workers.values()

    def draft(
        self, windows: Load, installed: Layout, shape: ExpertShape, limits: RebalanceLimits
    ) -> RebalancePlan:
        """Stands for the planner; equal questions of a case are answered once."""
        otherwise = self._trap(FaultKind.OTHER_PLAN)
        key = (windows.tobytes(), installed.digest.encode(), bytes([otherwise]))
        if key not in self._plans:
            script = self.case.script + OTHERWISE * otherwise
            if script:
                self._plans[key] = scripted(windows, installed, shape, limits, script)
            else:
                self._plans[key] = plan_rebalance(windows, installed, shape, limits)
        return self._plans[key]

    def stage_chunk(self, staging: Job[StagedChunk], change: LayerUpdate) -> Job[ReadyChunk]:
        """Stands for what stages a lot."""
        if self._trap(FaultKind.OTHER_TABLES):
            other = change.tables.cumulative - torch.ones((), dtype=torch.int32)
            change = replace(change, tables=replace(change.tables, cumulative=other))
        return stage_chunk(staging, change)

    def record(self) -> Record:
        """Play to the end."""
        hang = ""
        try:
            self.driver.run()
        except Hang as error:
            hang = str(error)
        return Record(
            case=self.case,
            rank_records=tuple(map(self._rank_record, self.ranks)),
            hang=hang,
            micro_steps=self.driver.micro_steps,
            struck=tuple(self.mischief.struck),
            armed=self._lurking is not False,
            decisions={q: a for one in self.ranks for q, a in one.fabric.control.decisions.items()},
            unfinished=self._unfinished(),
        )

    def _trap(self, kind: FaultKind) -> bool:
        return self.ranks[self._acting].traps.spring(kind)

    def _set_acting(self, rank: int) -> None:
        self._acting = rank

    def _turn(self, at: ExploredRank, step: int) -> None:
        """A host has come to a boundary."""
        self.driver.turned(at.rank, step)
        if step >= self.case.steps and self._lurking is None:
            self._lurking = self.mischief.armed

    def _remove_rank(self, host: LaneHost) -> None:
        """A rank whose host raises stops for good, as its process does."""
        self.driver.remove(host.ranks[0])

    def _rank_record(self, at: ExploredRank) -> RankRecord:
        state = at.engine.state
        rebalance = None if isinstance(state, Idle | Draining) else state.rebalance
        return RankRecord(
            rank=at.rank,
            rank_lost=at.rank in self.mischief.lost_ranks,
            error=self.driver.hosts[at.rank].error,
            after=tuple(at.after),
            stages=tuple(at.stages),
            observations=tuple(at.forward.observations),
            reports=tuple(at.engine.reports),
            aborts=dict(at.engine.aborts),
            open=None if rebalance is None else (rebalance.number, rebalance.opened_at),
        )

    def _unfinished(self) -> int:
        world = self.driver.world
        return sum(world.device(explored.rank).tasks for explored in self.ranks) + len(
            world.network.pending
        )


def play(case: Case, patches: Patches | None = None) -> Record:
    """What comes of a case, with these patches of the engine."""
    with closing(WORLDS[case.world].world(case.shape.ranks, b"")) as world, patched(patches or {}):
        played = Play(case, world)
        hooks = {
            "engine.staged_path.plan_rebalance": played.draft,
            "engine.in_place_path.plan_rebalance": played.draft,
            "engine.staged_path.stage_chunk": played.stage_chunk,
        }
        with patched(hooks):
            return played.record()
