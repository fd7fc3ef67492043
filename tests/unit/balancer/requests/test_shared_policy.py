"""A policy that several front ends share: nothing is lost, bound twice, or left in a slot."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from helpers.fakes.failing_policies import FailingPolicy, UnknownWorkerPolicy
from helpers.fakes.late_binding_policy import LateBinding
from helpers.fakes.manual_clock import ManualClock
from helpers.harnesses.shared_policy_machine import SharedPolicyMachine, machine
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from equipoise.balancer.requests import policy_server
from equipoise.balancer.requests.dispatcher import (
    CloseReason,
    DispatchedRequest,
    FailureAction,
    InvalidAssignment,
    Queued,
    RequestClosed,
    RequestDispatcher,
)
from equipoise.balancer.requests.policy import (
    STEP_TIMEOUT_SECONDS,
    Assignment,
    Capacity,
    Decision,
    Request,
    RequestId,
    RoutingPolicy,
    WorkerChange,
    WorkerReport,
    WorkerState,
)
from equipoise.balancer.requests.policy_factory import routing_policy_factory
from equipoise.balancer.requests.policy_messages import VERSION, Message, SharedPolicyLost
from equipoise.balancer.requests.policy_server import (
    SILENT_SECONDS,
    FrontEndSession,
    PolicyServer,
    ReportedWorker,
    SharedRequest,
    Stage,
)
from equipoise.balancer.requests.remote_policy import (
    ALIVE_SECONDS,
    ANSWER_SECONDS,
    GREETING_SECONDS,
    RemotePolicy,
    connect_in_process,
)
from equipoise.hal.errors import RequestError, WorkerError

SKIP, STOP = FailureAction.SKIP_EVENT, FailureAction.STOP_POLICY


def test_shared_policy_keeps_both_ends_equal_for_any_order_of_messages() -> None:
    run_state_machine_as_test(SharedPolicyMachine)


def test_front_ends_fall_back_and_rejoin_with_what_runs_for_any_order_of_messages() -> None:
    run_state_machine_as_test(machine(falls_back=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fit", "br0", "jsq_load", "round_robin"])
def test_shared_policy_keeps_both_ends_equal_with_native_policy(name: str) -> None:
    run_state_machine_as_test(machine(routing_policy_factory(name, {})))


def _assignment_is_never_superseded(self: RemotePolicy, bound: Any, lost: Any) -> None:
    stopped, self._stopped_at = self._stopped_at, [0] * len(self._stopped_at)
    APPLY(self, bound, lost)
    self._stopped_at = stopped


def _one_serial_an_id(self: RemotePolicy, request: Request) -> Decision:
    """An assignment is for whatever request has the id now."""
    serials = vars(self).setdefault("serial_of_id", {})
    self._arrived = serials.setdefault(request.id, len(serials))
    return ON_ARRIVAL(self, request)


def _crossing_stays_bound(self: FrontEndSession, worker: Any, state: Any, _: int) -> None:
    """The server does not take back what the front end has ignored."""
    ON_STATE(self, worker, state, 1 << 30)


def _all_is_taken_back(self: FrontEndSession, worker: Any, state: Any, _: int) -> None:
    """What the front end has heard of, too."""
    ON_STATE(self, worker, state, -1)


def _requests_stay(self: PolicyServer, session: FrontEndSession) -> None:
    session._requests.clear()
    LEAVE(self, session)


def _word_stays(self: PolicyServer, session: FrontEndSession) -> None:
    """The word of a front end outlives it."""
    with patch.object(PolicyServer, "update_worker"):
        LEAVE(self, session)


def _one_word_is_enough(self: PolicyServer, number: int) -> None:
    reported = [one.reported(number) for one in self.sessions]
    if any(one is not None and one.state is WorkerState.LOST for one in reported):
        self._set_state(number, WorkerState.LOST)
    else:
        UPDATE(self, number)


def _last_word_counts(
    self: FrontEndSession, worker: ReportedWorker, state: Any, acknowledged: int
) -> None:
    for session in self._server.sessions:
        reported = session.reported(worker.number)
        if reported is not None:
            reported.state = state
    ON_STATE(self, worker, state, acknowledged)


def _told_though_parked(self: PolicyServer, request: SharedRequest) -> None:
    request.stage = Stage.POOLED
    arrival = request.arrival(len(self.workers))
    self.tell(lambda policy: policy.on_arrival(arrival))


def _misplaced_stays(self: PolicyServer) -> None:
    """What is assigned to a worker that its front end does not use stays there."""
    self._misplaced.clear()


def _pin_stays(
    self: FrontEndSession, worker: ReportedWorker, state: Any, acknowledged: int
) -> None:
    """A request goes on waiting for a worker that its front end does not use any more."""
    pins = [one for one in self.requests if one.pin == worker.number]
    for request in pins:
        request.pin = None
    ON_STATE(self, worker, state, acknowledged)
    for request in pins:
        request.pin = worker.number


def _number_goes_on(self: FrontEndSession, own: int, name: str, *rest: Any) -> None:
    """A worker gets the number of one that was removed, and is taken for it."""
    if own == len(self._workers):
        ON_WORKER(self, own, name, *rest)
    else:
        worker = self._worker(own)
        worker.state = rest[-1]
        self._use(worker)


def _abort_is_not_told(self: RemotePolicy, request: Any) -> Any:
    self._forget(request)


def _lost_is_not_said(self: FrontEndSession, request: SharedRequest) -> None:
    LOSE(self, request)
    self._lost.pop()


def _never_told_again(self: FrontEndSession, worker: ReportedWorker) -> None:
    """Requests for a worker that serves again stay aside."""
    with patch.object(PolicyServer, "arrive"):
        USE(self, worker)


def _running_is_not_told(self: RemotePolicy, request: Request, worker: int, tokens: int) -> Any:
    """A front end that rejoins says nothing of what runs."""
    return Decision()


def _bound_is_told_as_running(self: RemotePolicy, request: Request, worker: int, _: int) -> Any:
    return ON_RUNNING(self, request, worker, 1)


APPLY, ON_ARRIVAL, ON_RUNNING = (
    RemotePolicy._apply,
    RemotePolicy.on_arrival,
    RemotePolicy.on_running,
)
ON_STATE, ON_WORKER, USE, LOSE = (
    FrontEndSession._on_state,
    FrontEndSession._on_worker,
    FrontEndSession._use,
    FrontEndSession.lose,
)
LEAVE, UPDATE = PolicyServer.leave, PolicyServer.update_worker
MUTANTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "an assignment that is superseded is made": (
        RemotePolicy,
        "_apply",
        _assignment_is_never_superseded,
    ),
    "an assignment is for the next request of that id": (
        RemotePolicy,
        "on_arrival",
        _one_serial_an_id,
    ),
    "an assignment that is ignored stays bound": (
        FrontEndSession,
        "_on_state",
        _crossing_stays_bound,
    ),
    "what a draining worker has is bound again": (FrontEndSession, "_on_state", _all_is_taken_back),
    "requests of a front end that left stay": (PolicyServer, "leave", _requests_stay),
    "the word of a front end that left stays": (PolicyServer, "leave", _word_stays),
    "one front end loses the requests of others": (
        PolicyServer,
        "update_worker",
        _one_word_is_enough,
    ),
    "the last word of a worker counts for all": (FrontEndSession, "_on_state", _last_word_counts),
    "a request is told though its worker does not serve": (
        PolicyServer,
        "arrive",
        _told_though_parked,
    ),
    "an abort does not reach the server": (RemotePolicy, "on_abort", _abort_is_not_told),
    "a lost request is not reported": (FrontEndSession, "lose", _lost_is_not_said),
    "a parked request is forgotten": (FrontEndSession, "_use", _never_told_again),
    "a request stays at a worker that its front end does not use": (
        PolicyServer,
        "_place_misplaced",
        _misplaced_stays,
    ),
    "a request waits for a worker that its front end uses no more": (
        FrontEndSession,
        "_on_state",
        _pin_stays,
    ),
    "a worker is taken for one that had its number": (
        FrontEndSession,
        "_on_worker",
        _number_goes_on,
    ),
    "what runs is not told to the policy that is joined": (
        RemotePolicy,
        "on_running",
        _running_is_not_told,
    ),
    "what has no token is told as running": (
        RemotePolicy,
        "on_running",
        _bound_is_told_as_running,
    ),
    "a front end that is stopped keeps its slots": (
        FrontEndSession,
        "drop",
        lambda self, why: None,
    ),
    "a link that breaks is not reported": (
        RemotePolicy,
        "lose",
        lambda self, why: None,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_shared_policy_mutant_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    few = settings(
        max_examples=2000, stateful_step_count=50, phases=[Phase.generate], derandomize=True,
        database=None, report_multiple_bugs=False,
    )  # fmt: skip
    falls_back = MUTANTS[name][1] in ("on_running", "leave")
    try:
        run_state_machine_as_test(machine(falls_back=falls_back), settings=few)
    except Exception:  # an assertion, or whatever the mistake leads to
        return
    pytest.fail("the machine finds no mistake")


class Pool:
    """Front ends that share a policy in one process.

    Attributes:
        errors: of the policy.
        failures: of each front end.
        closed: reasons for which requests were closed, by front end and id.
    """

    def __init__(
        self, policy: RoutingPolicy, workers: int = 1, front_ends: int = 2, action: Any = STOP
    ) -> None:
        self.clock = ManualClock()
        self.action = action
        self.errors: list[Exception] = []
        self.failures: list[list[Exception]] = [[] for _ in range(front_ends)]
        names = [str(number) for number in range(workers)]
        self.server = PolicyServer(policy, names, self.clock, self.errors.append)
        self.policies = [
            RemotePolicy(self.clock, partial(self.lost, number)) for number in range(front_ends)
        ]
        self.dispatchers = [
            RequestDispatcher(policy, workers, self.clock, partial(self.failed, number))
            for number, policy in enumerate(self.policies)
        ]
        self.sessions = [
            connect_in_process(self.server, policy, dispatcher, self.clock)
            for policy, dispatcher in zip(self.policies, self.dispatchers, strict=True)
        ]
        self.settle()

    def lost(self, front_end: int, error: SharedPolicyLost) -> None:
        self.dispatchers[front_end].fail_policy(error)

    def failed(self, front_end: int, error: Exception) -> FailureAction:
        self.failures[front_end].append(error)
        assert isinstance(self.action, FailureAction)
        return self.action

    def settle(self) -> None:
        for _ in range(20):
            self.clock.end_turn()

    def submit(self, front_end: int, name: str, size: int = 5) -> DispatchedRequest:
        request = DispatchedRequest(name, size)
        self.dispatchers[front_end].submit(request)
        self.settle()
        return request

    def run(self, front_end: int, request: DispatchedRequest, tokens: int) -> None:
        """It has made so many tokens."""
        dispatcher = self.dispatchers[front_end]
        dispatcher.start(request, request.status)  # type: ignore[arg-type]
        dispatcher.report_tokens(request, tokens)
        self.settle()


def test_front_ends_share_slots_and_ids_do_not_collide() -> None:
    pool = Pool(LateBinding([1]))
    first, second = pool.submit(0, "a"), pool.submit(1, "a")
    assert (first.worker, second.worker) == (0, None)
    pool.run(0, first, 1)
    pool.dispatchers[0].finish(first)
    pool.settle()
    assert second.worker == 0
    assert pool.failures == [[], []]


def test_server_decides_without_the_rest_of_a_step_that_does_not_come() -> None:
    pool = Pool(routing_policy_factory("fit", {})([2], [None]))
    first, second, late = pool.submit(0, "a"), pool.submit(1, "b"), pool.submit(1, "late")
    pool.run(0, first, 1)
    pool.run(1, second, 1)
    pool.dispatchers[0].report_tokens(first, 2)
    pool.dispatchers[0].finish(first)
    pool.settle()
    pool.clock.advance(STEP_TIMEOUT_SECONDS / 2)
    pool.settle()
    assert isinstance(late.status, Queued), "the other front end has not told of this step"
    pool.clock.advance(STEP_TIMEOUT_SECONDS / 2)
    pool.settle()
    assert late.worker == 0


@pytest.mark.parametrize("action", FailureAction)
def test_policy_that_fails_is_stopped_for_every_front_end(action: FailureAction) -> None:
    policy = FailingPolicy([1])
    pool = Pool(policy, action=action)
    waits = [pool.submit(0, "a"), pool.submit(1, "b")]
    policy.left = 0
    last = pool.submit(0, "c")
    assert [type(one) for one in pool.errors] == [ArithmeticError]
    for front_end in pool.failures:
        assert {type(one) for one in front_end} == {SharedPolicyLost}
        assert "ArithmeticError: a mistake" in str(front_end[0])
    assert policy.after == 0, "it is not called again"
    if action is STOP:
        assert pool.dispatchers[0].policy is pool.dispatchers[1].policy is None
        assert all(isinstance(one.status, RequestClosed) for one in (*waits, last))
    else:
        refused = pool.submit(1, "d")
        assert refused.status == RequestClosed(CloseReason.POLICY_FAILED)


def test_assignment_that_cannot_be_stops_the_shared_policy() -> None:
    pool = Pool(UnknownWorkerPolicy([1]))
    request = pool.submit(1, "a")
    assert [type(one) for one in pool.errors] == [InvalidAssignment]
    assert request.status == RequestClosed(CloseReason.POLICY_FAILED)
    assert [len(one) for one in pool.failures] == [1, 1]


def test_front_end_that_leaves_frees_its_slots() -> None:
    pool = Pool(LateBinding([1]))
    pool.run(0, pool.submit(0, "a"), 3)
    waits = pool.submit(1, "b")
    pool.dispatchers[0].close()
    pool.settle()
    assert waits.worker == 0
    assert pool.server.sessions == (pool.sessions[1],)
    assert pool.failures == [[], []]


def test_front_ends_go_on_by_themselves_when_the_server_closes() -> None:
    pool = Pool(LateBinding([1]))
    requests = [pool.submit(0, "a"), pool.submit(1, "b")]
    pool.server.close()
    pool.settle()
    assert [one.status for one in requests] == [RequestClosed(CloseReason.POLICY_FAILED)] * 2
    assert "the process that has the policy ends" in str(pool.failures[1][0])
    assert pool.errors == []


class RecordingLink:
    """A link to nobody."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.closed = False

    def send(self, message: Message) -> None:
        self.messages.append(message)

    def close(self) -> None:
        self.closed = True


def silent() -> tuple[ManualClock, RecordingLink, RemotePolicy, RequestDispatcher]:
    clock, link = ManualClock(), RecordingLink()
    policy = RemotePolicy(clock, lambda lost: dispatcher.fail_policy(lost))
    dispatcher = RequestDispatcher(policy, 1, clock, lambda error: STOP)
    policy.connect(link, dispatcher)
    dispatcher.replace_policy(policy)
    return clock, link, policy, dispatcher


def test_front_end_gives_up_a_server_that_never_answers() -> None:
    clock, link, policy, dispatcher = silent()
    request = DispatchedRequest("a", 5)
    dispatcher.submit(request)
    clock.advance(GREETING_SECONDS / 2)
    clock.advance(GREETING_SECONDS / 2 - 1)
    assert isinstance(request.status, Queued)
    clock.advance(1)
    assert dispatcher.requests == ()
    assert (policy.is_lost, link.closed, dispatcher.policy) == (True, True, None)


def test_front_end_gives_up_a_server_that_answers_no_more() -> None:
    clock, link, policy, dispatcher = silent()
    policy.receive(["decision", len(link.messages), [], []])
    clock.advance(GREETING_SECONDS)
    assert not policy.is_lost, "there is nothing to answer"
    dispatcher.submit(DispatchedRequest("a", 5))
    policy.receive(["decision", len(link.messages), [], []])
    dispatcher.submit(DispatchedRequest("b", 5))
    clock.advance(ANSWER_SECONDS / 2)
    clock.advance(ANSWER_SECONDS / 2)
    assert not policy.is_lost, "the first was answered"
    clock.advance(ANSWER_SECONDS / 2)
    assert policy.is_lost


def test_front_end_that_was_stopped_reads_before_it_gives_up() -> None:
    clock, link, policy, dispatcher = silent()
    policy.receive(["decision", len(link.messages), [], []])
    dispatcher.submit(DispatchedRequest("a", 5))
    clock.now += 10 * ANSWER_SECONDS
    clock.advance(0)
    policy.receive(["decision", len(link.messages), [], []])
    clock.advance(ANSWER_SECONDS / 2)
    assert not policy.is_lost


NO_WORKERS: list[Any] = [2, -1, True, 0.0, "0", []]
ARRIVES = ["arrive", 0, 5, None, None, None]


@pytest.mark.parametrize(
    "message",
    [
        ["hello", 2, None], ["hello", 2, 1], [], ["arrive", 0], [["arrive"]], ["gone"],
        *(["arrive", serial, 5, None, None, None] for serial in (0, -1, True, "a", 1 << 62)),
        *(["arrive", 1, size, None, None, None] for size in (0, -5, True, 1 << 31, 1.0, None)),
        *(["arrive", 1, 5, worker, None, None] for worker in NO_WORKERS),
        *(["arrive", 1, 5, None, hits, None] for hits in ("ab", [1], [1, 2, 3], [-1, 0], [6, 0])),
        *(["arrive", 1, 5, None, None, expected] for expected in (-3, "x", True, 1 << 31)),
        *(["tokens", [0], [count], []] for count in (-1, "x", None, True, 1 << 31)),
        ["tokens", [[0]], [1], []], ["tokens", [0], [1], [[0]]], ["tokens", [0], [], []],
        ["abort", "a"], ["abort", True],
        *(["state", worker, "lost", 0] for worker in (2, 0.0, True)),
        ["state", 0, "gone", 0], ["state", 0, ["lost"], 0], ["state", 0, "draining", -5],
        *(["capacity", 0, slots, None] for slots in (-1, "x", True)),
        *(["worker", number, "x", None, None, "lost"] for number in (3, -1, True)),
        *(["worker", 2, name, None, None, "lost"] for name in ("x" * 1025, 7, None)),
        ["worker", 0, "", None, None, "lost"],
        ["worker", 2, "x", -1, None, "lost"], ["worker", 2, "x", 1, None, "gone"],
        ["worker", 0, "x", None, None, "lost"], ["worker", 2, "0", None, None, "lost"],
        *(["running", 1, 5, None, worker, 0] for worker in NO_WORKERS),
        *(["running", 1, 5, None, 0, tokens] for tokens in (-1, 1 << 31, None)),
        ["running", 0, 5, None, 0, 1],
        ["capacity", 7, 1, None], ["capacity", 0, None, -4],
        ["report", -1, 0, 0, 0, 0.0], ["report", True, 0, 0, 0, 0.5], ["report", 0, -1, 0, 0, 0.0],
        ["report", 0, 0, "x", 0, 0.0], ["report", 0, 0, 0, 1 << 62, 0.0],
        *(["report", 0, 0, 0, 0, usage] for usage in (float("nan"), float("inf"), -0.1, "x")),
    ],
    ids=str,
)  # fmt: skip
def test_malformed_message_drops_the_front_end_that_sends_it(
    message: Message, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Pool(routing_policy_factory("fit", {})([1, 1], [None, None]), 2)
    pool.submit(1, "a")
    link, session = greeted(pool, 2)
    session.receive(ARRIVES)
    session.receive(message)
    session.receive(["abort", 0])
    assert link.closed
    assert link.messages[-1][0] == "failed"
    assert session not in pool.server.sessions
    assert (pool.errors, pool.failures) == ([], [[], []])
    assert len(caplog.messages) == 1
    last = [pool.submit(0, name) for name in "bc"]
    assert [one.worker is None for one in last] == [False, True], "its slot is free again"


def greeted(pool: "Pool", workers: int = 1) -> tuple["RecordingLink", FrontEndSession]:
    """A front end that says what the test does."""
    link = RecordingLink()
    session = pool.server.connect(link)
    session.receive(["hello", VERSION, None])
    for number in range(workers):
        session.receive(["worker", number, str(number), None, None, "serving"])
    return link, session


def test_tokens_of_request_on_no_worker_drop_the_front_end() -> None:
    pool = Pool(LateBinding([1]), front_ends=1)
    pool.submit(0, "a")
    link, session = greeted(pool)
    session.receive(ARRIVES)
    session.receive(["tokens", [0], [1], []])
    assert "on no worker" in link.messages[-1][1]
    assert (session in pool.server.sessions, pool.errors) == (False, [])


class RefusingPolicy(LateBinding):
    """Refuses events by a rule of its own.

    Attributes:
        refuses: names of its methods that do.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        super().__init__(slots)
        self.refuses: set[str] = set()

    def on_arrival(self, request: Request) -> Decision:
        if request.size > 7 or "on_arrival" in self.refuses:
            raise RequestError(f"{request.size} tokens are too many")
        return super().on_arrival(request)

    def on_tokens(
        self, counts: Mapping[RequestId, int], finished: Iterable[RequestId] = ()
    ) -> Decision:
        if "on_tokens" in self.refuses:
            raise RequestError("not now")
        return super().on_tokens(counts, finished)

    def on_abort(self, request: RequestId) -> Decision:
        if "on_abort" in self.refuses:
            raise RequestError("not known")
        return super().on_abort(request)

    def on_worker_change(self, change: WorkerChange) -> Decision:
        if change.state is None and "on_worker_change" in self.refuses:
            raise WorkerError("not so")
        return super().on_worker_change(change)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("on_arrival", ["arrive", 1, 5, None, None, None]), ("on_tokens", ["tokens", [0], [1], []]),
        ("on_tokens", ["tokens", [0], [1], [0]]), ("on_worker_change", ["capacity", 0, 1, None]),
    ],
)  # fmt: skip
def test_event_that_the_policy_refuses_drops_its_front_end_only(
    method: str, message: Message
) -> None:
    policy = RefusingPolicy([1])
    pool = Pool(policy)
    link, session = greeted(pool)
    session.receive(ARRIVES)
    waits = pool.submit(0, "a")
    policy.refuses.add(method)
    session.receive(message)
    pool.settle()
    assert "the policy refuses it" in link.messages[-1][1]
    assert (pool.errors, pool.failures, policy.refused) == ([], [[], []], [])
    assert waits.worker == 0
    assert not policy.knows((session.number, 0))


def test_parked_request_that_the_policy_refuses_drops_its_front_end_only() -> None:
    policy = RefusingPolicy([1, 1])
    pool = Pool(policy, 2)
    link, session = greeted(pool, 2)
    session.receive(["state", 1, "draining", 0])
    for serial in (0, 1):
        session.receive(["arrive", serial, 8, 1, None, None])
    session.receive(["state", 1, "serving", 0])
    requests = [pool.submit(0, name) for name in "ab"]
    assert "8 tokens are too many" in link.messages[-1][1]
    assert (pool.errors, pool.failures) == ([], [[], []])
    assert [one.worker for one in requests] == [0, 1]


def test_policy_that_refuses_an_abort_has_failed() -> None:
    policy = RefusingPolicy([1])
    pool = Pool(policy)
    request = pool.submit(0, "a")
    policy.refuses.add("on_abort")
    pool.dispatchers[0].abort(request)
    pool.settle()
    assert [type(one) for one in pool.errors] == [RequestError]
    assert [len(one) for one in pool.failures] == [1, 1]


def test_front_end_of_another_version_is_refused() -> None:
    pool = Pool(LateBinding([1]))
    link = RecordingLink()
    pool.server.connect(link).receive(["hello", VERSION + 1, None])
    assert "of version 3, and the policy's of 2" in link.messages[-1][1]
    assert link.closed
    assert len(pool.server.sessions) == 2


@pytest.mark.parametrize(("theirs", "refused"), [(None, False), (True, False), (False, True)])
def test_front_end_that_tells_steps_otherwise_is_refused(
    theirs: bool | None, refused: bool
) -> None:
    errors: list[Exception] = []
    server = PolicyServer(LateBinding([1]), [None], ManualClock(), errors.append, lockstep=True)
    link = RecordingLink()
    server.connect(link).receive(["hello", VERSION, theirs])
    assert link.closed is refused
    assert not refused or "lockstep is false at the front end and true" in link.messages[-1][1]


def test_connection_counts_as_front_end_after_its_hello() -> None:
    pool = Pool(LateBinding([1]))
    links = [RecordingLink(), RecordingLink()]
    silent, early = [pool.server.connect(link) for link in links]
    assert len(pool.server.sessions) == 2
    early.receive(ARRIVES)
    assert links[1].closed
    for dispatcher in pool.dispatchers:
        dispatcher.set_health(0, WorkerState.LOST)
    pool.settle()
    assert states(pool) == [WorkerState.LOST], "it has no say about workers"
    pool.clock.advance(SILENT_SECONDS)
    assert links[0].closed
    silent.disconnect()
    assert (pool.errors, pool.failures) == ([], [[], []])


def test_front_end_that_is_stopped_loses_its_slots(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool(LateBinding([1]))
    link, session = greeted(pool)
    session.receive(ARRIVES)
    waits = pool.submit(0, "a")
    pool.clock.advance(SILENT_SECONDS / 2)
    pool.settle()
    session.receive(["alive"])
    for _ in range(2):
        pool.settle()
        pool.clock.advance(SILENT_SECONDS / 2)
    pool.settle()
    assert (link.closed, waits.worker) == (False, None)
    pool.clock.advance(SILENT_SECONDS / 2)
    pool.settle()
    assert (link.closed, waits.worker) == (True, 0)
    assert link.messages[-1] == ["failed", "nothing came from it for 30 seconds"]
    assert len(caplog.messages) == 1


def test_front_end_that_waits_is_not_taken_for_stopped() -> None:
    pool = Pool(LateBinding([1]))
    requests = [pool.submit(0, "a"), pool.submit(1, "b")]
    for _ in range(40):
        pool.clock.advance(ALIVE_SECONDS)
        pool.settle()
    assert [one.worker for one in requests] == [0, None]
    pool.dispatchers[0].abort(requests[0])
    pool.dispatchers[1].abort(requests[1])
    for _ in range(40):
        pool.clock.advance(ALIVE_SECONDS)
        pool.settle()
    assert len(pool.server.sessions) == 2, "one without requests need not speak"
    assert pool.failures == [[], []]


def test_server_that_was_stopped_reads_before_it_drops_a_front_end() -> None:
    pool = Pool(LateBinding([1]))
    link, session = greeted(pool)
    session.receive(ARRIVES)
    pool.clock.advance(SILENT_SECONDS / 2)
    pool.clock.now += 10 * SILENT_SECONDS
    pool.clock.advance(0)
    session.receive(["alive"])
    pool.clock.advance(SILENT_SECONDS / 2)
    assert not link.closed


class DueWithoutDecide:
    """Has a decision due, and no method for it."""

    def on_arrival(self, request: Request) -> Decision:
        return Decision((Assignment(request.id, 0),), due=True)


class LosesOthers(LateBinding):
    """Reports requests as lost that there never were."""

    def on_arrival(self, request: Request) -> Decision:
        assigned = super().on_arrival(request).assignments
        return Decision(assigned, lost=("never was", (77, 0), (1, 77), 5))


@pytest.mark.parametrize("policy", [DueWithoutDecide(), LosesOthers([2])])
def test_shared_policy_is_taken_as_a_dispatcher_takes_it(policy: Any) -> None:
    pool = Pool(policy)
    requests = [pool.submit(0, "a"), pool.submit(1, "b")]
    pool.clock.advance(STEP_TIMEOUT_SECONDS)
    pool.settle()
    assert [one.worker for one in requests] == [0, 0]
    assert (pool.errors, pool.failures) == ([], [[], []])


def test_stopped_server_is_given_up_in_the_short_time_after_its_first_answer() -> None:
    clock, _, policy, dispatcher = silent()
    dispatcher.submit(DispatchedRequest("a", 5))
    policy.receive(["decision", 2, [], []])
    clock.advance(ANSWER_SECONDS - 1)
    assert not policy.is_lost
    clock.advance(1)
    assert policy.is_lost, "not in the time that the first answer had"


def test_reports_are_taken_from_one_front_end() -> None:
    policy = LateBinding([1])
    pool = Pool(policy)
    reports = [WorkerReport(waiting=0, running=n, tokens=0, kv_usage=0.0) for n in (1, 2)]
    for dispatcher, report in zip(pool.dispatchers, reports, strict=True):
        dispatcher.report_worker(0, report)
    pool.settle()
    assert policy.reports == [(0, reports[0])]
    pool.dispatchers[0].close()
    pool.settle()
    pool.dispatchers[1].report_worker(0, reports[1])
    pool.settle()
    assert policy.reports == [(0, reports[0]), (0, reports[1])]


def states(pool: "Pool") -> list[WorkerState]:
    return [one.state for one in pool.server.workers]


def test_worker_takes_what_the_front_end_that_says_least_allows() -> None:
    pool = Pool(LateBinding([1]))
    requests = [pool.submit(0, name) for name in "abc"]
    pool.dispatchers[1].set_capacity(0, Capacity(slots=3))
    pool.settle()
    assert [one.worker for one in requests] == [0, 0, 0]
    pool.dispatchers[0].set_capacity(0, Capacity(slots=2))
    for request in requests[:2]:
        pool.dispatchers[0].abort(request)
    last = [pool.submit(1, name) for name in "de"]
    assert [one.worker for one in last] == [0, None]


def test_request_goes_to_no_worker_that_its_front_end_does_not_have() -> None:
    pool = Pool(LateBinding([1]))
    added = pool.dispatchers[1].add_worker(Capacity(slots=2), name="new")
    requests = [pool.submit(0, name) for name in "ab"]
    assert [one.worker for one in requests] == [0, None], "it has one worker"
    others = [pool.submit(1, name) for name in "abc"]
    assert [one.worker for one in others] == [added, added, None]
    number = pool.dispatchers[0].add_worker(Capacity(slots=3), name="new")
    pool.dispatchers[1].set_capacity(added, Capacity(slots=3))
    pool.settle()
    waits = [one for one in (requests[1], others[2]) if one.worker is None]
    assert number == 1
    assert len(waits) == 1, "one more has a slot, and it is one for both"


def test_worker_that_one_front_end_cannot_reach_serves_the_others() -> None:
    pool = Pool(LateBinding([2, 2]), 2)
    pool.dispatchers[0].set_health(0, WorkerState.LOST)
    pool.settle()
    mine = [pool.submit(0, name) for name in "abc"]
    others = [pool.submit(1, name) for name in "abc"]
    assert [one.worker for one in mine] == [1, 1, None]
    assert [one.worker for one in others] == [0, 0, None]
    pool.dispatchers[0].set_health(0, WorkerState.SERVING)
    pool.dispatchers[1].abort(others[0])
    pool.settle()
    assert others[2].worker == 0
    assert pool.failures == [[], []]


def test_front_end_without_a_worker_leaves_slots_to_the_others() -> None:
    pool = Pool(LateBinding([1]))
    pool.dispatchers[0].set_health(0, WorkerState.LOST)
    pool.settle()
    stuck, served = pool.submit(0, "a"), pool.submit(1, "b")
    assert (stuck.worker, served.worker) == (None, 0)
    pool.dispatchers[0].set_health(0, WorkerState.SERVING)
    pool.dispatchers[1].abort(served)
    pool.settle()
    assert stuck.worker == 0


def test_request_too_large_for_all_workers_of_its_front_end_waits() -> None:
    """It would occupy the worker that the policy chose, which its front end does not use."""
    pool = Pool(LateBinding([1, 1]), 2)
    pool.dispatchers[0].set_capacity(1, Capacity(slots=1, kv_tokens=4))
    pool.dispatchers[0].set_health(0, WorkerState.LOST)
    pool.settle()
    large, small = pool.submit(0, "a"), pool.submit(0, "b", size=3)
    assert (large.worker, small.worker) == (None, 1)
    pool.dispatchers[0].set_health(0, WorkerState.SERVING)
    pool.settle()
    assert large.worker == 0


def test_number_of_a_removed_worker_is_used_again() -> None:
    pool = Pool(LateBinding([1]))
    for generation in range(5):
        for dispatcher in pool.dispatchers:
            number = dispatcher.add_worker(Capacity(slots=1), name=f"new {generation}")
            pool.settle()
            dispatcher.remove_worker(number)
            pool.settle()
    assert [one.name for one in pool.server.workers] == ["0", None]


def test_worker_that_came_back_by_another_number_is_known_at_a_rejoin() -> None:
    pool = Pool(LateBinding([1]), front_ends=1)
    dispatcher = pool.dispatchers[0]
    numbers = [dispatcher.add_worker(Capacity(slots=1), name=name) for name in "ab"]
    for number in numbers:
        dispatcher.remove_worker(number)
    assert dispatcher.add_worker(Capacity(slots=1), name="b") == numbers[0]
    remote = RemotePolicy(pool.clock, pool.errors.append)
    connect_in_process(pool.server, remote, dispatcher, pool.clock)
    pool.settle()
    assert pool.errors == []
    assert [one.name for one in pool.server.workers][:2] == ["0", "b"]


def test_new_worker_gets_what_waits_though_another_front_end_had_it_before() -> None:
    pool = Pool(LateBinding([2]))
    for front_end in (0, 1):
        pool.submit(front_end, "first")
    waits = [pool.submit(0, str(name)) for name in range(8)]
    for front_end in (1, 0):
        new = pool.dispatchers[front_end].add_worker(Capacity(slots=8), name="new")
        pool.settle()
    assert [one.worker for one in waits] == [new] * 8


def test_worker_that_serves_again_gets_what_waits() -> None:
    pool = Pool(LateBinding([1, 4]), 2)
    pool.dispatchers[0].set_health(1, WorkerState.DRAINING)
    pool.settle()
    first, *waits = [pool.submit(0, str(name)) for name in range(5)]
    assert [one.worker for one in (first, *waits)] == [0, None, None, None, None]
    pool.dispatchers[0].set_health(1, WorkerState.SERVING)
    pool.settle()
    assert [one.worker for one in waits] == [1] * 4


def test_capacity_of_a_front_end_that_left_or_lost_the_worker_does_not_count() -> None:
    pool = Pool(LateBinding([9]))
    for dispatcher, slots in zip(pool.dispatchers, (1, 3), strict=True):
        dispatcher.set_capacity(0, Capacity(slots=slots))
    pool.settle()
    requests = [pool.submit(1, name) for name in "abcd"]
    assert [one.worker for one in requests] == [0, None, None, None]
    pool.dispatchers[0].set_health(0, WorkerState.LOST)
    pool.settle()
    assert [one.worker for one in requests] == [0, 0, 0, None]
    pool.dispatchers[0].set_health(0, WorkerState.SERVING)
    pool.dispatchers[1].abort(requests[0])
    pool.settle()
    assert requests[3].worker is None
    pool.dispatchers[0].close()
    pool.settle()
    assert requests[3].worker == 0


def test_number_that_is_used_again_has_no_capacity_of_the_worker_before() -> None:
    pool = Pool(LateBinding([1]), front_ends=1)
    dispatcher = pool.dispatchers[0]
    number = dispatcher.add_worker(Capacity(slots=1), name="small")
    dispatcher.remove_worker(number)
    pool.settle()
    assert dispatcher.add_worker(Capacity(slots=3), name="large") == number
    requests = [pool.submit(0, name) for name in "abcde"]
    assert [one.worker for one in requests].count(number) == 3


def test_report_of_a_worker_comes_from_a_front_end_that_uses_it() -> None:
    policy = LateBinding([1])
    pool = Pool(policy)
    pool.dispatchers[0].set_health(0, WorkerState.LOST)
    pool.settle()
    report = WorkerReport(waiting=0, running=1, tokens=0, kv_usage=0.0)
    pool.dispatchers[1].report_worker(0, report)
    pool.settle()
    assert policy.reports == [(0, report)]


def test_larger_capacity_frees_what_was_too_large() -> None:
    pool = Pool(LateBinding([1, 1]), 2)
    pool.dispatchers[0].set_capacity(0, Capacity(slots=1, kv_tokens=4))
    pool.dispatchers[0].set_health(1, WorkerState.LOST)
    first = pool.submit(1, "first", size=3)
    large = pool.submit(0, "large")
    assert (first.worker, large.worker) == (0, None)
    pool.dispatchers[1].abort(first)
    pool.settle()
    assert large.worker is None, "no worker that its front end uses has room for it"
    pool.dispatchers[0].set_capacity(0, Capacity(slots=1, kv_tokens=9))
    pool.settle()
    assert large.worker == 0


def test_front_end_cannot_add_workers_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_server, "MAX_WORKERS", 3)
    pool = Pool(LateBinding([1]))
    link, session = greeted(pool)
    for number in range(1, 5):
        session.receive(["worker", number, f"w{number}", 1, None, "lost"])
    assert "3 workers already" in link.messages[-1][1]
    assert [one.name for one in pool.server.workers] == ["0", None, None]


def test_front_end_that_joins_brings_what_runs() -> None:
    policy = LateBinding([2])
    pool = Pool(policy, front_ends=1)
    own = LateBinding([2])
    remote = RemotePolicy(pool.clock, pool.errors.append)
    dispatcher = RequestDispatcher(own, 1, pool.clock, lambda error: STOP)
    requests = [DispatchedRequest(name, 5) for name in "abc"]
    for request in requests:
        dispatcher.submit(request)
    dispatcher.start(requests[0], requests[0].status)  # type: ignore[arg-type]
    connect_in_process(pool.server, remote, dispatcher, pool.clock)
    pool.settle()
    assert [one.worker for one in requests] == [0, 0, None]
    last = pool.submit(0, "d")
    assert last.worker is None, "no slot is counted twice"
    dispatcher.report_tokens(requests[0], 3)
    for request in requests[:2]:
        dispatcher.finish(request)
    pool.settle()
    assert [requests[2].worker, last.worker] == [0, 0]
    assert (policy.refused, pool.errors) == ([], [])


def test_lost_worker_told_by_all_keeps_the_order_of_the_pool() -> None:
    pool = Pool(LateBinding([1, 1]), 2)
    requests = [pool.submit(0, "a"), pool.submit(1, "b"), pool.submit(0, "c")]
    assert [one.worker for one in requests] == [0, 1, None]
    for dispatcher in pool.dispatchers:
        dispatcher.set_health(1, WorkerState.LOST)
    pool.settle()
    assert states(pool) == [WorkerState.SERVING, WorkerState.LOST]
    pool.dispatchers[0].abort(requests[0])
    pool.settle()
    assert [one.worker for one in requests[1:]] == [0, None]
    assert pool.failures == [[], []]
