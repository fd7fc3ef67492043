"""What one front end knows, in plain Python: every figure is counted anew when it is asked for.

Written from docs/design/request-balance.md, not from csrc/requests/router_state.cpp.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from equipoise.balancer.requests.policy import Capacity, WorkerReport, WorkerState
from equipoise.balancer.requests.request_router import UNLIMITED

SILENT = WorkerReport(waiting=0, running=0, tokens=0, kv_usage=0.0)


@dataclass(eq=False)
class SlowRequest:
    """One that arrived and is not gone."""

    name: int
    size: int
    pinned: int | None = None
    hits: Sequence[int] = ()
    expected: int | None = None
    order: int = 0
    worker: int | None = None
    made: int = 0
    begun: bool = False
    seen: int | None = None
    first_step: int = 0

    @property
    def weight(self) -> int:
        return self.size + self.made

    def cached(self, worker: int) -> int:
        return min(self.size, self.hits[worker]) if worker < len(self.hits) else 0


@dataclass(eq=False)
class SlowWorker:
    """`others`: tokens and requests of other front ends, as reported last; None before that."""

    slots: int = UNLIMITED
    room: int = UNLIMITED
    state: WorkerState = WorkerState.SERVING
    report: WorkerReport = SILENT
    picks: list[int] = field(default_factory=list)
    others: tuple[int, int] | None = None


class SlowFront:
    """Workers, requests and a policy; `dispatch` says which request goes where now."""

    def __init__(
        self, policy: "SlowPolicy", workers: Sequence[Capacity], front_ends: int = 1
    ) -> None:
        self.policy, self.front_ends = policy, front_ends
        self.workers = [SlowWorker() for _ in workers]
        self.requests: dict[int, SlowRequest] = {}
        self.arrivals = 0
        self.made = 0
        self.bindings: list[tuple[int, int]] = []
        # Steps: who has told of this one, who is expected to, and whether anybody has.
        self.steps = 0
        self.with_token: set[int] = set()
        self.expected: set[int] = set()
        self.step_has_tokens = False
        self.overdue = False
        self.lockstep = True
        self.begins_at_once = True
        self.steps_by_caller = False
        self.step_tokens = 0
        for worker, capacity in enumerate(workers):
            self.set_capacity(worker, capacity)

    # What happens.

    def arrive(
        self, name: int, size: int, pinned: int | None, hits: Sequence[int], expected: int | None
    ) -> None:
        request = SlowRequest(name, size, pinned, hits, expected, self.arrivals)
        self.requests[name] = request
        self.arrivals += 1

    def adopt(self, name: int, size: int, worker: int, tokens: int) -> None:
        """A worker has it already."""
        self.arrive(name, size, None, (), None)
        self.bind(self.requests[name], worker)
        self.bindings.pop()
        self.requests[name].made, self.requests[name].begun = tokens, tokens > 0

    def grow(self, name: int, tokens: int) -> None:
        request = self.requests[name]
        request.made += tokens
        if tokens and not request.begun:
            request.begun = True
            self.begins_at_once = request.first_step == self.steps
        self.made += tokens
        if tokens:
            self.count_token(name)
        if tokens and not self.lockstep and not self.steps_by_caller:
            self.pass_steps(tokens)

    def finish(self, name: int) -> None:
        request = self.requests[name]
        if self.step_has_tokens and request.begun and name not in self.with_token:
            self.count_token(name)
        if not self.lockstep and not self.steps_by_caller and request.begun and request.made <= 1:
            self.steps += 1
        self.policy.finished(self.requests[name].made)
        self.forget(name)

    def abort(self, name: int) -> None:
        self.forget(name)

    def forget(self, name: int) -> None:
        del self.requests[name]
        self.with_token.discard(name)
        self.expected.discard(name)

    def count_steps_by_caller(self) -> None:
        """Each `dispatch` is a step."""
        self.steps_by_caller = True

    def begin_event(self, names: Iterable[int]) -> None:
        """All of them tell of one step: of another one, if somebody has told of this."""
        again = [name for name in names if name in self.with_token and self.requests[name].begun]
        self.overdue = bool(again and self.expected)
        if again and not self.steps_by_caller:
            self.end_step()

    def pass_steps(self, tokens: int) -> None:
        """Without a barrier: as many tokens as requests run are a step."""
        running = sum(request.begun for request in self.requests.values())
        self.step_tokens += tokens
        self.steps += self.step_tokens // running
        self.step_tokens %= running

    def count_token(self, name: int) -> None:
        if self.steps_by_caller or not self.lockstep:
            return
        self.expected.discard(name)
        self.with_token.add(name)
        self.step_has_tokens = True

    @property
    def is_mid_step(self) -> bool:
        """Whether a decision waits; one that binds to full workers never does."""
        half = self.lockstep and self.step_has_tokens and bool(self.expected) and not self.overdue
        return half and not self.policy.queues

    def end_step(self) -> None:
        self.steps += 1
        self.expected, self.with_token, self.step_has_tokens = self.with_token, set(), False

    def lose(self, worker: int) -> set[int]:
        """Names of requests that are gone with it."""
        lost_names = set()
        for request in list(self.requests.values()):
            if request.pinned == worker or (request.worker == worker and request.begun):
                self.forget(request.name)
                lost_names.add(request.name)
            elif request.worker == worker:
                request.worker = None
                self.with_token.discard(request.name)
                self.expected.discard(request.name)
        lost_worker = self.workers[worker]
        lost_worker.state, lost_worker.report, lost_worker.picks, lost_worker.others = (
            WorkerState.LOST,
            SILENT,
            [],
            None,
        )
        return lost_names

    def set_state(self, worker: int, state: WorkerState) -> None:
        self.workers[worker].state = state

    def set_capacity(self, worker: int, capacity: Capacity) -> None:
        state = self.workers[worker]
        state.slots = UNLIMITED if capacity.slots is None else capacity.slots
        state.room = UNLIMITED if capacity.kv_tokens is None else capacity.kv_tokens

    def add_worker(self) -> None:
        self.workers.append(SlowWorker())

    def report(self, worker: int, report: WorkerReport) -> None:
        state = self.workers[worker]
        state.report, state.picks = report, []
        if self.front_ends > 1:
            mine = sum(request.weight for request in self.members(worker))
            requests = report.waiting + report.running - len(self.members(worker))
            state.others = max(0, report.tokens - mine), max(0, requests)

    # What is so.

    @property
    def size(self) -> int:
        return len(self.workers)

    @property
    def present(self) -> int:
        return sum(worker.state is not WorkerState.LOST for worker in self.workers)

    @property
    def pool(self) -> list[SlowRequest]:
        """What any worker may serve, in order of arrival; without what no worker could hold."""
        rooms = [worker.room for w, worker in enumerate(self.workers) if self.serves(w)]
        most = UNLIMITED if self.policy.queues else max(rooms, default=-1)
        return [request for request in self._waiting(False) if request.size <= most]

    def members(self, worker: int) -> list[SlowRequest]:
        return [request for request in self.requests.values() if request.worker == worker]

    def alike(self, worker: int) -> int:
        """As many front ends as are taken to do as this one does."""
        return self.front_ends if self.workers[worker].others is None else 1

    def load(self, worker: int) -> int:
        mine = sum(request.weight for request in self.members(worker))
        return mine * self.alike(worker) + (self.workers[worker].others or (0, 0))[0]

    def count(self, worker: int) -> int:
        mine = len(self.members(worker)) * self.alike(worker)
        return mine + (self.workers[worker].others or (0, 0))[1]

    def pending(self, worker: int) -> int:
        """Prompt tokens that it has to compute, of requests without a token."""
        waiting = [request for request in self.members(worker) if not request.begun]
        return sum(r.size - r.cached(worker) for r in waiting) * self.alike(worker)

    def serves(self, worker: int) -> bool:
        return self.workers[worker].state is WorkerState.SERVING

    def free(self, worker: int) -> int:
        free_slots = self.workers[worker].slots - self.count(worker)
        return max(0, free_slots) if self.serves(worker) else 0

    def fits(self, worker: int, size: int) -> bool:
        return self.free(worker) > 0 and self.load(worker) + size <= self.workers[worker].room

    # What is decided.

    def bind(self, request: SlowRequest, worker: int) -> None:
        # Last among its worker's.
        self.requests[request.name] = self.requests.pop(request.name)
        request.worker = worker
        # Expected to tell of the next step, if the one that began last did.
        request.first_step = self.steps + self.step_has_tokens
        if self.begins_at_once and self.lockstep and not self.steps_by_caller:
            (self.with_token if self.step_has_tokens else self.expected).add(request.name)
        self.bindings.append((request.name, worker))

    def dispatch_between_steps(self, arrival: bool) -> list[tuple[int, int]]:
        """Nothing before all of a step is told, unless what arrives has nothing to wait for."""
        if self.step_has_tokens and not self.expected:
            self.end_step()
        free = sum(self.free(w) for w in range(self.size))
        spare = arrival and free >= len(self.pool)
        if self.is_mid_step and not spare:
            self.bindings = []
            return self.bindings
        return self.decide()

    def dispatch(self) -> list[tuple[int, int]]:
        """The step is over."""
        self.end_step()
        return self.decide()

    def decide(self) -> list[tuple[int, int]]:
        """Who may go to one worker only goes before those who may go to any."""
        self.bindings = []
        for request in self._waiting(True):
            worker = request.pinned
            assert worker is not None
            if self.serves(worker) if self.policy.queues else self.fits(worker, request.size):
                self.bind(request, worker)
        if self.pool:
            self.policy.dispatch(self)
        return self.bindings

    def _waiting(self, pinned: bool) -> list[SlowRequest]:
        waiting = [r for r in self.requests.values() if r.worker is None]
        matching = [r for r in waiting if (r.pinned is not None) is pinned]
        return sorted(matching, key=lambda request: request.order)


class SlowPolicy(Protocol):
    """Binds what is in the pool."""

    @property
    def queues(self) -> bool:
        """Whether it binds to full workers."""
        ...

    def dispatch(self, front: SlowFront) -> None: ...
    def finished(self, made: int) -> None: ...
