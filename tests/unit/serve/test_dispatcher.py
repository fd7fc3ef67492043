"""Requests between their clients and a policy: whatever happens, the policy's protocol is kept."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest
from helpers.fakes.late_binding_policy import LateBinding
from helpers.harnesses.proxy_setup import run
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.requests.policy import (
    Assignment,
    Decision,
    Request,
    RequestId,
    RoutingPolicy,
    WorkerState,
)
from equipoise.balancer.requests.policy_factory import PolicyFactory, routing_policy_factory
from equipoise.balancer.requests.request_router import RequestRouter
from equipoise.serve import dispatcher as dispatcher_module
from equipoise.serve import openai_protocol
from equipoise.serve.dispatcher import RequestDispatcher
from equipoise.serve.outcomes import RequestRefused
from equipoise.serve.request_state import (
    CLOSED,
    BoundToWorker,
    Queued,
    RequestState,
    Running,
    load_imbalance,
)

WORKERS, SLOTS = 3, 2
SERVING = WorkerState.SERVING
STATES = st.sampled_from(WorkerState)
EVENTS = st.one_of(
    st.tuples(st.just("arrive"), st.none() | st.integers(0, WORKERS - 1)),
    st.tuples(st.sampled_from(["begin", "made", "finish", "leave", "again"]), st.integers(0, 99)),
    st.tuples(st.sampled_from(["turn"]), st.none()),
    st.tuples(st.integers(0, WORKERS - 1), STATES),
    st.tuples(st.sampled_from(["drain_worker", "resume_worker"]), st.integers(0, WORKERS - 1)),
)


class DispatcherDriver:
    """A dispatcher over the strict policy, driven as its callers drive it."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self.dispatcher = RequestDispatcher(policy, WORKERS, max_queued=5)
        self.states: list[RequestState] = []
        self.bounds: dict[int, list[BoundToWorker]] = {}
        self.started_ids: set[int] = set()

    async def apply(self, what: object, how: object) -> None:
        if isinstance(what, int):
            assert isinstance(how, WorkerState)
            self.dispatcher.set_health(what, how)
        elif what == "turn":
            await asyncio.sleep(0)
        elif what in ("drain_worker", "resume_worker"):
            getattr(self.dispatcher, str(what))(how)
        elif what == "arrive":
            self.arrive(how)
        elif self.states:
            assert isinstance(how, int)
            self.touch(str(what), self.states[how % len(self.states)], how // 10)
        self.check_invariants()

    def arrive(self, worker: object) -> None:
        assert worker is None or isinstance(worker, int)
        try:
            self.states.append(self.dispatcher.submit(7, worker))
        except RequestRefused:
            away = worker is not None and self.dispatcher.workers[worker].state is not SERVING
            # More wait where a worker was lost that had not begun what it had.
            assert away or self.dispatcher.queued >= 5

    def touch(self, what: str, state: RequestState, age: int) -> None:
        # A task acts by a binding that it knows, which may be over: mostly the last one.
        bounds = self.bounds.setdefault(state.request_id, [BoundToWorker(0)])
        bound = bounds[-1 - (age % len(bounds))]
        match what:
            case "begin":
                current = state.status is bound
                assert self.dispatcher.start_answer(state, bound) == current
                if current:
                    assert state.request_id not in self.started_ids, "passed on twice"
                    self.started_ids.add(state.request_id)
            case "made":
                self.dispatcher.report_tokens(state, state.reported_tokens + 3)
            case "finish":
                self.dispatcher.finish(state, bound, 9)
            case "leave":
                self.dispatcher.abort(state)
            case "again":
                with suppress(
                    RequestRefused
                ):  # by a client that wants one worker, which does not serve
                    self.dispatcher.retry(state, bound)

    def check_invariants(self) -> None:
        """Invariants."""
        assert self.dispatcher.policy_errors == 0
        requests = self.dispatcher.requests
        assert self.dispatcher.queued == sum(isinstance(one.status, Queued) for one in requests)
        assert all(one.status is not CLOSED for one in requests)
        for number, view in enumerate(self.dispatcher.workers):
            mine = [t for t in requests if isinstance(t.status, BoundToWorker | Running)
                    if t.status.worker == number]  # fmt: skip
            assert sorted(view.requests) == sorted(one.request_id for one in mine)
            assert view.load == sum(one.size + one.reported_tokens for one in mine)
            assert len(mine) <= SLOTS
        for state in self.states:
            bounds = self.bounds.setdefault(state.request_id, [BoundToWorker(0)])
            if isinstance(state.status, BoundToWorker) and state.status is not bounds[-1]:
                bounds.append(state.status)
            if state.request_id in self.started_ids and state.status is not CLOSED:
                assert isinstance(state.status, Running)


def strict_policy(slots: Sequence[int], rooms: Sequence[int | None]) -> RoutingPolicy:
    return LateBinding(slots, rooms)


FACTORIES = (
    strict_policy,
    *(routing_policy_factory(name, {}) for name in ("fit", "br0", "jsq_load", "round_robin")),
)


@pytest.mark.slow
@pytest.mark.parametrize("factory", FACTORIES)
@given(events=st.lists(EVENTS, max_size=80))
def test_policy_protocol_holds_for_any_event_order(
    factory: PolicyFactory, events: list[tuple[object, object]]
) -> None:
    async def work() -> None:
        driver = DispatcherDriver(factory([SLOTS] * WORKERS, [None] * WORKERS))
        for what, how in events:
            await driver.apply(what, how)
        for state in driver.states:
            driver.dispatcher.abort(state)
        await asyncio.sleep(0)
        driver.check_invariants()
        assert driver.dispatcher.queued == 0
        assert [view.load for view in driver.dispatcher.workers] == [0] * WORKERS

    run(work())


class RecordingPolicy(LateBinding):
    """Counts the calls of `on_tokens`."""

    def __init__(self) -> None:
        super().__init__([8])
        self.turns: list[tuple[dict[RequestId, int], list[RequestId]]] = []

    def on_tokens(self, counts: object, finished: object = ()) -> Decision:
        assert isinstance(counts, dict)
        assert isinstance(finished, list)
        self.turns.append((dict(counts), list(finished)))
        return super().on_tokens(counts, finished)


def test_policy_gets_tokens_of_one_loop_turn_together() -> None:
    async def work() -> None:
        policy = RecordingPolicy()
        dispatcher = RequestDispatcher(policy, 1, max_queued=9)
        states = [dispatcher.submit(5) for _ in range(4)]
        for state in states:
            assert isinstance(state.status, BoundToWorker)
            dispatcher.start_answer(state, state.status)
            dispatcher.report_tokens(state, 3)
        dispatcher.finish(states[0], BoundToWorker(0), 5)
        assert policy.turns == []
        await asyncio.sleep(0)
        assert policy.turns == [({0: 5, 1: 3, 2: 3, 3: 3}, [0])]

    run(work())


class Broken(LateBinding):
    """Binds what does not exist, and raises at tokens."""

    def on_arrival(self, request: Request) -> Decision:
        super().on_arrival(request)
        return Decision((Assignment(99, 0), Assignment(request.id, 7)))

    def on_abort(self, request: RequestId) -> Decision:
        raise ValueError(request)


def test_policy_errors_are_counted_and_request_can_leave() -> None:
    async def work() -> None:
        dispatcher = RequestDispatcher(Broken([1]), 1, max_queued=9)
        state = dispatcher.submit(5)
        assert isinstance(state.status, Queued)
        assert dispatcher.policy_errors == 2
        dispatcher.abort(state)
        assert (dispatcher.policy_errors, dispatcher.requests) == (3, ())

    run(work())


def test_request_rejected_by_policy_is_not_kept() -> None:
    class RefusingPolicy(LateBinding):
        def on_arrival(self, request: Request) -> Decision:
            raise ValueError(request)

    async def work() -> None:
        dispatcher = RequestDispatcher(RefusingPolicy([1]), 1, max_queued=9)
        with pytest.raises(ValueError, match="Request"):
            dispatcher.submit(5)
        assert (dispatcher.queued, dispatcher.requests) == (0, ())

    run(work())


def test_retry_goes_to_least_loaded_other_worker() -> None:
    async def work() -> None:
        dispatcher = RequestDispatcher(LateBinding([4, 4, 4]), 3, max_queued=9)
        states = [dispatcher.submit(5) for _ in range(4)]
        last = states[-1].status
        assert isinstance(last, BoundToWorker)
        assert last.worker == 0
        dispatcher.retry(states[-1], last)
        assert isinstance(states[-1].status, BoundToWorker)
        assert states[-1].status.worker == 1
        assert load_imbalance(dispatcher.workers).imbalance == 3 * 10 - 20

    run(work())


@pytest.mark.parametrize("name", ["fit", "brh", "jsq_load", "fast_phi"])
def test_policy_frees_slots_after_largest_token_counts(name: str) -> None:
    async def work() -> None:
        policy = routing_policy_factory(name, {})([SLOTS], [None])
        assert isinstance(policy, RequestRouter)
        dispatcher = RequestDispatcher(policy, 1, max_queued=5)
        large, small = dispatcher.submit(openai_protocol.MOST_TOKENS), dispatcher.submit(7)
        for state, tokens in ((large, openai_protocol.MOST_TOKENS), (small, 3)):
            assert isinstance(state.status, BoundToWorker)
            dispatcher.finish(state, state.status, tokens)
        await asyncio.sleep(0)
        assert (dispatcher.policy_errors, policy.loads, policy.counts, policy.unassigned) == (
            0,
            [0],
            [0],
            0,
        )

    run(work())


def test_policy_decides_without_the_rest_of_a_step_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher_module, "STEP_TIMEOUT_SECONDS", 0.01)

    async def work() -> None:
        policy = routing_policy_factory("fit", {})([SLOTS], [None])
        dispatcher = RequestDispatcher(policy, 1, max_queued=5)
        states = [dispatcher.submit(7) for _ in range(SLOTS + 1)]
        first, late = states[0], states[-1]
        for state in states[:-1]:
            assert isinstance(state.status, BoundToWorker)
            dispatcher.start_answer(state, state.status)
        await asyncio.sleep(0)
        assert isinstance(first.status, Running)
        dispatcher.finish(first, BoundToWorker(0), 2)
        await asyncio.sleep(0)
        assert isinstance(late.status, Queued), "the others have not told of this step"
        while isinstance(late.status, Queued):
            await asyncio.sleep(0.01)
        assert isinstance(late.status, BoundToWorker)

    run(work())
