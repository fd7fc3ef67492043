"""The same events to a native router and to the slow one, and where they first differ."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from helpers.references.reference_front_end import SlowFront
from helpers.references.reference_push_rules import FastPhi
from helpers.references.reference_routing_rules import slow_front

from equipoise.balancer.requests.policy import (
    Capacity,
    Decision,
    Request,
    RequestId,
    WorkerChange,
    WorkerReport,
    WorkerState,
)
from equipoise.balancer.requests.policy_settings import RoutingPolicySettings
from equipoise.balancer.requests.request_router import RequestRouter

Draw: TypeAlias = tuple[str, int, int]
"""What is to happen, and two numbers to say to whom, and how much."""
KINDS = (
    *("arrive",) * 8,
    *("step",) * 6,
    *("tokens", "finish", "abort", "report", "report", "arrive to one", "running"),
    *("lose", "drain", "serve", "serve", "resize", "add", "decide"),
)
SLOTS = (None, 0, 1, 2, 3, 5, 9)
ROOMS = (None, None, 5, 30, 60, 100)


@dataclass
class Play:
    """Who is where, as the router's decisions say; events are drawn by what is possible."""

    native: RequestRouter
    slow: SlowFront
    names: int = 0
    homes: dict[int, int] = field(default_factory=dict)
    pooled: list[int] = field(default_factory=list)
    finished: int = 0
    is_forced: bool = False

    def difference(self, draws: Sequence[Draw]) -> str | None:
        """What differed first, if anything did."""
        for number, (kind, a, b) in enumerate(draws):
            happening = _HAPPENINGS[kind](self, a, b)
            if happening is None:
                continue
            mismatch = self.compare(*happening, arrival=kind.startswith("arrive"))
            if mismatch is not None:
                return f"event {number}, {kind}: {mismatch}"
        return None

    def compare(self, decision: Decision, lost_names: set[int], arrival: bool) -> str | None:
        expected = self.dispatch(decision, arrival)
        actual = [(a.request, a.worker) for a in decision.assignments]
        for name, worker in expected:
            self.pooled.remove(name)
            self.homes[name] = worker
        size = range(self.slow.size)
        pairs = [
            ("assignments", actual, expected),
            ("lost", set(decision.lost), lost_names),
            ("loads", self.native.loads, [self.slow.load(w) for w in size]),
            ("counts", self.native.counts, [self.slow.count(w) for w in size]),
            ("pooled", self.native.unassigned, len(self.pooled)),
            ("due", decision.due, self.is_due()),
        ]
        return next((f"{what}: {a}, not {b}" for what, a, b in pairs if a != b), None)

    def dispatch(self, decision: Decision, arrival: bool) -> list[tuple[int, int]]:
        if isinstance(self.slow.policy, FastPhi):
            workers = {a.request: a.worker for a in decision.assignments}
            self.slow.policy.follow = workers.get
        if self.is_forced:
            self.is_forced = False
            return list(self.slow.dispatch())
        return list(self.slow.dispatch_between_steps(arrival))

    def is_due(self) -> bool:
        """Whether more is decided when the step is over."""
        waiting = [
            r for r in self.slow.requests.values() if r.worker is None and r.pinned is not None
        ]
        free = sum(self.slow.free(w) for w in range(self.slow.size))
        return self.slow.is_mid_step and bool(self.slow.pool or waiting) and free > 0

    def workers(self, *states: WorkerState) -> list[int]:
        return [w for w in range(self.slow.size) if self.slow.workers[w].state in states]

    def forget(self, name: int) -> None:
        if self.homes.pop(name, None) is None:
            self.pooled.remove(name)


Happening: TypeAlias = tuple[Decision, set[int]]
"""What the native router decided, and which requests were lost by the slow one."""


def _arrive(play: Play, a: int, b: int, pinned: int | None = None) -> Happening:
    name, play.names = play.names, play.names + 1
    size, expected = 1 + a % 40, 1 + b % 12
    hits = None if b % 3 else [(a * 7 + w * 5) % size for w in range(play.slow.size)]
    request = Request(id=name, size=size, worker=pinned, hits=hits, expected=expected)
    decision = play.native.on_arrival(request)
    play.pooled.append(name)
    play.slow.arrive(name, size, pinned, hits or (), expected)
    return decision, set()


def _arrive_to_one(play: Play, a: int, b: int) -> Happening | None:
    serving = play.workers(WorkerState.SERVING)
    return _arrive(play, a, b, serving[b % len(serving)]) if serving else None


def _running(play: Play, a: int, b: int) -> Happening | None:
    """A worker has a request already, with a few tokens or none."""
    there = play.workers(WorkerState.SERVING, WorkerState.DRAINING)
    if not there:
        return None
    name, play.names = play.names, play.names + 1
    worker, size, tokens = there[b % len(there)], 1 + a % 40, b % 4
    decision = play.native.on_running(Request(id=name, size=size), worker, tokens)
    play.homes[name] = worker
    play.slow.adopt(name, size, worker, tokens)
    return decision, set()


def _step(play: Play, a: int, b: int) -> Happening | None:
    """Every bound request of some workers makes a few tokens; every few of them end."""
    names = [n for n, w in play.homes.items() if (a >> w % 8) & 1]
    finished = [n for n in names if (n * 31 + b) % 5 == 0]
    return _tell(play, dict.fromkeys(names, 1 + b % 3), finished)


def _tokens(play: Play, a: int, b: int) -> Happening | None:
    names = list(play.homes)[a % 7 :: 2]
    return _tell(play, {name: (b + name) % 4 for name in names}, [])


def _tell(play: Play, counts: dict[int, int], finished: list[int]) -> Happening:
    token_counts: dict[RequestId, int] = {name: tokens for name, tokens in counts.items()}
    decision = play.native.on_tokens(token_counts, finished)
    play.slow.begin_event([name for name, tokens in counts.items() if tokens])
    for name, tokens in counts.items():
        play.slow.grow(name, tokens)
    for name in finished:
        play.slow.finish(name)
        play.forget(name)
    return decision, set()


def _finish(play: Play, a: int, b: int) -> Happening | None:
    names = list(play.homes)
    if not names:
        return None
    name = names[a % len(names)]
    decision = play.native.on_finish(name)
    play.slow.begin_event([])
    play.slow.finish(name)
    play.forget(name)
    return decision, set()


def _abort(play: Play, a: int, b: int) -> Happening | None:
    names = [*play.homes, *play.pooled]
    if not names:
        return None
    name = names[a % len(names)]
    decision = play.native.on_abort(name)
    play.slow.abort(name)
    play.forget(name)
    return decision, set()


def _lose(play: Play, a: int, b: int) -> Happening:
    worker = a % play.slow.size
    decision = play.native.on_worker_change(WorkerChange(worker=worker, state=WorkerState.LOST))
    lost_names = play.slow.lose(worker)
    for name in lost_names:
        play.forget(name)
    for name in [name for name, home in play.homes.items() if home == worker]:
        del play.homes[name]
        play.pooled.append(name)
    return decision, lost_names


def _become(
    state: WorkerState, *before: WorkerState
) -> Callable[[Play, int, int], Happening | None]:
    def become(play: Play, a: int, b: int) -> Happening | None:
        able = play.workers(*before)
        if not able:
            return None
        worker = able[a % len(able)]
        play.slow.set_state(worker, state)
        return play.native.on_worker_change(WorkerChange(worker=worker, state=state)), set()

    return become


def _resize(play: Play, a: int, b: int) -> Happening:
    worker = a % play.slow.size
    capacity = Capacity(slots=SLOTS[b % len(SLOTS)], kv_tokens=ROOMS[a % len(ROOMS)])
    play.slow.set_capacity(worker, capacity)
    return play.native.on_worker_change(WorkerChange(worker=worker, capacity=capacity)), set()


def _add(play: Play, a: int, b: int) -> Happening | None:
    if play.slow.size >= 6:
        return None
    play.slow.add_worker()
    return play.native.on_worker_change(WorkerChange(worker=play.slow.size - 1)), set()


def _report(play: Play, a: int, b: int) -> Happening:
    worker = a % play.slow.size
    usage = (b % 9) / 8
    report = WorkerReport(waiting=a % 4, running=b % 5, tokens=(a + b) % 90, kv_usage=usage)
    play.slow.report(worker, report)
    return play.native.on_worker_change(WorkerChange(worker=worker, report=report)), set()


def _decide(play: Play, a: int, b: int) -> Happening:
    play.is_forced = True
    return play.native.decide(), set()


_HAPPENINGS: dict[str, Callable[[Play, int, int], Happening | None]] = {
    "arrive": _arrive,
    "arrive to one": _arrive_to_one,
    "running": _running,
    "step": _step,
    "tokens": _tokens,
    "finish": _finish,
    "abort": _abort,
    "lose": _lose,
    "drain": _become(WorkerState.DRAINING, WorkerState.SERVING, WorkerState.DRAINING),
    "serve": _become(WorkerState.SERVING, WorkerState.DRAINING, WorkerState.LOST),
    "resize": _resize,
    "add": _add,
    "report": _report,
    "decide": _decide,
}


MakeFront: TypeAlias = Callable[[RoutingPolicySettings, Sequence[Capacity]], SlowFront]


def difference(
    settings: RoutingPolicySettings,
    workers: Sequence[Capacity],
    draws: Sequence[Draw],
    make: MakeFront = slow_front,
) -> str | None:
    """Of the native router from the published rule, on these events."""
    return Play(RequestRouter(settings, workers), make(settings, workers)).difference(draws)
