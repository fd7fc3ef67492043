"""Several dispatchers that share a policy over links on which messages take any time, and break."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from helpers.fakes.late_binding_policy import LateBinding
from helpers.fakes.manual_clock import ManualClock
from helpers.harnesses.dispatcher_machine import Factory
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from equipoise.balancer.requests.dispatcher import (
    Aborting,
    BoundToWorker,
    CloseReason,
    DispatchedRequest,
    FailureAction,
    New,
    Queued,
    RequestClosed,
    RequestDispatcher,
    Running,
)
from equipoise.balancer.requests.policy import (
    Capacity,
    RoutingPolicy,
    WorkerReport,
    WorkerState,
)
from equipoise.balancer.requests.policy_messages import Message, SharedPolicyLost
from equipoise.balancer.requests.policy_server import FrontEndSession, PolicyServer, Stage
from equipoise.balancer.requests.remote_policy import ALIVE_SECONDS, RemotePolicy
from equipoise.balancer.requests.request_router import RequestRouter

WORKERS, SLOTS, FRONT_ENDS, QUEUE_TIMEOUT = ("a", "b", "c", "d", "e"), 2, 3, 30.0
AT_FIRST = WORKERS[:3]
"""Workers that a front end begins with; others come."""
SERVING, DRAINING, LOST = WorkerState
INDEX = st.integers(0, 99)
NAMES = st.integers(0, 3)
"""Few, so that ids are used again while what belongs to the one before is on its way."""
WORKER = st.sampled_from(WORKERS)
REPORT = WorkerReport(waiting=0, running=1, tokens=9, kv_usage=0.1)


@dataclass
class SlowLink:
    """Keeps messages until they are delivered one by one."""

    receive: Callable[[Message], object]
    closed: Callable[[], object]
    messages: deque[Message | None] = field(default_factory=deque)
    """None: the end."""
    open: bool = True

    def send(self, message: Message) -> None:
        if self.open:
            self.messages.append(message)

    def close(self) -> None:
        if self.open:
            self.open = False
            self.messages.append(None)

    def deliver(self) -> None:
        """Deliver the next message, if there is one."""
        if self.messages:
            message = self.messages.popleft()
            if message is None:
                self.closed()
            else:
                self.receive(message)

    def cut(self) -> None:
        """Lose what is on its way."""
        self.messages.clear()
        self.open = True
        self.close()


class TrackedRequest(DispatchedRequest):
    """Counts its ends."""

    def __init__(self, name: int, size: int, required: int | None) -> None:
        super().__init__(name, size, required)
        self.reasons: list[CloseReason] = []

    def on_closed(self, reason: CloseReason) -> None:
        self.reasons.append(reason)


class FrontEnd:
    """A dispatcher, its policy and its two links.

    Attributes:
        is_joined: whether the shared policy decides for it; else none does, or one of its own.
        is_cut: whether its links are cut, or it is stopped.
    """

    def __init__(self, machine: "SharedPolicyMachine") -> None:
        self.machine = machine
        self.failures: list[Exception] = []
        self.requests: list[TrackedRequest] = []
        self.is_cut = self.is_joined = False
        self.connect()
        self.dispatcher = RequestDispatcher(
            self.policy, 0, machine.clock, self.failed, queue_timeout=QUEUE_TIMEOUT
        )
        self.policy.connect(self.to_server, self.dispatcher)
        self.is_joined = True
        # By another order at each, so that they have other numbers.
        first = len(machine.front_ends) % len(AT_FIRST)
        self.numbers: dict[str, int] = {}
        for name in AT_FIRST[first:] + AT_FIRST[:first]:
            self.add_worker(name)

    def connect(self) -> None:
        """Create the links, and a policy that is not connected yet."""
        self.policy = RemotePolicy(self.machine.clock, self.lost, self.joined)
        self.to_front_end = SlowLink(self.policy.receive, lambda: self.policy.lose("broken"))
        self.session: FrontEndSession = self.machine.server.connect(self.to_front_end)
        self.to_server = SlowLink(self.session.receive, self.session.disconnect)

    def joined(self) -> None:
        """The server has answered."""
        if not self.is_joined:
            self.is_joined = True
            self.dispatcher.replace_policy(self.policy)

    def lost(self, error: SharedPolicyLost) -> None:
        """The server is gone."""
        self.is_joined = False
        if self.machine.falls_back:
            self.failures.append(error)
            self.dispatcher.replace_policy(self.machine.own_policy())
        else:
            self.dispatcher.fail_policy(error)

    def add_worker(self, name: str) -> None:
        capacity = Capacity(slots=SLOTS)
        self.numbers[name] = self.dispatcher.add_worker(capacity, name=name)

    def failed(self, error: Exception) -> FailureAction:
        self.failures.append(error)
        return FailureAction.STOP_POLICY

    def cut(self) -> None:
        """The front end is gone, and either end hears of it in its time."""
        self.is_cut = True
        self.to_server.cut()
        self.to_front_end.cut()

    def rejoin(self) -> None:
        """Connect again; the policy of its own decides until the server has answered."""
        self.is_cut = False
        while self.to_server.messages:
            self.to_server.deliver()  # the server has heard of the end before
        self.connect()
        self.policy.connect(self.to_server, self.dispatcher)

    def state(self, name: str) -> WorkerState | None:
        """What it says of a worker; None: it has none of this name."""
        number = self.numbers.get(name)
        return None if number is None else self.dispatcher.workers[number].state

    def open_requests(self) -> list[TrackedRequest]:
        return [one for one in self.requests if not isinstance(one.status, New | RequestClosed)]


class SharedPolicyMachine(RuleBasedStateMachine):
    """Any order of events of front ends, and of deliveries."""

    factory: Factory = LateBinding
    falls_back = False
    """Whether front ends have a policy of their own where the shared one is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.policy = self.own_policy()
        self.errors: list[Exception] = []
        self.server = PolicyServer(self.policy, [None], self.clock, self.errors.append)
        self.front_ends: list[FrontEnd] = []
        for _ in range(FRONT_ENDS):
            self.front_ends.append(FrontEnd(self))

    def own_policy(self) -> RoutingPolicy:
        """A policy has one worker at least."""
        return type(self).factory([1], [None])

    @property
    def joined(self) -> list[FrontEnd]:
        """Front ends for which the shared policy decides, as both ends have it."""
        return [one for one in self.front_ends if one.is_joined and not one.is_cut]

    def front_end(self, index: int) -> FrontEnd:
        return self.front_ends[index % len(self.front_ends)]

    def pick(self, at: int, index: int) -> tuple[FrontEnd, TrackedRequest] | None:
        front_end = self.front_end(at)
        requests = front_end.open_requests()
        return (front_end, requests[index % len(requests)]) if requests else None

    @rule(at=INDEX, name=NAMES, size=st.integers(1, 9), required=st.none() | st.integers(0, 2))
    def submit(self, at: int, name: int, size: int, required: int | None) -> None:
        front_end = self.front_end(at)
        if any(one.request_id == name for one in front_end.open_requests()):
            return
        if required is not None:
            required = front_end.numbers.get(WORKERS[required])
        request = TrackedRequest(name, size, required)
        front_end.requests.append(request)
        front_end.dispatcher.submit(request)

    @rule(at=INDEX, index=INDEX, how=st.sampled_from(["start", "tokens", "finish", "retry"]))
    def serve(self, at: int, index: int, how: str) -> None:
        if (picked := self.pick(at, index)) is None:
            return
        front_end, request = picked
        dispatcher, status = front_end.dispatcher, request.status
        match how, status:
            case "start", BoundToWorker():
                assert dispatcher.start(request, status)
            case "tokens", _:
                dispatcher.report_tokens(request, request.tokens + 2)
            case "retry", BoundToWorker():
                dispatcher.retry(request, status)
            case "finish", BoundToWorker() | Running() | Aborting():
                dispatcher.finish(request)

    @rule(at=INDEX, index=INDEX, how=st.sampled_from(["abort", "begin_abort"]))
    def abort(self, at: int, index: int, how: str) -> None:
        if (picked := self.pick(at, index)) is not None:
            getattr(picked[0].dispatcher, how)(picked[1])

    @rule(at=INDEX, worker=WORKER, state=st.sampled_from(WorkerState))
    def set_health(self, at: int, worker: str, state: WorkerState) -> None:
        front_end = self.front_end(at)
        if worker in front_end.numbers:
            front_end.dispatcher.set_health(front_end.numbers[worker], state)

    @rule(at=INDEX, worker=WORKER)
    def add_or_remove_worker(self, at: int, worker: str) -> None:
        front_end = self.front_end(at)
        if worker in front_end.numbers:
            front_end.dispatcher.remove_worker(front_end.numbers.pop(worker))
        elif front_end.dispatcher.policy is not None:
            front_end.add_worker(worker)

    @rule(at=INDEX, worker=WORKER)
    def report_worker(self, at: int, worker: str) -> None:
        front_end = self.front_end(at)
        if worker in front_end.numbers:
            front_end.dispatcher.report_worker(front_end.numbers[worker], REPORT)

    @rule(worker=WORKER, state=st.sampled_from(WorkerState))
    def every_front_end_sees(self, worker: str, state: WorkerState) -> None:
        for at in range(len(self.front_ends)):
            self.set_health(at, worker, state)

    @rule()
    def end_turn(self) -> None:
        self.clock.end_turn()

    @rule(seconds=st.sampled_from((1.0, 5.0)))
    def advance(self, seconds: float) -> None:
        """Less than a front end waits for an answer: messages arrive by then."""
        self.settle()
        self.clock.advance(seconds)

    @rule(at=INDEX, messages=st.integers(1, 4))
    def deliver_to_server(self, at: int, messages: int) -> None:
        for _ in range(messages):
            self.front_end(at).to_server.deliver()

    @rule(at=INDEX, messages=st.integers(1, 4))
    def deliver_to_front_end(self, at: int, messages: int) -> None:
        for _ in range(messages):
            self.front_end(at).to_front_end.deliver()

    @rule()
    def everything_arrives(self) -> None:
        self.settle()

    @precondition(lambda self: len(self.front_ends) < FRONT_ENDS + 2)
    @rule(at=INDEX)
    def cut_and_replace(self, at: int) -> None:
        """A front end is gone, and another one comes in its place."""
        front_end = self.front_end(at)
        if not front_end.is_cut:
            front_end.cut()
            self.front_ends.append(FrontEnd(self))

    @precondition(lambda self: self.falls_back)
    @rule(at=INDEX)
    def cut_or_rejoin(self, at: int) -> None:
        """A link breaks, or a front end that was alone connects again."""
        front_end = self.front_end(at)
        if front_end.is_cut and front_end.policy.is_lost:
            front_end.rejoin()
        elif front_end.is_joined:
            front_end.cut()

    @precondition(lambda self: len(self.front_ends) < FRONT_ENDS + 2)
    @rule(at=INDEX)
    def stop_and_replace(self, at: int) -> None:
        """Nothing reaches or leaves a front end for so long that both ends give it up."""
        self.settle()
        front_end = self.front_end(at)
        if front_end.is_cut or not front_end.open_requests():
            return
        front_end.is_cut = True
        for _ in range(12):
            self.clock.advance(ALIVE_SECONDS)
            self.deliver_all(without=front_end)
        assert front_end.session not in self.server.sessions
        self.front_ends.append(FrontEnd(self))
        self.settle()

    @invariant()
    def nothing_fails(self) -> None:
        assert self.errors == []
        assert not isinstance(self.policy, LateBinding) or self.policy.refused == []
        for front_end in self.front_ends:
            kinds = {type(one) for one in front_end.failures}
            may_fail = front_end.is_cut or self.falls_back
            assert kinds <= ({SharedPolicyLost} if may_fail else set()), front_end.failures
            assert all(len(one.reasons) <= 1 for one in front_end.requests)

    @invariant()
    def workers_have_no_more_than_slots(self) -> None:
        """Unless front ends were alone: each has all slots then."""
        for worker in () if self.falls_back else WORKERS:
            there = [
                one
                for front_end in self.front_ends
                if not front_end.is_cut and worker in front_end.numbers
                for one in front_end.dispatcher.workers[front_end.numbers[worker]].requests
            ]
            assert len(there) <= SLOTS

    def settle(self) -> None:
        """Deliver all that is on its way, and what follows from it."""
        self.deliver_all()
        self.both_ends_agree()

    def deliver_all(self, without: FrontEnd | None = None) -> None:
        for _ in range(200):
            self.clock.end_turn()
            links = [
                link
                for front_end in self.front_ends
                if front_end is not without
                for link in (front_end.to_server, front_end.to_front_end)
            ]
            if not (any(link.messages for link in links) or self.clock.soon):
                break
            for link in links:
                link.deliver()
        else:
            raise AssertionError("it does not come to rest")

    def both_ends_agree(self) -> None:
        """With nothing on its way, all have the same idea of each request."""
        expected: dict[Stage, tuple[type, ...]] = {
            Stage.PARKED: (Queued,),
            Stage.POOLED: (Queued,),
            Stage.BOUND: (BoundToWorker, Aborting),
            Stage.RUNNING: (Running, Aborting),
        }
        stages: Counter[Stage] = Counter()
        for front_end in self.front_ends:
            if front_end.is_cut:
                assert self.falls_back or front_end.open_requests() == []
                assert front_end.session not in self.server.sessions
        for front_end in self.joined:
            session, policy = front_end.session, front_end.policy
            here = {policy._serials[one.request_id]: one for one in front_end.open_requests()}
            there = {one.serial: one for one in session.requests}
            assert here.keys() == there.keys() == set(policy._ids)
            for serial, request in here.items():
                shared = there[serial]
                assert isinstance(request.status, expected[shared.stage])
                numbers = [-2 if one is None else one.number for one in session._workers]
                assert shared.worker == (-1 if request.worker is None else numbers[request.worker])
                if shared.stage is Stage.PARKED:
                    required = shared.required_worker
                    for number in numbers if required is None else [required]:
                        assert not session.uses(number)
                stages[shared.stage] += 1
        self.policy_knows(stages)
        self.workers_are_as_reported()
        counts: Counter[int] = Counter()
        for session in self.server.sessions:
            for one in session.requests:
                there_or_pin = one.pin if one.worker < 0 else one.worker
                if there_or_pin is not None:
                    counts[there_or_pin] += 1
        assert +self.server.counts == counts
        assert min(self.server.counts.values(), default=0) >= 0

    def workers_are_as_reported(self) -> None:
        """One serves if any front end says so, and is there while one has it."""
        states = {one.name: one.state for one in self.server.workers if one.name is not None}
        names = [one.name for one in self.server.workers if one.name is not None]
        assert len(names) == len(states)
        assert len(self.server.workers) <= len(WORKERS) + 1
        for worker in WORKERS:
            reported = {one.state(worker) for one in self.joined} - {None}
            if reported & {SERVING, DRAINING}:
                first = SERVING if SERVING in reported else DRAINING
                assert states[worker] is first
            else:
                assert states.get(worker, LOST) is LOST

    def policy_knows(self, stages: Counter[Stage]) -> None:
        """So many requests of each stage, and none of front ends that are gone."""
        placed = stages[Stage.BOUND] + stages[Stage.RUNNING]
        if isinstance(self.policy, RequestRouter):
            assert (sum(self.policy.counts), self.policy.unassigned) == (
                placed,
                stages[Stage.POOLED],
            )
        elif isinstance(self.policy, LateBinding):
            assert len(self.policy._requests) == placed + stages[Stage.POOLED]
            self.no_slot_is_left_empty(self.policy)

    def no_slot_is_left_empty(self, policy: LateBinding) -> None:
        """Nobody waits while a worker that may serve it has a free slot."""
        load = Counter(one.worker for one in policy._requests.values())
        for front_end in self.joined:
            session = front_end.session
            for shared in session.with_stage(Stage.POOLED):
                only = shared.only_worker
                numbers = list(session._numbers) if only is None else [only]
                for number in numbers:
                    assert load[number] >= SLOTS or not session.uses(number)

    def teardown(self) -> None:
        self.settle()
        for front_end in self.front_ends:
            for request in front_end.open_requests():
                front_end.dispatcher.abort(request)
        self.settle()
        self.policy_knows(Counter())
        self.nothing_fails()


def machine(factory: Factory = LateBinding, falls_back: bool = False) -> type[SharedPolicyMachine]:
    """A machine over this policy."""

    class Machine(SharedPolicyMachine):
        pass

    Machine.factory = staticmethod(factory)
    Machine.falls_back = falls_back
    return Machine
