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
from equipoise.balancer.requests.policy import WorkerReport, WorkerState
from equipoise.balancer.requests.policy_messages import Message, SharedPolicyLost
from equipoise.balancer.requests.policy_server import FrontEndSession, PolicyServer, Stage
from equipoise.balancer.requests.remote_policy import ALIVE_SECONDS, RemotePolicy
from equipoise.balancer.requests.request_router import RequestRouter

WORKERS, SLOTS, FRONT_ENDS, QUEUE_TIMEOUT = 3, 2, 3, 30.0
SERVING, DRAINING, LOST = WorkerState
INDEX = st.integers(0, 99)
NAMES = st.integers(0, 3)
"""Few, so that ids are used again while what belongs to the one before is on its way."""
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
    """A dispatcher, its policy and its two links."""

    def __init__(self, machine: "SharedPolicyMachine") -> None:
        self.machine = machine
        self.failures: list[Exception] = []
        self.requests: list[TrackedRequest] = []
        self.policy = RemotePolicy(WORKERS, machine.clock)
        self.dispatcher = RequestDispatcher(
            self.policy, WORKERS, machine.clock, self.failed, queue_timeout=QUEUE_TIMEOUT
        )
        self.to_front_end = SlowLink(self.policy.receive, lambda: self.policy.lose("broken"))
        self.session: FrontEndSession = machine.server.connect(self.to_front_end)
        self.to_server = SlowLink(self.session.receive, self.session.disconnect)
        self.policy.connect(self.to_server, self.dispatcher)
        self.is_cut = False

    def failed(self, error: Exception) -> FailureAction:
        self.failures.append(error)
        return FailureAction.STOP_POLICY

    def cut(self) -> None:
        """The front end is gone, and either end hears of it in its time."""
        self.is_cut = True
        self.to_server.cut()
        self.to_front_end.cut()

    def open_requests(self) -> list[TrackedRequest]:
        return [one for one in self.requests if not isinstance(one.status, New | RequestClosed)]


class SharedPolicyMachine(RuleBasedStateMachine):
    """Any order of events of front ends, and of deliveries."""

    factory: Factory = LateBinding

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.policy = type(self).factory([SLOTS] * WORKERS, [None] * WORKERS)
        self.errors: list[Exception] = []
        self.server = PolicyServer(self.policy, WORKERS, self.clock, self.errors.append)
        self.front_ends = [FrontEnd(self) for _ in range(FRONT_ENDS)]

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

    @rule(at=INDEX, worker=st.integers(0, WORKERS - 1), state=st.sampled_from(WorkerState))
    def set_health(self, at: int, worker: int, state: WorkerState) -> None:
        self.front_end(at).dispatcher.set_health(worker, state)

    @rule(at=INDEX, worker=st.integers(0, WORKERS - 1))
    def report_worker(self, at: int, worker: int) -> None:
        self.front_end(at).dispatcher.report_worker(worker, REPORT)

    @rule(worker=st.integers(0, WORKERS - 1), state=st.sampled_from(WorkerState))
    def every_front_end_sees(self, worker: int, state: WorkerState) -> None:
        for front_end in self.front_ends:
            front_end.dispatcher.set_health(worker, state)

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
            assert kinds <= ({SharedPolicyLost} if front_end.is_cut else set()), front_end.failures
            assert all(len(one.reasons) <= 1 for one in front_end.requests)

    @invariant()
    def workers_have_no_more_than_slots(self) -> None:
        for worker in range(WORKERS):
            there = [
                one
                for front_end in self.front_ends
                if not front_end.is_cut
                for one in front_end.dispatcher.workers[worker].requests
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
            session, policy = front_end.session, front_end.policy
            if front_end.is_cut:
                assert front_end.open_requests() == []
                assert session not in self.server.sessions
                continue
            here = {policy._serials[one.request_id]: one for one in front_end.open_requests()}
            there = {one.arrival.id[1]: one for one in session.requests}  # type: ignore[index]
            assert here.keys() == there.keys() == set(policy._ids)
            for serial, request in here.items():
                shared = there[serial]
                assert isinstance(request.status, expected[shared.stage])
                assert shared.worker == (-1 if request.worker is None else request.worker)
                if shared.stage is Stage.PARKED:
                    assert self.server.states[shared.arrival.worker or 0] is not SERVING
                stages[shared.stage] += 1
        self.policy_knows(stages)
        for worker, state in enumerate(self.server.states):
            reported = {
                one.dispatcher.workers[worker].state for one in self.front_ends if not one.is_cut
            }
            assert (state is SERVING) == (reported == {SERVING})
            assert reported != {LOST} or state is LOST

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
        for front_end in self.front_ends:
            for request in front_end.open_requests():
                if not isinstance(request.status, Queued) or front_end.is_cut:
                    continue
                pin = request.pinned_worker
                for worker in range(WORKERS) if pin is None else [pin]:
                    assert load[worker] >= SLOTS or self.server.states[worker] is not SERVING

    def teardown(self) -> None:
        self.settle()
        for front_end in self.front_ends:
            for request in front_end.open_requests():
                front_end.dispatcher.abort(request)
        self.settle()
        self.policy_knows(Counter())
        self.nothing_fails()


def machine(factory: Factory) -> type[SharedPolicyMachine]:
    """A machine over this policy."""

    class Machine(SharedPolicyMachine):
        pass

    Machine.factory = staticmethod(factory)
    return Machine
