"""A dispatcher driven in any order, and a simple model of what must come of it."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any

from helpers.fakes.failing_policies import FailingPolicy
from helpers.fakes.manual_clock import ManualClock
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from equipoise.balancer.requests.dispatcher import (
    Aborting,
    BoundToWorker,
    CloseReason,
    DispatchedRequest,
    FailureAction,
    Queued,
    RequestClosed,
    RequestDispatcher,
    Running,
)
from equipoise.balancer.requests.policy import (
    Capacity,
    Decision,
    Request,
    RoutingPolicy,
    WorkerReport,
    WorkerState,
)
from equipoise.balancer.requests.request_router import RequestRouter
from equipoise.hal.errors import WorkerError

WORKERS, SLOTS, MAX_QUEUED, QUEUE_TIMEOUT = 3, 2, 5, 5.0
SERVING, DRAINING, LOST = WorkerState
REPORT = WorkerReport(waiting=0, running=1, tokens=9, kv_usage=0.1)
INDEX = st.integers(0, 99)
Factory = Callable[[list[int], list[int | None]], RoutingPolicy]


class Phase(Enum):
    """Of a request, as the model has it."""

    QUEUED = Queued
    BOUND = BoundToWorker
    RUNNING = Running
    ABORTING = Aborting
    ENDED = RequestClosed


OPEN = (Phase.QUEUED, Phase.BOUND, Phase.RUNNING, Phase.ABORTING)


class ModelRequest(DispatchedRequest):
    """A request, and beside it what the model knows of it from what it was told."""

    def __init__(self, machine: "DispatcherMachine", number: int, size: int, required: Any) -> None:
        super().__init__(number, size, required)
        self.machine = machine
        self.phase = Phase.QUEUED
        self.bounds = [BoundToWorker(0)]
        self.at = -1
        self.made = 0
        self.ends = 0

    def on_bound(self, bound: BoundToWorker) -> None:
        assert self.phase is Phase.QUEUED
        assert bound.worker in self.machine.may_bind, "to a worker that does not serve"
        assert self.required_worker in (None, bound.worker)
        self.phase, self.at = Phase.BOUND, bound.worker
        self.bounds.append(bound)

    def on_requeued(self) -> None:
        assert self.phase is Phase.BOUND
        assert self.machine.states[self.at] is LOST
        self.phase = Phase.QUEUED

    def on_closed(self, reason: CloseReason) -> None:
        assert reason not in (CloseReason.FINISHED, CloseReason.ABORTED)
        self.end()

    def end(self) -> None:
        assert self.phase in OPEN, "it has ended already"
        self.phase = Phase.ENDED
        self.ends += 1


class OrderCheckingPolicy(FailingPolicy):
    """A strict policy that also watches over what its caller must not do."""

    machine: "DispatcherMachine"

    def on_arrival(self, request: Request) -> Decision:
        late = [one.request_id for one in self.machine.requests if one.phase is Phase.ENDED]
        if not self.failed:  # else what was left out then is missing now
            assert not any(map(self.knows, late)), "ends are told before arrivals"
        return super().on_arrival(request)


class DispatcherMachine(RuleBasedStateMachine):
    """Any order of events, by the strict policy; `action` follows from its failure."""

    factory: Factory = OrderCheckingPolicy
    action = FailureAction.STOP_POLICY

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.policy = type(self).factory([SLOTS] * WORKERS, [None] * WORKERS)
        if isinstance(self.policy, OrderCheckingPolicy):
            self.policy.machine = self
        self.requests: list[ModelRequest] = []
        self.unexpected: list[Exception] = []
        self.health = [SERVING] * WORKERS
        self.drained: set[int] = set()
        self.removed: set[int] = set()
        self.states = list(self.health)
        self.may_bind = set(range(WORKERS))
        self.dispatcher = RequestDispatcher(
            self.policy, WORKERS, self.clock, self.failed, MAX_QUEUED, QUEUE_TIMEOUT
        )

    @property
    def broken(self) -> bool:
        """Whether the policy has failed, as it was told to."""
        return isinstance(self.policy, FailingPolicy) and self.policy.failed

    def failed(self, error: Exception) -> FailureAction:
        if not self.broken:
            self.unexpected.append(error)
        return self.action

    def pick(self, index: int) -> ModelRequest:
        return self.requests[index % len(self.requests)]

    @rule(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
    def submit_several(self, sizes: list[int]) -> None:
        for size in sizes:
            self.submit(size)

    @rule(size=st.integers(1, 9), required=st.integers(0, WORKERS - 1))
    def submit_for_worker(self, size: int, required: int) -> None:
        self.submit(size, required)

    def submit(self, size: int, required: int | None = None) -> None:
        request = ModelRequest(self, len(self.requests), size, required)
        self.requests.append(request)
        full = self.dispatcher.queued >= MAX_QUEUED
        self.dispatcher.submit(request)
        if isinstance(request.status, RequestClosed) and not self.broken:
            expected = {
                CloseReason.QUEUE_FULL: full,
                CloseReason.WORKER_UNAVAILABLE: required is not None
                and self.states[required] is not SERVING,
            }
            assert expected[request.status.reason]

    @precondition(lambda self: self.requests)
    @rule(index=INDEX, age=st.sampled_from((1, 1, 1, 2)))
    def start(self, index: int, age: int) -> None:
        request = self.pick(index)
        bound = request.bounds[-min(age, len(request.bounds))]
        current = request.phase is Phase.BOUND and bound is request.bounds[-1]
        assert self.dispatcher.start(request, bound) == current
        if current:
            request.phase, request.made = Phase.RUNNING, 1

    @precondition(lambda self: self.requests)
    @rule(index=INDEX, tokens=st.integers(0, 3))
    def report_tokens(self, index: int, tokens: int) -> None:
        request = self.pick(index)
        self.dispatcher.report_tokens(request, request.made + tokens)
        if request.phase in (Phase.RUNNING, Phase.ABORTING):
            request.made += tokens

    @precondition(lambda self: self.requests)
    @rule(index=INDEX, how=st.sampled_from(("finish", "abort")))
    def end(self, index: int, how: str) -> None:
        request = self.pick(index)
        getattr(self.dispatcher, how)(request)
        if request.phase is not Phase.ENDED:
            request.end()

    @precondition(lambda self: self.requests)
    @rule(index=INDEX)
    def begin_abort(self, index: int) -> None:
        request = self.pick(index)
        self.dispatcher.begin_abort(request)
        if request.phase in (Phase.BOUND, Phase.RUNNING):
            request.phase = Phase.ABORTING

    @precondition(lambda self: self.requests)
    @rule(index=INDEX, age=st.sampled_from((1, 1, 1, 2)))
    def retry(self, index: int, age: int) -> None:
        request = self.pick(index)
        bound = request.bounds[-min(age, len(request.bounds))]
        current = request.phase is Phase.BOUND and bound is request.bounds[-1]
        if current:
            request.phase = Phase.QUEUED
        self.dispatcher.retry(request, bound)
        others = self.may_bind - {bound.worker}
        if current and request.phase is Phase.BOUND and others:
            assert request.at != bound.worker or request.required_worker is not None

    @rule()
    def end_turn(self) -> None:
        self.clock.end_turn()

    @rule(seconds=st.sampled_from((0.1, 0.3, 3.0)))
    def advance(self, seconds: float) -> None:
        self.clock.end_turn()
        self.clock.advance(seconds)
        overdue = self.clock.now - QUEUE_TIMEOUT
        waits = [one.status for one in self.requests if isinstance(one.status, Queued)]
        assert all(one.since > overdue for one in waits)

    @rule(worker=INDEX, state=st.sampled_from(WorkerState))
    def set_health(self, worker: int, state: WorkerState) -> None:
        worker %= len(self.states)
        with self.changed(worker):
            self.health[worker] = state
        with self.refused(worker):
            self.dispatcher.set_health(worker, state)

    @rule(worker=INDEX, how=st.sampled_from(("drain_worker", "resume_worker")))
    def set_drained(self, worker: int, how: str) -> None:
        worker %= len(self.states)
        with self.changed(worker):
            (self.drained.add if how == "drain_worker" else self.drained.discard)(worker)
        with self.refused(worker):
            getattr(self.dispatcher, how)(worker)

    @rule(worker=INDEX)
    def report_worker(self, worker: int) -> None:
        worker %= len(self.states)
        with self.refused(worker):
            self.dispatcher.report_worker(worker, REPORT)

    @rule(worker=INDEX)
    def remove_worker(self, worker: int) -> None:
        worker %= len(self.states)
        with self.changed(worker):
            self.health[worker] = LOST
        with self.refused(worker):
            self.dispatcher.remove_worker(worker)
        self.removed.add(worker)

    @rule(state=st.sampled_from((SERVING, LOST)))
    def add_worker(self, state: WorkerState) -> None:
        expected = min(self.removed, default=len(self.states))
        self.may_bind.add(expected)
        try:
            worker = self.dispatcher.add_worker(Capacity(slots=SLOTS), state)
        except WorkerError:
            assert self.broken
            return
        assert worker == expected
        self.removed.discard(worker)
        self.drained.discard(worker)
        self.health[worker : worker + 1] = self.states[worker : worker + 1] = [state]

    @precondition(lambda self: isinstance(self.policy, FailingPolicy) and not self.policy.failed)
    @rule(events=st.integers(0, 40))
    def break_policy(self, events: int) -> None:
        """It fails after so many further events."""
        assert isinstance(self.policy, FailingPolicy)
        self.policy.left = min(self.policy.left, events)

    @contextmanager
    def changed(self, worker: int) -> Iterator[None]:
        """The model of a worker changes, unless it is removed."""
        if worker in self.removed:
            return_to = list(self.health), set(self.drained)
            yield
            self.health, self.drained = return_to
            return
        yield
        target = self.health[worker]
        if target is SERVING and worker in self.drained:
            target = DRAINING
        if target is DRAINING and self.states[worker] is LOST:
            target = LOST
        self.states[worker] = target
        if target is SERVING:
            self.may_bind.add(worker)

    @contextmanager
    def refused(self, worker: int) -> Iterator[None]:
        """The dispatcher refuses it where the worker is removed."""
        if worker not in self.removed:
            yield
            return
        with suppress(WorkerError):
            yield
            raise AssertionError(f"worker {worker} is removed")

    @invariant()
    def books_equal_the_model(self) -> None:
        for one in self.requests:
            if one.phase is Phase.ABORTING and self.states[one.at] is LOST:
                one.end()  # its worker is gone with it
            assert isinstance(one.status, one.phase.value), (one.status, one.phase)
            assert one.ends == (one.phase is Phase.ENDED)
            assert one.worker in (None, one.at)
            if one.phase is Phase.QUEUED and one.pinned_worker not in (None, one.required_worker):
                assert self.states[one.pinned_worker] is SERVING, "it would wait in vain"
        still = [one for one in self.requests if one.phase is not Phase.ENDED]
        phases = Counter(one.phase for one in still)
        assert set(self.dispatcher.requests) == set(still)
        assert self.dispatcher.queued == phases[Phase.QUEUED]
        assert [view.state for view in self.dispatcher.workers] == self.states
        for worker, view in enumerate(self.dispatcher.workers):
            there = [one for one in still if one.worker == worker]
            assert set(view.requests.values()) == set(there)
            assert view.load == sum(one.size + one.made for one in there)
            assert not there or view.state is not LOST
            assert len(there) <= SLOTS or self.broken
        self.may_bind = {w for w, state in enumerate(self.states) if state is SERVING}

    @invariant()
    def policy_is_told_nothing_out_of_turn(self) -> None:
        assert self.unexpected == []
        if self.broken and self.action is FailureAction.STOP_POLICY:
            assert isinstance(self.policy, FailingPolicy)
            assert (self.policy.after, self.dispatcher.policy) == (0, None)
            assert self.dispatcher.requests == ()

    def teardown(self) -> None:
        for one in self.requests:
            self.dispatcher.abort(one)
            if one.phase is not Phase.ENDED:
                one.end()
        self.clock.end_turn()
        self.books_equal_the_model()
        self.policy_is_told_nothing_out_of_turn()
        if isinstance(self.policy, RequestRouter):
            assert (sum(self.policy.loads), self.policy.unassigned) == (0, 0)
        elif isinstance(self.policy, OrderCheckingPolicy) and not self.broken:
            assert not any(self.policy.knows(one.request_id) for one in self.requests)


def machine(factory: Factory, action: FailureAction) -> type[DispatcherMachine]:
    """A machine over this policy."""

    class Machine(DispatcherMachine):
        pass

    Machine.factory, Machine.action = staticmethod(factory), action
    return Machine
