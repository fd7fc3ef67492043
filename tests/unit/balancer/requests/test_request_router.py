"""A router keeps its books, whatever happens in whatever order."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    invariant,
    multiple,
    rule,
)

from equipoise.balancer.requests.policy import (
    Capacity,
    Decision,
    Request,
    RequestId,
    WorkerChange,
    WorkerReport,
    WorkerState,
)
from equipoise.balancer.requests.policy_settings import (
    POLICIES,
    Binding,
    RoutingPolicySettings,
    WhenFull,
)
from equipoise.balancer.requests.request_router import RequestRouter
from equipoise.hal.errors import PolicyError, RequestError, RouterError, WorkerError

WORKERS = 3
SLOTS, ROOM = 2, 40
CAPACITY = Capacity(slots=SLOTS, kv_tokens=ROOM)
PICK = st.integers(0, 1 << 16)
BINDING_LATE = [name for name, rule in POLICIES.items() if rule.binding is Binding.POOL]
SETTINGS = st.builds(
    RoutingPolicySettings,
    name=st.sampled_from(sorted(POLICIES)),
    when_full=st.sampled_from(WhenFull),
)
STATES = (WorkerState.SERVING, WorkerState.DRAINING)


class RouterModel(RuleBasedStateMachine):
    """One front end, alone; every request is in the pool, at one worker, or gone."""

    names: Bundle[int] = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.router = RequestRouter(RoutingPolicySettings(), [CAPACITY] * WORKERS)
        self.log: list[tuple[Callable[[RequestRouter], Decision], Decision]] = []
        self.policy_settings = RoutingPolicySettings()
        self.states = [WorkerState.SERVING] * WORKERS
        self.sizes: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.waiting_requests: list[int] = []
        self.worker_of: dict[int, int] = {}
        self.tokens_made: dict[int, int] = {}
        self.started_requests: set[int] = set()

    # What happens.

    @rule(policy_settings=SETTINGS)
    def start(self, policy_settings: RoutingPolicySettings) -> None:
        """Starts a router with any policy; does nothing once it had an event."""
        if not self.log:
            self.policy_settings = policy_settings
            self.router = RequestRouter(policy_settings, [CAPACITY] * WORKERS)

    @rule(target=names, size=st.integers(1, 30), worker=st.none() | st.integers(0, WORKERS - 1))
    def arrive(self, size: int, worker: int | None) -> int | MultipleResults[int]:
        if worker is not None and self.states[worker] is not WorkerState.SERVING:
            self.check_refused(WorkerError, lambda r: r.on_arrival(request(-1, size, worker)))
            return multiple()
        name = len(self.sizes)
        self.sizes[name], self.tokens_made[name] = size, 0
        if worker is not None:
            self.pinned[name] = worker
        self.waiting_requests.append(name)
        self.apply_event(lambda r: r.on_arrival(request(name, size, worker)))
        return name

    @rule(pick=PICK, tokens=st.integers(0, 3))
    def step(self, pick: int, tokens: int) -> None:
        """Some requests make tokens, and some of those end."""
        names = [name for name in self.worker_of if pick >> name % 8 & 1]
        finished = [name for name in names if pick >> name % 5 & 2]
        for name in names:
            self.tokens_made[name] += tokens
            self.started_requests |= {name} if tokens else set()
        for name in finished:
            del self.worker_of[name]
        self.apply_event(lambda r: r.on_tokens(dict.fromkeys(names, tokens), finished))

    @rule(name=names)
    def abort(self, name: int) -> None:
        if name not in self.worker_of and name not in self.waiting_requests:
            self.check_refused(RequestError, lambda r: r.on_abort(name))
            return
        if self.worker_of.pop(name, None) is None:
            self.waiting_requests.remove(name)
        self.apply_event(lambda r: r.on_abort(name))

    @rule(worker=st.integers(0, WORKERS - 1))
    def lose(self, worker: int) -> None:
        requests_there = [name for name, home in self.worker_of.items() if home == worker]
        expected_lost = {
            name for name in requests_there if name in self.started_requests or name in self.pinned
        }
        expected_lost |= {name for name in self.waiting_requests if self.pinned.get(name) == worker}
        for name in requests_there:
            del self.worker_of[name]
        self.waiting_requests = sorted({*self.waiting_requests, *requests_there} - expected_lost)
        self.states[worker] = WorkerState.LOST
        change = WorkerChange(worker=worker, state=WorkerState.LOST)
        assert set(self.apply_event(lambda r: r.on_worker_change(change)).lost) == expected_lost

    @rule(worker=st.integers(0, WORKERS - 1), state=st.sampled_from(STATES))
    def turn(self, worker: int, state: WorkerState) -> None:
        change = WorkerChange(worker=worker, state=state)
        if self.states[worker] is WorkerState.LOST and state is WorkerState.DRAINING:
            self.check_refused(WorkerError, lambda r: r.on_worker_change(change))
            return
        self.states[worker] = state
        self.apply_event(lambda r: r.on_worker_change(change))

    @rule(worker=st.integers(0, WORKERS - 1), pick=PICK)
    def report(self, worker: int, pick: int) -> None:
        worker_report = WorkerReport(
            waiting=pick % 5, running=pick % 3, tokens=pick % 99, kv_usage=0.7
        )
        self.apply_event(
            lambda r: r.on_worker_change(WorkerChange(worker=worker, report=worker_report))
        )

    @rule(name=names, tokens=st.sampled_from((-1, 1 << 40)))
    def report_impossible_tokens(self, name: int, tokens: int) -> None:
        self.check_refused(RequestError, lambda r: r.on_tokens({name: tokens}))
        self.check_refused(RequestError, lambda r: r.on_finish(-1))
        self.check_refused(
            RequestError, lambda r: r.on_tokens(dict.fromkeys(self.worker_of, 1), [-1])
        )
        self.check_refused(RequestError, lambda r: r.on_arrival(request(-1, 0)))
        self.check_refused(WorkerError, lambda r: r.on_arrival(request(-1, 5, WORKERS)))
        if name in self.waiting_requests:
            self.check_refused(
                RequestError, lambda r: r.on_tokens(dict.fromkeys([*self.worker_of, name], 1))
            )
            self.check_refused(RequestError, lambda r: r.on_arrival(request(name, 5)))

    # What follows.

    def apply_event(self, event: Callable[[RequestRouter], Decision]) -> Decision:
        decision = event(self.router)
        self.log.append((event, decision))
        assigned = [a.request for a in decision.assignments]
        for assignment in decision.assignments:
            self.bind(int(str(assignment.request)), assignment.worker)
        # Pinned ones go first; the others keep their order where the policy takes the first.
        unpinned = [name for name in assigned if name not in self.pinned]
        if self.policy_settings.info.binding is Binding.PUSH:
            assert unpinned == sorted(unpinned, key=lambda name: int(str(name)))
        return decision

    def bind(self, name: int, worker: int) -> None:
        assert self.states[worker] is WorkerState.SERVING
        assert self.pinned.get(name, worker) == worker
        self.waiting_requests.remove(name)
        self.worker_of[name] = worker
        if self.holds:
            assert self.count(worker) <= SLOTS
            assert self.load(worker) <= ROOM

    @property
    def holds(self) -> bool:
        binds_late = self.policy_settings.name in BINDING_LATE
        return binds_late or self.policy_settings.when_full is WhenFull.HOLD

    def count(self, worker: int) -> int:
        return sum(home == worker for home in self.worker_of.values())

    def load(self, worker: int) -> int:
        names = [name for name, home in self.worker_of.items() if home == worker]
        return sum(self.sizes[name] + self.tokens_made[name] for name in names)

    def check_refused(
        self, error: type[Exception], event: Callable[[RequestRouter], Decision]
    ) -> None:
        before = self.router_state
        with pytest.raises(error):
            event(self.router)
        assert self.router_state == before

    @property
    def router_state(self) -> tuple[list[int], list[int], int, tuple[WorkerState, ...]]:
        router = self.router
        return router.loads, router.counts, router.unassigned, router.states

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        workers = range(WORKERS)
        loads, counts = [self.load(w) for w in workers], [self.count(w) for w in workers]
        assert self.router_state == (loads, counts, len(self.waiting_requests), tuple(self.states))

    @invariant()
    def nobody_waits_for_a_worker_that_is_lost(self) -> None:
        awaited_workers = {
            self.pinned[name] for name in self.waiting_requests if name in self.pinned
        }
        assert all(self.states[worker] is not WorkerState.LOST for worker in awaited_workers)

    def teardown(self) -> None:
        """A second router decides the same for the same events."""
        second_router = RequestRouter(self.policy_settings, [CAPACITY] * WORKERS)
        assert [event(second_router) for event, _ in self.log] == [
            decision for _, decision in self.log
        ]


def request(name: int, size: int, worker: int | None = None) -> Request:
    return Request(id=name, size=size, worker=worker)


TestRouterStateMachine = pytest.mark.slow(RouterModel.TestCase)
TestRouterStateMachine.settings = settings(max_examples=150, stateful_step_count=40)


def lose_worker(router: RequestRouter, worker: int) -> Decision:
    return router.on_worker_change(WorkerChange(worker=worker, state=WorkerState.LOST))


def test_router_reroutes_requests_of_lost_worker_in_order() -> None:
    router = RequestRouter(
        RoutingPolicySettings(name="jsq", when_full=WhenFull.HOLD), [Capacity(slots=4)]
    )
    for name in range(6):
        router.on_arrival(request(name, 1))
    router.on_abort(0)
    assert lose_worker(router, 0) == Decision()
    assert router.unassigned == 5
    back = router.on_worker_change(WorkerChange(worker=0, state=WorkerState.SERVING))
    assert [a.request for a in back.assignments] == [1, 2, 3, 4]


def test_router_loses_started_requests_with_their_worker() -> None:
    router = RequestRouter(RoutingPolicySettings(name="jsq"), [Capacity(), Capacity()])
    for name in range(4):
        router.on_arrival(request(name, 1))
    router.on_tokens({0: 1, 2: 0})
    decision = lose_worker(router, 0)
    assert decision.lost == (0,)
    assert [(a.request, a.worker) for a in decision.assignments] == [(2, 1)]
    with pytest.raises(RequestError, match="not known, or gone"):
        router.on_finish(0)


def test_router_loses_pinned_requests_with_their_worker() -> None:
    router = RequestRouter(
        RoutingPolicySettings(name="br0"), [Capacity(slots=1), Capacity(slots=1)]
    )
    router.on_arrival(request(0, 1, worker=0))
    router.on_arrival(request(1, 1, worker=0))
    assert router.unassigned == 1
    assert lose_worker(router, 0).lost == (0, 1)
    assert router.unassigned == 0


def test_router_resets_reports_of_restarted_worker_with_front_ends() -> None:
    router = RequestRouter(RoutingPolicySettings(name="jsq", front_ends=3), [Capacity()])
    router.on_arrival(request(0, 7))
    assert router.loads == [21]
    worker_report = WorkerReport(waiting=1, running=1, tokens=10, kv_usage=0.1)
    router.on_worker_change(WorkerChange(worker=0, report=worker_report))
    assert (router.loads, router.counts) == ([10], [2])
    lose_worker(router, 0)
    router.on_worker_change(WorkerChange(worker=0, state=WorkerState.SERVING))
    assert (router.loads, router.counts) == ([21], [3])


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("workers", [1, 16, 32, 48])
def test_router_accepts_any_number_of_unbounded_workers(name: str, workers: int) -> None:
    # The sum of 32 capacities without a bound was 2^64: no slot was free.
    router = RequestRouter(RoutingPolicySettings(name=name), [Capacity()] * workers)
    for number in range(3):
        assert len(router.on_arrival(request(number, 5)).assignments) == 1
    huge = Capacity(slots=1 << 80, kv_tokens=1 << 80)
    assert router.on_worker_change(WorkerChange(worker=0, capacity=huge)) == Decision()


@pytest.mark.parametrize("name", BINDING_LATE)
def test_router_fills_slots_that_end_together(name: str) -> None:
    # A decision of `fit` stopped at the first worker above the mean: one was bound, not six.
    router = RequestRouter(RoutingPolicySettings(name=name), [Capacity(slots=2)] * 3)
    for number in range(12):
        router.on_arrival(request(number, 7))
    assert router.unassigned == 6
    assert len(router.on_tokens({}, range(6)).assignments) == 6


@pytest.mark.parametrize("name", BINDING_LATE)
def test_router_serves_others_when_one_worker_has_no_room(name: str) -> None:
    workers = [Capacity(slots=2, kv_tokens=10), Capacity(slots=1, kv_tokens=1000)]
    router = RequestRouter(RoutingPolicySettings(name=name), workers)
    assert router.on_arrival(request(0, 100)).assignments[0].worker == 1
    for number in (1, 2, 3, 4):
        router.on_arrival(request(number, 100))
    assert [(a.request, a.worker) for a in router.on_finish(0).assignments] == [(1, 1)]


class BusyFleet:
    """64 workers of 8 slots, always with 512 small requests that wait.

    A request makes 25 to 50 tokens. Without `lockstep` only the first of them is told.
    """

    def __init__(self, lockstep: bool) -> None:
        settings = RoutingPolicySettings(name="fit", lockstep=lockstep)
        self.router = RequestRouter(settings, [Capacity(slots=8)] * 64)
        self.lockstep, self.dice, self.names = lockstep, Random(0), count(1)
        self.left: dict[RequestId, int] = {}
        self.begun: set[RequestId] = set()
        self.bound: set[RequestId] = set()
        for _ in range(1024):
            self.arrive_small()

    def arrive_small(self) -> None:
        self.note(self.router.on_arrival(request(next(self.names), self.dice.randint(50, 150))))

    def note(self, decision: Decision) -> None:
        bound = {assignment.request for assignment in decision.assignments}
        self.bound |= bound
        self.left |= {name: self.dice.randint(25, 50) for name in bound}

    def step(self) -> None:
        """Every running request makes a token; as many come as end."""
        told = [name for name in self.left if self.lockstep or name not in self.begun]
        self.begun |= set(told)
        self.left = {name: left - 1 for name, left in self.left.items()}
        ended = [name for name, left in self.left.items() if left == 0]
        self.left = {name: left for name, left in self.left.items() if left > 0}
        self.note(self.router.on_tokens(dict.fromkeys(told, 1), ended))
        for _ in ended:
            self.arrive_small()


@pytest.mark.parametrize("lockstep", [True, False])
def test_fit_binds_large_request_though_small_ones_keep_coming(lockstep: bool) -> None:
    fleet = BusyFleet(lockstep)
    for _ in range(60):
        fleet.step()
    fleet.note(fleet.router.on_arrival(request(0, 1000)))
    for _ in range(1400):
        fleet.step()
    assert 0 in fleet.bound  # after 1,215 steps, and 317; 3,771 by waiting in proportion only


def test_fit_skips_request_that_fits_nowhere() -> None:
    router = RequestRouter(RoutingPolicySettings(name="fit"), [Capacity(kv_tokens=50)])
    assert router.on_arrival(request(0, 60)).assignments == ()
    assert [a.request for a in router.on_arrival(request(1, 20)).assignments] == [1]


@pytest.mark.parametrize(
    "change",
    [
        WorkerChange(worker=2, capacity=Capacity(slots=-1)),
        WorkerChange(worker=-1, state=WorkerState.LOST),
        WorkerChange(worker=3),
        WorkerChange(worker=0, state="lost"),  # type: ignore[arg-type]
        WorkerChange(worker=2, state="lost"),  # type: ignore[arg-type]
        WorkerChange(worker="0"),  # type: ignore[arg-type]
        WorkerChange(worker=0, state=WorkerState.LOST, report=3),  # type: ignore[arg-type]
        WorkerChange(
            worker=0,
            state=WorkerState.LOST,
            report=WorkerReport(waiting=1.5, running=0, tokens=0, kv_usage=0.0),  # type: ignore[arg-type]
        ),
        WorkerChange(worker=2, report=WorkerReport(waiting=-1, running=0, tokens=0, kv_usage=0.0)),
        WorkerChange(
            worker=0,
            state=WorkerState.LOST,
            report=WorkerReport(waiting=0, running=0, tokens=0, kv_usage=float("nan")),
        ),
    ],
)
def test_router_refuses_bad_worker_change_and_keeps_state(change: WorkerChange) -> None:
    router = RequestRouter(RoutingPolicySettings(), [CAPACITY] * 2)
    with pytest.raises(WorkerError):
        router.on_worker_change(change)
    assert router.states == (WorkerState.SERVING,) * 2


@pytest.mark.parametrize(
    ("fields", "worker", "tokens", "error", "message"),
    [
        ({"size": 0}, 0, 0, RequestError, "size must be at least 1, got 0"),
        ({"size": 2.5}, 0, 0, RequestError, "size must be a whole number, got 2.5"),
        ({"id": "b"}, 0, 0, RequestError, "request 'b' has arrived already"),
        ({"worker": 2}, 0, 0, WorkerError, "there is no worker 2: there are 2"),
        ({}, 2, 0, WorkerError, "there is no worker 2: there are 2"),
        ({}, -1, 0, WorkerError, "there is no worker -1: there are 2"),
        ({}, 1.0, 0, RequestError, "worker must be a whole number, got 1.0"),
        ({}, 0, -1, RequestError, "tokens must be at least 0, got -1"),
        ({}, 0, 2**31, RequestError, "tokens must be at most 2147483647, got 2147483648"),
        ({}, 0, 1.5, RequestError, "tokens must be a whole number, got 1.5"),
    ],
)
def test_router_refuses_bad_running_request_and_keeps_state(
    fields: dict[str, Any], worker: Any, tokens: Any, error: type[Exception], message: str
) -> None:
    router = RequestRouter(RoutingPolicySettings(name="jsq"), [CAPACITY] * 2)
    router.on_running(request(0, 5), 0, 1)
    router.on_arrival(Request(id="b", size=3))
    before = (router.loads, router.counts, router.unassigned)
    with pytest.raises(error) as raised:
        router.on_running(Request(**{"id": "a", "size": 10, **fields}), worker, tokens)
    assert str(raised.value) == message
    assert (router.loads, router.counts, router.unassigned) == before


@pytest.mark.parametrize("name", POLICIES)
def test_router_refuses_running_request_of_lost_worker(name: str) -> None:
    router = RequestRouter(RoutingPolicySettings(name=name), [CAPACITY] * 2)
    lose_worker(router, 0)
    with pytest.raises(WorkerError, match="worker 0"):
        router.on_running(request(0, 5), 0, 1)
    router.on_running(request(0, 5), 1, 1)
    assert (router.loads, router.counts) == ([0, 6], [0, 1])


@pytest.mark.parametrize("name", POLICIES)
def test_router_counts_running_request_until_it_ends(name: str) -> None:
    router = RequestRouter(RoutingPolicySettings(name=name), [CAPACITY] * 2)
    assert router.on_running(request(0, 5), 1, 3) == Decision()
    assert (router.loads, router.counts) == ([0, 8], [0, 1])
    router.on_tokens({0: 2})
    assert (router.loads, router.counts) == ([0, 10], [0, 1])
    router.on_finish(0)
    assert (router.loads, router.counts, router.unassigned) == ([0, 0], [0, 0], 0)
    with pytest.raises(RequestError, match="not known, or gone"):
        router.on_finish(0)


@pytest.mark.parametrize("name", BINDING_LATE)
def test_router_binds_nothing_beside_running_requests_that_fill_slots(name: str) -> None:
    settings = RoutingPolicySettings(name=name, lockstep=False)
    router = RequestRouter(settings, [Capacity(slots=1)])
    # More than it has slots: the front end had another policy that knew less.
    for number in range(2):
        router.on_running(request(number, 5), 0, 1)
    assert router.on_arrival(request(2, 5)) == Decision()
    assert router.on_finish(0) == Decision()
    assert [one.request for one in router.on_finish(1).assignments] == [2]


def test_router_loses_running_requests_and_moves_those_without_a_token() -> None:
    router = RequestRouter(RoutingPolicySettings(name="jsq"), [Capacity(), Capacity()])
    router.on_running(request(0, 5), 0, 1)
    router.on_running(request(1, 5), 0, 0)
    router.on_running(request(2, 5, worker=0), 0, 0)
    decision = lose_worker(router, 0)
    assert sorted(map(str, decision.lost)) == ["0", "2"], "one has begun, one may go nowhere else"
    assert [(one.request, one.worker) for one in decision.assignments] == [(1, 1)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 2.5}, "size must be a whole number, got 2.5"),
        ({"size": 2**31}, "size must be at most 2147483647, got 2147483648"),
        ({"worker": 1.0}, "worker must be a whole number, got 1.0"),
        ({"hits": [-1_000_000, 0]}, "hits must be at least 0, got -1000000"),
        ({"hits": [0, 11]}, "hits must be at most 10, got 11"),
        ({"hits": [0.5, 0]}, "hits must be a whole number, got 0.5"),
        ({"hits": 3}, "hits must be a sequence of numbers, got 3"),
        ({"expected": -1}, "expected must be at least 0, got -1"),
        ({"expected": 1.5}, "expected must be a whole number, got 1.5"),
    ],
)
def test_router_refuses_bad_request_by_name(fields: dict[str, Any], message: str) -> None:
    router = RequestRouter(RoutingPolicySettings(name="jsq"), [CAPACITY] * 2)
    with pytest.raises(RequestError) as error:
        router.on_arrival(Request(**{"id": "a", "size": 10, **fields}))
    assert str(error.value) == message
    assert router.on_arrival(Request(id="a", size=10)).assignments
    with pytest.raises(RequestError, match="tokens of request 'a' must be a whole number, got 1"):
        router.on_tokens({"a": 1.5})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("settings", "workers", "message"),
    [
        ("fit", [CAPACITY], "settings must be of type RoutingPolicySettings, got 'fit'"),
        (RoutingPolicySettings(), [4, 4], "a worker's capacity must be of type Capacity, got 4"),
        (RoutingPolicySettings(), 4, "workers must be a sequence of Capacity, got 4"),
        (RoutingPolicySettings(), [Capacity(slots=2.5)], "slots must be a whole number, got 2.5"),  # type: ignore[arg-type]
    ],
)
def test_router_refuses_bad_settings_or_capacities_by_name(
    settings: Any, workers: Any, message: str
) -> None:
    with pytest.raises(RouterError) as error:
        RequestRouter(settings, workers)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "bad_settings",
    [
        {"name": "bestest"},
        {"horizon": -1},
        {"gamma": 0.0},
        {"subset": 0},
        {"subset": 17},
        {"points": 1},
        {"window": 0},
        {"wait_bonus": -1.0},
        {"wait_bonus": float("inf")},
        {"alpha": float("nan")},
        {"beta": -1.0},
        {"front_ends": 0},
        {"front_end": 1},
        {"candidates": 0},
        {"greedy_slots": -1},
        {"slack": -0.1},
        {"prompt_weight": -1.0},
        {"prefill_wait": -1.0},
        {"seed": -1},
        {"window": 1.5},
    ],
)
def test_router_refuses_bad_settings(bad_settings: dict[str, object]) -> None:
    with pytest.raises(PolicyError):
        RequestRouter(replace(RoutingPolicySettings(), **bad_settings), [Capacity()])  # type: ignore[arg-type]


def test_router_requires_a_worker() -> None:
    with pytest.raises(PolicyError, match="expected 1 to 65536"):
        RequestRouter(RoutingPolicySettings(), [])


def half_told_step() -> RequestRouter:
    """Four requests run on two full workers, a fifth waits; two have told of a step, and one of
    these has ended."""
    router = RequestRouter(RoutingPolicySettings(name="fit"), [Capacity(slots=2)] * 2)
    for name in range(5):
        router.on_arrival(request(name, 10))
    router.on_tokens(dict.fromkeys(range(4), 1))
    assert router.on_tokens({0: 1, 1: 1}, [0]) == Decision(due=True)
    return router


def assigned_ids(decision: Decision) -> list[object]:
    assert not decision.due
    return [assignment.request for assignment in decision.assignments]


def test_router_decides_when_all_have_told_of_a_step() -> None:
    router = half_told_step()
    assert router.on_tokens({2: 1}).due
    assert assigned_ids(router.on_tokens({3: 1})) == [4]


def test_router_decides_when_the_rest_of_a_step_leaves() -> None:
    router = half_told_step()
    router.on_abort(2)
    assert assigned_ids(router.on_finish(3)) == [4]


def test_router_decides_at_second_token_of_a_step() -> None:
    router = half_told_step()
    assert assigned_ids(router.on_tokens({1: 1})) == [4]
    # Those that are stuck are not waited for in the next step either.
    router.on_arrival(request(5, 10))
    assert assigned_ids(router.on_tokens({1: 1, 4: 1}, [1])) == [5]


def test_router_of_workers_without_a_barrier_waits_for_nobody() -> None:
    settings = RoutingPolicySettings(name="fit", lockstep=False)
    router = RequestRouter(settings, [Capacity(slots=2)] * 2)
    for name in range(5):
        router.on_arrival(request(name, 10))
    router.on_tokens(dict.fromkeys(range(4), 1))
    assert assigned_ids(router.on_tokens({0: 1}, [0])) == [4]


def test_router_takes_event_for_one_step_whatever_its_order() -> None:
    router = RequestRouter(RoutingPolicySettings(name="fit"), [Capacity(slots=2)] * 2)
    for name in range(5):
        router.on_arrival(request(name, 10))
    router.on_tokens(dict.fromkeys(range(4), 1))
    router.on_tokens({0: 1, 1: 1, 2: 1})
    # The one that was late comes first.
    assert assigned_ids(router.on_tokens({3: 1, 0: 1, 1: 1, 2: 1}, [0])) == [4]


def test_router_takes_end_after_its_last_token_for_the_same_step() -> None:
    router = RequestRouter(RoutingPolicySettings(name="fit"), [Capacity(slots=2)] * 2)
    for name in range(5):
        router.on_arrival(request(name, 10))
    router.on_tokens(dict.fromkeys(range(4), 1))
    assert assigned_ids(router.on_finish(0)) == [4]


@pytest.mark.parametrize("name", ["jsq", "vllm", "dynamo"])
def test_router_that_queues_at_workers_never_waits(name: str) -> None:
    router = RequestRouter(RoutingPolicySettings(name=name), [Capacity(slots=1)] * 2)
    for number in range(2):
        router.on_arrival(request(number, 10))
    router.on_tokens({0: 1, 1: 1})
    router.on_tokens({0: 1})
    assert assigned_ids(router.on_arrival(request(2, 10))) == [2]


def test_router_decides_at_once_when_told_to() -> None:
    router = half_told_step()
    assert assigned_ids(router.decide()) == [4]


def test_router_binds_arrival_within_step_where_slots_are_free() -> None:
    router = RequestRouter(RoutingPolicySettings(name="fit"), [Capacity(slots=9)] * 2)
    for name in range(2):
        router.on_arrival(request(name, 10))
    router.on_tokens({0: 1, 1: 1})
    router.on_tokens({0: 1})
    assert assigned_ids(router.on_arrival(request(2, 10))) == [2]


def test_router_waits_for_no_first_token_after_one_took_several_steps() -> None:
    router = RequestRouter(RoutingPolicySettings(name="fit"), [Capacity(slots=2)] * 2)
    for name in range(3):
        router.on_arrival(request(name, 10))
    for _ in range(3):
        router.on_tokens({0: 1, 1: 1})
    router.on_tokens({0: 1, 1: 1, 2: 1})
    router.on_arrival(request(3, 900))
    router.on_arrival(request(4, 10))
    assert assigned_ids(router.on_tokens({0: 1, 1: 1, 2: 1}, [0])) == [4]


@pytest.mark.parametrize("lockstep", [True, False])
def test_fit_lets_prompts_wait_for_each_other_only_at_a_barrier(lockstep: bool) -> None:
    settings = RoutingPolicySettings(name="fit", lockstep=lockstep, prompt_weight=200.0)
    router = RequestRouter(settings, [Capacity(slots=2)] * 2)
    for name in "abc":
        router.on_arrival(Request(id=name, size=10))
    router.on_tokens(dict.fromkeys("abc", 1))
    decision = router.on_arrival(Request(id="d", size=4000))
    assert [one.request for one in decision.assignments] == ([] if lockstep else ["d"])
