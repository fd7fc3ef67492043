"""Moves a world of engines: hosts, workers, streams and network, each choice taken from bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from exploration.engine.case import Case
from exploration.engine.lane import LaneHost, LaneWorker

from equipoise.backends.virtual.world import Stepper, VirtualWorld
from equipoise.hal.stream import Role

MOST = 20_000
"""Micro-steps after which a world that should have ended counts as a hang."""
SLOWNESS = 100
"""A slow rank gets one choice in so many."""


class Hang(Exception):
    """Nobody can move, and no deadline changes that; or there is no end."""


@dataclass
class Driver:
    """Who moves next.

    Attributes:
        world: its streams and its network.
        case: its schedule and its lags.
        on_lost_host: called when a host has raised.
        watch: called before each micro-step.
        hosts: of the ranks.
        workers: of the engines.
        slow: ranks that get few choices.
        micro_steps: micro-steps so far.
        last_boundaries: the boundary that each rank has come to.
    """

    world: VirtualWorld
    case: Case
    on_lost_host: Callable[[LaneHost], object]
    watch: Callable[[], object] = lambda: None
    hosts: list[LaneHost] = field(default_factory=list)
    workers: list[LaneWorker] = field(default_factory=list)
    slow: set[int] = field(default_factory=set)
    micro_steps: int = 0
    last_boundaries: dict[int, int] = field(default_factory=dict)
    _schedule: bytes = b""
    _late: dict[int, Stepper] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._schedule = self.case.schedule

    def run(self) -> None:
        """Until all hosts have ended, and nothing can move any more. Raises `Hang`."""
        while self.alive():
            if not self.move() and not self.pass_time() and self.alive():
                raise Hang(f"nobody can move: {self._waiting_hosts()}")
        while self.move() or self.pass_time():
            pass

    def alive(self) -> list[LaneHost]:
        """Hosts that have not ended, on ranks that are not stopped."""
        stopped_ranks = self.world.stopped
        return [h for h in self.hosts if not h.ended and h.ranks[0] not in stopped_ranks]

    def move(self) -> bool:
        """One micro-step, if one can happen. Raises `Hang` when there were too many."""
        self.watch()
        lane = self._choose()
        if lane is None:
            return False
        self.micro_steps += 1
        if self.micro_steps > MOST:
            raise Hang(f"no end after {MOST} micro-steps: {self._waiting_hosts()}")
        lane.step()
        if isinstance(lane, LaneWorker):
            lane.since = self.micro_steps
        if isinstance(lane, LaneHost) and lane.error is not None:
            self.on_lost_host(lane)
        return True

    def pass_time(self) -> bool:
        """Nothing can move: the next deadline strikes; whether there is any.

        Ballots are waited for less long than operations have, and those less long than hosts wait.
        Of equal deadlines that comes first which began first.
        """
        moving = [w for w in self.workers if w.ranks[0] not in self.world.stopped]
        voters = [worker for worker in moving if worker.votes]
        if any(voter.strike() for voter in sorted(voters, key=_since)) or self.world.expire():
            return True
        lanes: list[LaneWorker | LaneHost] = [*moving, *self.alive()]
        return any(lane.strike() for lane in lanes)

    def turned(self, rank: int, step: int) -> None:
        """A host has come to another boundary: others lag now; behind the last, all is eager."""
        self.last_boundaries[rank] = step
        if min(self.last_boundaries.values()) >= self.case.steps:
            self._schedule, self._late = b"", {}
            self.slow.clear()
            return
        lagging = {
            (lag.rank, lag.kind)
            for lag in self.case.lags
            if lag.first <= self.last_boundaries.get(lag.rank, 0) <= lag.last
        }
        self._late = {id(lane): lane for lane in self._lagging_steppers(lagging)} if lagging else {}

    def remove(self, rank: int) -> None:
        """The rank is gone."""
        self.world.kill(rank)
        self.workers = [worker for worker in self.workers if worker.ranks[0] != rank]
        self.hosts[rank].close()

    def _choose(self) -> Stepper | None:
        lanes: list[Stepper] = [*self.world.steppers, *self.world.network.moving]
        lanes += self.workers
        lanes += self.hosts
        start = self._number(len(lanes))
        stopped_ranks, lagging, fallback = self.world.stopped, self._late, None
        for lane in lanes[start:] + lanes[:start]:
            if not lane.ready() or (stopped_ranks and not stopped_ranks.isdisjoint(lane.ranks)):
                continue
            if id(lane) not in lagging and not self._creeps(lane):
                return lane
            fallback = fallback or lane
        return fallback

    def _creeps(self, lane: Stepper) -> bool:
        if not self.slow or self.micro_steps % SLOWNESS == 0:
            return False
        return not self.slow.isdisjoint(lane.ranks)

    def _number(self, count: int) -> int:
        if not self._schedule:
            return 0
        return self._schedule[self.micro_steps % len(self._schedule)] % count

    def _lagging_steppers(self, lagging: set[tuple[int, str]]) -> Sequence[Stepper]:
        own: list[LaneWorker | LaneHost] = [*self.workers, *self.hosts]
        steppers: list[Stepper] = [lane for lane in own if (lane.ranks[0], lane.kind) in lagging]
        for rank, kind in lagging:
            if kind in set(Role):
                steppers.append(self.world.device(rank).stream(Role(kind))._queue)
        outboxes = {rank for rank, kind in lagging if kind == "outbox"}
        steppers += [
            lane
            for lane in self.world.steppers
            if type(lane).__name__.endswith("Outbox") and not outboxes.isdisjoint(lane.ranks)
        ]
        return steppers

    def _waiting_hosts(self) -> str:
        hosts = [
            f"rank {h.ranks[0]} at boundary {self.last_boundaries.get(h.ranks[0])}"
            for h in self.alive()
        ]
        return ", ".join(hosts) or "only workers"


def _since(worker: LaneWorker) -> int:
    return worker.since
