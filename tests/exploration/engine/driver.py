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
        lost: called when a host has raised.
        watch: called before each micro-step.
        hosts: of the ranks.
        workers: of the engines.
        slow: ranks that get few choices.
        moved: micro-steps so far.
        reached: the boundary that each rank has come to.
    """

    world: VirtualWorld
    case: Case
    lost: Callable[[LaneHost], object]
    watch: Callable[[], object] = lambda: None
    hosts: list[LaneHost] = field(default_factory=list)
    workers: list[LaneWorker] = field(default_factory=list)
    slow: set[int] = field(default_factory=set)
    moved: int = 0
    reached: dict[int, int] = field(default_factory=dict)
    _schedule: bytes = b""
    _late: dict[int, Stepper] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._schedule = self.case.schedule

    def run(self) -> None:
        """Until all hosts have ended, and nothing can move any more. Raises `Hang`."""
        while self.alive():
            if not self.move() and not self.pass_time() and self.alive():
                raise Hang(f"nobody can move: {self._stuck()}")
        while self.move() or self.pass_time():
            pass

    def alive(self) -> list[LaneHost]:
        """Hosts that have not ended, on ranks that are not stopped."""
        stopped = self.world.stopped
        return [h for h in self.hosts if not h.ended and h.ranks[0] not in stopped]

    def move(self) -> bool:
        """One micro-step, if one can happen. Raises `Hang` when there were too many."""
        self.watch()
        lane = self._choose()
        if lane is None:
            return False
        self.moved += 1
        if self.moved > MOST:
            raise Hang(f"no end after {MOST} micro-steps: {self._stuck()}")
        lane.step()
        if isinstance(lane, LaneWorker):
            lane.since = self.moved
        if isinstance(lane, LaneHost) and lane.error is not None:
            self.lost(lane)
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
        self.reached[rank] = step
        if min(self.reached.values()) >= self.case.steps:
            self._schedule, self._late = b"", {}
            self.slow.clear()
            return
        wanted = {
            (lag.rank, lag.kind)
            for lag in self.case.lags
            if lag.first <= self.reached.get(lag.rank, 0) <= lag.last
        }
        self._late = {id(lane): lane for lane in self._named(wanted)} if wanted else {}

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
        stopped, late, put_off = self.world.stopped, self._late, None
        for lane in lanes[start:] + lanes[:start]:
            if not lane.ready() or (stopped and not stopped.isdisjoint(lane.ranks)):
                continue
            if id(lane) not in late and not self._creeps(lane):
                return lane
            put_off = put_off or lane
        return put_off

    def _creeps(self, lane: Stepper) -> bool:
        if not self.slow or self.moved % SLOWNESS == 0:
            return False
        return not self.slow.isdisjoint(lane.ranks)

    def _number(self, count: int) -> int:
        if not self._schedule:
            return 0
        return self._schedule[self.moved % len(self._schedule)] % count

    def _named(self, wanted: set[tuple[int, str]]) -> Sequence[Stepper]:
        own: list[LaneWorker | LaneHost] = [*self.workers, *self.hosts]
        found: list[Stepper] = [lane for lane in own if (lane.ranks[0], lane.kind) in wanted]
        for rank, kind in wanted:
            if kind in set(Role):
                found.append(self.world.device(rank).stream(Role(kind))._queue)
        outboxes = {rank for rank, kind in wanted if kind == "outbox"}
        found += [
            lane
            for lane in self.world.steppers
            if type(lane).__name__.endswith("Outbox") and not outboxes.isdisjoint(lane.ranks)
        ]
        return found

    def _stuck(self) -> str:
        hosts = [
            f"rank {h.ranks[0]} at boundary {self.reached.get(h.ranks[0])}" for h in self.alive()
        ]
        return ", ".join(hosts) or "only workers"


def _since(worker: LaneWorker) -> int:
    return worker.since
