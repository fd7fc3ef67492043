"""Front ends that route to workers in lockstep, step by step, without processes and without time.

Each front end is a `RequestDispatcher`, as the proxy and vLLM's client have one. Messages between
front ends and a policy that they share pass in turns of an event loop that is wound by hand, so
that a run is the same every time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from random import Random

import numpy as np
import numpy.typing as npt

from equipoise.balancer.requests.dispatcher import (
    BoundToWorker,
    DispatchedRequest,
    FailureAction,
    Queued,
    RequestDispatcher,
)
from equipoise.balancer.requests.policy import Capacity, RoutingPolicy, WorkerReport
from equipoise.balancer.requests.policy_server import PolicyServer
from equipoise.balancer.requests.policy_settings import RoutingPolicySettings, WhenFull
from equipoise.balancer.requests.remote_policy import RemotePolicy, connect_in_process
from equipoise.balancer.requests.request_router import RequestRouter
from equipoise.balancer.requests.simulation import BACKLOG_PER_WORKER
from equipoise.balancer.requests.workload import Workload

STEP_SECONDS, REPORT_STEPS = 0.025, 4
"""Steps of 25 ms, and reports every 100 ms, as vLLM's coordinator sends them."""
MAX_TURNS = 50
"""In which everything comes to rest; a decision takes five or six."""


class Sharing(Enum):
    """What front ends have in common."""

    ONE_POLICY = "one policy"
    REPORTS = "reports"
    """Each has a policy of its own, which knows of the others from reports of the workers."""


@dataclass(order=True)
class Timer:
    """A callback that is due at `at`."""

    at: float
    number: int
    callback: Callable[[], object] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        """As `dispatcher.Timer`."""
        self.cancelled = True


class Turns:
    """A clock whose turns and time pass when it is told."""

    def __init__(self) -> None:
        self._now, self._count = 0.0, 0
        self._soon: list[Timer] = []
        self._later: list[Timer] = []

    def time(self) -> float:
        """As `dispatcher.Clock`."""
        return self._now

    def call_soon(self, callback: Callable[[], object]) -> Timer:
        """As `dispatcher.Clock`."""
        self._soon.append(self._timer(0.0, callback))
        return self._soon[-1]

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        """As `dispatcher.Clock`."""
        timer = self._timer(delay, callback)
        heappush(self._later, timer)
        return timer

    def turn(self) -> bool:
        """One turn of the loop; returns whether anything was called."""
        due, self._soon = self._soon, []
        for timer in due:
            if not timer.cancelled:
                timer.callback()
        return bool(due)

    def settle(self) -> None:
        """Turns until nothing is to be called."""
        for _ in range(MAX_TURNS):
            if not self.turn():
                return
        raise RuntimeError(f"it does not come to rest in {MAX_TURNS} turns")

    def advance(self, seconds: float) -> None:
        """Let time pass, and call what is due."""
        self._now += seconds
        while self._later and self._later[0].at <= self._now:
            timer = heappop(self._later)
            if not timer.cancelled:
                timer.callback()
        self.settle()

    def _timer(self, delay: float, callback: Callable[[], object]) -> Timer:
        self._count += 1
        return Timer(self._now + delay, self._count, callback)


@dataclass
class DelayedClock:
    """The clock of links on which a message takes `seconds`."""

    turns: Turns
    seconds: float

    def time(self) -> float:
        """As `dispatcher.Clock`."""
        return self.turns.time()

    def call_soon(self, callback: Callable[[], object]) -> Timer:
        """A message is sent."""
        return self.call_later(self.seconds, callback)

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        """As `dispatcher.Clock`."""
        return self.turns.call_later(delay, callback)


class ServedRequest(DispatchedRequest):
    """A request that the workers serve: `output` tokens, of which it has `made` some."""

    def __init__(self, number: int, size: int, output: int, front_end: int) -> None:
        super().__init__(number, size)
        self.output, self.front_end, self.made = output, front_end, 0
        self.arrived_at_worker: Callable[[ServedRequest], None]

    def on_bound(self, bound: BoundToWorker) -> None:
        """It is at the worker at once."""
        self.arrived_at_worker(self)


@dataclass(frozen=True)
class Steps:
    """What the steps were.

    Attributes:
        loads: KV tokens of running requests, int64 [steps, workers].
        running: requests that ran, int64 [steps].
        superseded: assignments that crossed with what ended them.
    """

    loads: npt.NDArray[np.int64]
    running: npt.NDArray[np.int64]
    superseded: int

    def imbalance(self, slots: int, busy: float = 0.9, edge: float = 0.15) -> float:
        """Mean of workers x largest - sum, in tokens, over the steps with so many slots taken, but
        for the first and last of them."""
        workers = self.loads.shape[1]
        loads = self.loads[self.running >= busy * workers * slots]
        cut = round(edge * len(loads))
        counted = loads[cut : len(loads) - cut]
        return float((workers * counted.max(axis=1) - counted.sum(axis=1)).mean())


@dataclass(frozen=True)
class FrontEnds:
    """Front ends and the workers behind them.

    Attributes:
        count: number of front ends; clients take them in turn.
        sharing: what they have in common.
        link_seconds: that a message takes between the policy and each front end.
        prompt_links: so many front ends have links that take no time all the same.
        policy: name of the policy.
        workers: number of workers.
        slots: requests that each runs at once.
    """

    count: int
    sharing: Sharing = Sharing.ONE_POLICY
    link_seconds: float = 0.0
    prompt_links: int = 0
    policy: str = "fit"
    workers: int = 8
    slots: int = 16


class Fleet:
    """Workers in lockstep behind front ends, in a closed loop of clients.

    Args:
        scenario: which front ends and workers.
        seed: of the order in which the tokens of a step come.
    """

    def __init__(self, scenario: FrontEnds, seed: int) -> None:
        self._scenario, self._workers, self._slots = scenario, scenario.workers, scenario.slots
        self._dice, self._clock = Random(seed), Turns()
        self._at_workers: list[list[ServedRequest]] = [[] for _ in range(self._workers)]
        self._shared: list[RemotePolicy] = []
        front_ends = scenario.count
        if scenario.sharing is Sharing.ONE_POLICY:
            names = [str(number) for number in range(self._workers)]
            server = PolicyServer(self._policy(1, 0), names, self._clock, _raise)
            self._shared = [RemotePolicy(self._clock, _raise) for _ in range(front_ends)]
            self._dispatchers = [self._dispatcher(policy) for policy in self._shared]
            slow = DelayedClock(self._clock, scenario.link_seconds)
            for number, remote in enumerate(self._shared):
                late = scenario.link_seconds > 0 and number >= scenario.prompt_links
                clock = slow if late else self._clock
                connect_in_process(server, remote, self._dispatchers[number], clock)
        else:
            policies = [self._policy(front_ends, number) for number in range(front_ends)]
            self._dispatchers = [self._dispatcher(policy) for policy in policies]

    def serve(self, workload: Workload) -> Steps:
        """Serve all requests, four waiting for each worker."""
        todo = self._requests(workload)
        loads, running = [], []
        step = 0
        while self._refill(todo):
            self._report(step)
            batch = [one[: self._slots] for one in self._at_workers]
            loads.append([sum(one.size + one.made for one in there) for there in batch])
            running.append(sum(map(len, batch)))
            self._tell_tokens(batch)
            self._clock.advance(STEP_SECONDS)
            step += 1
        superseded = sum(one.superseded for one in self._shared)
        return Steps(np.array(loads), np.array(running), superseded)

    def _policy(self, front_ends: int, front_end: int) -> RoutingPolicy:
        settings = RoutingPolicySettings(
            name=self._scenario.policy,
            when_full=WhenFull.HOLD,
            front_ends=front_ends,
            front_end=front_end,
        )
        return RequestRouter(settings, [Capacity(slots=self._slots)] * self._workers)

    def _dispatcher(self, policy: RoutingPolicy) -> RequestDispatcher:
        return RequestDispatcher(policy, self._workers, self._clock, _raise)

    def _requests(self, workload: Workload) -> Iterator[ServedRequest]:
        pairs = zip(workload.prompts.tolist(), workload.outputs.tolist(), strict=True)
        for number, (size, output) in enumerate(pairs):
            request = ServedRequest(number, size, output, number % len(self._dispatchers))
            request.arrived_at_worker = self._arrived
            yield request

    def _arrived(self, request: ServedRequest) -> None:
        assert request.worker is not None
        self._at_workers[request.worker].append(request)

    def _refill(self, todo: Iterator[ServedRequest]) -> bool:
        """Let clients ask until enough wait; returns whether there is anything to do still."""
        most = BACKLOG_PER_WORKER * self._workers
        waiting = sum(one.queued for one in self._dispatchers)
        while waiting < most and (request := next(todo, None)) is not None:
            self._dispatchers[request.front_end].submit(request)
            self._clock.settle()
            waiting += isinstance(request.status, Queued)
        return any(self._at_workers) or waiting > 0

    def _report(self, step: int) -> None:
        if step % REPORT_STEPS or self._scenario.sharing is Sharing.ONE_POLICY:
            return
        for worker, there in enumerate(self._at_workers):
            tokens = sum(one.size + one.made for one in there)
            taken = min(len(there), self._slots)
            report = WorkerReport(
                waiting=len(there) - taken, running=taken, tokens=tokens, kv_usage=0.5
            )
            for dispatcher in self._dispatchers:
                dispatcher.report_worker(worker, report)
        self._clock.settle()

    def _tell_tokens(self, batch: list[list[ServedRequest]]) -> None:
        """Each worker tells each front end of its requests, one after the other in any order, and
        messages of one are on their way while others come."""
        messages = [
            (worker, front_end)
            for worker in range(self._workers)
            for front_end in range(len(self._dispatchers))
        ]
        self._dice.shuffle(messages)
        by_message: dict[tuple[int, int], list[ServedRequest]] = {}
        for worker, there in enumerate(batch):
            for request in there:
                by_message.setdefault((worker, request.front_end), []).append(request)
        for message in messages:
            for request in by_message.get(message, ()):
                self._tell(self._dispatchers[message[1]], request)
            for _ in range(self._dice.randrange(4)):
                self._clock.turn()
        self._clock.settle()

    def _tell(self, dispatcher: RequestDispatcher, request: ServedRequest) -> None:
        request.made += 1
        if isinstance(request.status, BoundToWorker):
            dispatcher.start(request, request.status)
        assert request.worker is not None
        there = self._at_workers[request.worker]
        dispatcher.report_tokens(request, request.made)
        if request.made == request.output:
            there.remove(request)
            dispatcher.finish(request)


def _raise(error: Exception) -> FailureAction:
    raise error
