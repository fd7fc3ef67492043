"""`RequestDispatcher`: whatever happens, every request ends once, and the books are right."""

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any, get_args

import pytest
from helpers.fakes.failing_policies import FailingPolicy
from helpers.fakes.late_binding_policy import LateBinding
from helpers.fakes.manual_clock import ManualClock
from helpers.harnesses.dispatcher_machine import DispatcherMachine, OrderCheckingPolicy, machine
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from equipoise.balancer.requests.dispatcher import (
    TRANSITIONS,
    Aborting,
    BoundToWorker,
    CloseReason,
    DispatchedRequest,
    FailureAction,
    InvalidAssignment,
    New,
    Queued,
    RequestClosed,
    RequestDispatcher,
    RequestStatus,
    Running,
    WorkerView,
    load_imbalance,
)
from equipoise.balancer.requests.policy import (
    STEP_TIMEOUT_SECONDS,
    Assignment,
    Decision,
    Request,
    RequestId,
    RoutingPolicy,
    WorkerState,
)
from equipoise.balancer.requests.policy_factory import routing_policy_factory
from equipoise.balancer.requests.request_router import MAX_TOKENS, RequestRouter
from equipoise.hal.errors import PolicyError, RequestError

SKIP, STOP = FailureAction.SKIP_EVENT, FailureAction.STOP_POLICY
NATIVE = ("fit", "br0", "jsq_load", "round_robin")


@pytest.mark.parametrize("action", FailureAction)
def test_dispatcher_equals_model_for_any_order_of_events(action: FailureAction) -> None:
    run_state_machine_as_test(machine(OrderCheckingPolicy, action))


@pytest.mark.slow
@pytest.mark.parametrize("name", NATIVE)
def test_dispatcher_equals_model_with_native_policy(name: str) -> None:
    run_state_machine_as_test(machine(routing_policy_factory(name, {}), STOP))


def _without_flush(method: Callable[..., None]) -> Callable[..., None]:
    """The method, while tokens and ends that wait are not told."""

    def mutant(self: Any, *arguments: Any) -> None:
        self._flush = lambda: None
        method(self, *arguments)
        del self._flush

    return mutant


def _start_anyway(self: RequestDispatcher, request: DispatchedRequest, bound: Any) -> bool:
    return isinstance(request.status, BoundToWorker) and START(self, request, request.status)


def _tokens_without_load(
    self: RequestDispatcher, request: DispatchedRequest, view: WorkerView, tokens: int
) -> None:
    TOKENS(self, request, view, tokens)
    view.load -= tokens


def _closed_twice(self: RequestDispatcher, request: DispatchedRequest, closed: Any) -> None:
    GIVE_UP(self, request, closed)
    request.on_closed(closed.reason)


START, TOKENS, GIVE_UP = (
    RequestDispatcher.start,
    RequestDispatcher._add_tokens,
    RequestDispatcher._give_up,
)


def fails(how: settings) -> bool:
    """Whether the machine finds a mistake."""
    try:
        run_state_machine_as_test(DispatcherMachine, settings=how)
    except Exception:  # an assertion, or whatever the mistake leads to
        return True
    return False


MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "an arrival is told before ends": ("submit", _without_flush(RequestDispatcher.submit)),
    "a loss is told before tokens": (
        "_update_worker",
        _without_flush(RequestDispatcher._update_worker),
    ),
    "an abort is not told": ("_tell_abort", lambda self, name: None),
    "a lost worker keeps its requests": ("_empty_worker", lambda self, view: None),
    "a pin on a draining worker is kept": ("_move_pinned", lambda self, worker: None),
    "a binding that is over starts an answer": ("start", _start_anyway),
    "an aborted request runs on": ("begin_abort", lambda self, request: None),
    "a retry may go to the same worker": ("_pin", lambda self, request, without=None: None),
    "tokens are no load": ("_add_tokens", _tokens_without_load),
    "an overdue request is closed twice": ("_give_up", _closed_twice),
    "nobody is ever overdue": ("_arm_queue_timer", lambda self: None),
    "a policy that failed is called again": ("_drop_policy", lambda self: None),
    "every worker serves": ("_serves", lambda self, worker: True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_dispatcher_mutant_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestDispatcher, *MUTANTS[name])
    few = settings(
        max_examples=2000, stateful_step_count=50, phases=[Phase.generate], derandomize=True,
        database=None, report_multiple_bugs=False,
    )  # fmt: skip
    assert fails(few)


class Fleet:
    """A dispatcher over a policy, without an event loop.

    Attributes:
        failures: what the policy did wrong.
        closed: reasons for which requests were closed, by id.
    """

    def __init__(self, policy: RoutingPolicy, workers: int = 1, action: Any = SKIP) -> None:
        self.clock = ManualClock()
        self.failures: list[Exception] = []
        self.closed: dict[RequestId, CloseReason] = {}
        self.action = action
        self.dispatcher = RequestDispatcher(
            policy, workers, self.clock, self.failed, queue_timeout=60.0
        )

    def failed(self, error: Exception) -> FailureAction:
        self.failures.append(error)
        assert isinstance(self.action, FailureAction)
        return self.action

    def submit(self, name: str, size: int = 5, required: int | None = None) -> DispatchedRequest:
        closed = self.closed

        class RecordingRequest(DispatchedRequest):
            def on_closed(self, reason: CloseReason) -> None:
                closed[self.request_id] = reason

        request = RecordingRequest(name, size, required)
        self.dispatcher.submit(request)
        return request

    def run(self, request: DispatchedRequest, tokens: int = 1) -> DispatchedRequest:
        """The request, once it has made so many tokens."""
        assert isinstance(request.status, BoundToWorker)
        self.dispatcher.start(request, request.status)
        self.dispatcher.report_tokens(request, tokens)
        return request


class RecordingPolicy(LateBinding):
    """Records what it is told of tokens and ends, in order."""

    def __init__(self, slots: int = 8) -> None:
        super().__init__([slots])
        self.events: list[object] = []

    def on_tokens(
        self, counts: Mapping[RequestId, int], finished: Iterable[RequestId] = ()
    ) -> Decision:
        self.events.append((dict(counts), list(finished)))
        return super().on_tokens(counts, finished)

    def on_abort(self, request: RequestId) -> Decision:
        self.events.append(request)
        return super().on_abort(request)


@pytest.mark.parametrize(("before", "after"), list(product(get_args(RequestStatus), repeat=2)))
def test_dispatcher_makes_only_transitions_of_its_table(before: type, after: type) -> None:
    examples: dict[type, RequestStatus] = {
        New: New(), Queued: Queued(0.0), BoundToWorker: BoundToWorker(0), Running: Running(0),
        Aborting: Aborting(0), RequestClosed: RequestClosed(CloseReason.ABORTED),
    }  # fmt: skip
    paths = {
        New: (), Queued: (Queued,), BoundToWorker: (Queued, BoundToWorker),
        Running: (Queued, BoundToWorker, Running), Aborting: (Queued, BoundToWorker, Aborting),
        RequestClosed: (RequestClosed,),
    }  # fmt: skip
    dispatcher, request = Fleet(LateBinding([1])).dispatcher, DispatchedRequest("a", 5)
    for status in paths[before]:
        dispatcher._set_status(request, examples[status])
    if after in TRANSITIONS[before]:
        dispatcher._set_status(request, examples[after])
        assert request.status == examples[after]
    else:
        with pytest.raises(RequestError, match="'a' cannot become"):
            dispatcher._set_status(request, examples[after])
        assert isinstance(request.status, before)


def test_dispatcher_refuses_request_that_has_arrived_already() -> None:
    fleet = Fleet(LateBinding([1]))
    first = fleet.submit("a")
    for request in (first, DispatchedRequest("a", 5)):
        with pytest.raises(RequestError, match="'a' has arrived already"):
            fleet.dispatcher.submit(request)
    assert fleet.dispatcher.requests == (first,)


def test_policy_gets_tokens_and_ends_of_one_turn_together() -> None:
    policy = RecordingPolicy()
    fleet = Fleet(policy)
    requests = [fleet.submit(name) for name in "abc"]
    for request in requests:
        fleet.run(request, 3)
    fleet.dispatcher.report_tokens(requests[0], 5)
    fleet.dispatcher.report_tokens(requests[1], 4)
    fleet.dispatcher.finish(requests[0])
    assert policy.events == []
    fleet.clock.end_turn()
    assert policy.events == [({"a": 5, "b": 4, "c": 3}, ["a"])]


def test_end_without_token_is_told_after_the_ends_of_its_turn() -> None:
    policy = RecordingPolicy()
    fleet = Fleet(policy)
    empty, whole = fleet.submit("empty"), fleet.run(fleet.submit("whole"))
    fleet.dispatcher.finish(empty)
    fleet.dispatcher.finish(whole)
    fleet.clock.end_turn()
    assert policy.events == [({"whole": 1}, ["whole"]), "empty"]


ENDS = st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 2)), min_size=1)


@given(ENDS)
def test_requests_aborted_or_without_token_are_told_as_aborted(
    ends: list[tuple[bool, int, int]],
) -> None:
    """By request: whether it is aborted, and tokens made before its last turn, and in it."""
    policy = RecordingPolicy(len(ends))
    fleet = Fleet(policy)
    requests = [fleet.submit(str(number)) for number in range(len(ends))]
    expected = []
    for part in (1, 2):
        for request, end in zip(requests, ends, strict=True):
            if isinstance(request.status, BoundToWorker) and end[part]:
                fleet.dispatcher.start(request, request.status)
            fleet.dispatcher.report_tokens(request, sum(end[1 : part + 1]))
            if end[0] and part == 1:
                fleet.dispatcher.begin_abort(request)
        fleet.clock.end_turn()
    policy.events.clear()
    for request, (aborted, early, late) in zip(requests, ends, strict=True):
        fleet.dispatcher.finish(request)
        if not aborted and early + late:
            expected.append(request.request_id)
    fleet.clock.end_turn()
    others = [one.request_id for one in requests if one.request_id not in expected]
    assert policy.events == [*([({}, expected)] if expected else []), *others]
    assert (fleet.failures, fleet.dispatcher.requests) == ([], ())


class FixedWorkerPolicy(LateBinding):
    """Binds to one worker, whichever was asked for."""

    def __init__(self, worker: int, workers: int = 3) -> None:
        super().__init__([8] * workers)
        self.worker = worker

    def on_arrival(self, request: Request) -> Decision:
        super().on_arrival(request)
        return Decision((Assignment(request.id, self.worker),))


@pytest.mark.parametrize("action", FailureAction)
@pytest.mark.parametrize("required", [None, 0, 1])
@pytest.mark.parametrize("worker", [-1, 0, 1, 2, 3])
def test_dispatcher_accepts_only_serving_worker_that_may_serve(
    action: FailureAction, required: int | None, worker: int
) -> None:
    fleet = Fleet(FixedWorkerPolicy(worker), 3, action)
    fleet.dispatcher.drain_worker(2)
    request = fleet.submit("a", required=required)
    if worker in (0, 1) and required in (None, worker):
        assert (request.worker, fleet.failures) == (worker, [])
        return
    assert [type(one) for one in fleet.failures] == [InvalidAssignment]
    skipped = action is SKIP
    assert isinstance(request.status, Queued if skipped else RequestClosed)
    assert fleet.closed == ({} if skipped else {"a": CloseReason.POLICY_FAILED})


def test_decision_of_another_type_is_a_failure_of_the_policy() -> None:
    class NoDecisionPolicy(LateBinding):
        def on_arrival(self, request: Request) -> Any:
            super().on_arrival(request)

    fleet = Fleet(NoDecisionPolicy([1]))
    fleet.submit("a")
    assert [type(one) for one in fleet.failures] == [PolicyError]
    assert fleet.closed == {"a": CloseReason.POLICY_FAILED}


def test_event_that_failed_is_left_out_and_request_can_leave() -> None:
    policy = FailingPolicy([1])
    fleet = Fleet(policy)
    request = fleet.submit("a")
    policy.left = 0
    fleet.dispatcher.abort(request)
    assert (fleet.dispatcher.policy_errors, fleet.dispatcher.requests) == (1, ())
    assert fleet.dispatcher.policy is policy


def test_requests_of_lost_worker_end_though_the_policy_fails_at_its_loss() -> None:
    policy = FailingPolicy([1])
    fleet = Fleet(policy)
    request = fleet.run(fleet.submit("a"))
    fleet.clock.end_turn()
    policy.left = 0
    fleet.dispatcher.set_health(0, WorkerState.LOST)
    assert fleet.closed == {"a": CloseReason.WORKER_LOST}
    assert (request.worker, fleet.dispatcher.workers[0].load) == (None, 0)


def test_request_that_is_lost_at_any_event_goes_to_another_worker() -> None:
    class RequestLosingPolicy(LateBinding):
        """Loses a request that has not begun, as it hears of tokens of another."""

        def on_tokens(self, counts: Any, finished: Any = ()) -> Decision:
            super().on_tokens(counts, finished)
            return Decision(super().on_abort("b").assignments, lost=("b",))

    fleet = Fleet(RequestLosingPolicy([4, 4]), 2)
    lost = fleet.submit("b")
    fleet.run(fleet.submit("a"))
    fleet.clock.end_turn()
    assert (fleet.failures, fleet.closed) == ([], {})
    assert isinstance(lost.status, BoundToWorker)


def test_retry_goes_to_least_loaded_other_worker() -> None:
    fleet = Fleet(LateBinding([4, 4, 4]), 3)
    requests = [fleet.submit(name) for name in "abcd"]
    last = requests[-1]
    assert isinstance(last.status, BoundToWorker)
    assert last.worker == 0
    fleet.dispatcher.retry(last, last.status)
    assert last.worker == 1
    assert load_imbalance(fleet.dispatcher.workers).imbalance == 3 * 10 - 20


@pytest.mark.parametrize("name", ["fit", "brh", "jsq_load", "fast_phi"])
def test_policy_frees_slots_after_largest_token_counts(name: str) -> None:
    policy = routing_policy_factory(name, {})([2], [None])
    assert isinstance(policy, RequestRouter)
    fleet = Fleet(policy)
    for request, tokens in ((fleet.submit("a", MAX_TOKENS), MAX_TOKENS), (fleet.submit("b"), 3)):
        fleet.dispatcher.finish(fleet.run(request, tokens))
    fleet.clock.end_turn()
    assert (fleet.failures, policy.loads, policy.counts, policy.unassigned) == ([], [0], [0], 0)


def test_policy_decides_without_the_rest_of_a_step_that_does_not_come() -> None:
    fleet = Fleet(routing_policy_factory("fit", {})([2], [None]))
    first, second, late = map(fleet.submit, ("a", "b", "late"))
    fleet.run(first)
    fleet.run(second)
    fleet.clock.end_turn()
    fleet.dispatcher.report_tokens(first, 2)
    fleet.dispatcher.finish(first)
    fleet.clock.end_turn()
    fleet.clock.advance(STEP_TIMEOUT_SECONDS / 2)
    assert isinstance(late.status, Queued), "the other has not told of this step"
    fleet.clock.advance(STEP_TIMEOUT_SECONDS / 2)
    assert isinstance(late.status, BoundToWorker)


class LateDecisionPolicy(LateBinding):
    """Decides nothing when it is asked."""

    def __init__(self, slots: int = 1) -> None:
        super().__init__([slots])
        self.closed = 0

    def decide(self) -> Decision:
        return Decision()

    def close(self) -> None:
        self.closed += 1


def test_decision_that_comes_later_is_applied_as_any_other() -> None:
    fleet = Fleet(LateDecisionPolicy())
    first, second = fleet.submit("a"), fleet.submit("b", required=0)
    fleet.dispatcher.apply_decision(Decision((Assignment("a", 0),), lost=("b",)))
    assert first.worker == 0
    assert second.status == RequestClosed(CloseReason.WORKER_LOST)
    fleet.dispatcher.apply_decision(Decision((Assignment("a", 0),)))
    assert [type(one) for one in fleet.failures] == [InvalidAssignment]


def test_policy_that_fails_unasked_is_left_once() -> None:
    policy = LateDecisionPolicy()
    fleet = Fleet(policy, action=STOP)
    request = fleet.submit("a")
    for _ in range(2):
        fleet.dispatcher.fail_policy(OSError("gone"))
        fleet.dispatcher.apply_decision(Decision((Assignment("a", 0),)))
    assert request.status == RequestClosed(CloseReason.POLICY_FAILED)
    assert (len(fleet.failures), policy.closed) == (1, 1)


def test_dispatcher_that_is_closed_lets_policy_and_timers_go() -> None:
    fleet = Fleet(LateBinding([1]))
    waits = [fleet.submit("a"), fleet.submit("b")]
    fleet.run(waits[0])
    scheduled = [*fleet.clock.timers, *fleet.clock.soon]
    assert len(scheduled) == 2
    fleet.dispatcher.close()
    assert (fleet.dispatcher.policy, fleet.dispatcher.requests, fleet.closed) == (None, (), {})
    assert all(isinstance(one.status, RequestClosed) for one in waits)
    assert all(one.cancelled for one in scheduled)
