"""The server's end of a policy that front ends share.

The front ends are processes, or dispatchers of one process. `PolicyServer` has the policy. Each
front end has a `RemotePolicy`, which its `RequestDispatcher` calls as any policy: it sends each
event to the server and decides nothing; what the server decides comes later, by `apply_decision`.
docs/design/request-balance.md says what can cross on the way, and what then holds.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, unique

from equipoise.balancer.requests.dispatcher import Clock, InvalidAssignment, PolicyEvent, Timer
from equipoise.balancer.requests.policy import (
    STEP_TIMEOUT_SECONDS,
    Capacity,
    Decision,
    Request,
    RequestId,
    RoutingPolicy,
    WorkerChange,
    WorkerReport,
    WorkerState,
)
from equipoise.balancer.requests.policy_messages import (
    VERSION,
    Link,
    MalformedMessage,
    Message,
    check_message,
)
from equipoise.hal.errors import PolicyError, RequestError, WorkerError

LOG = logging.getLogger(__name__)
SILENT_SECONDS = 30.0
"""How long the server hears nothing from a front end that has requests, or has not said `hello`,
before it drops it."""


@unique
class Stage(Enum):
    """How far a request is, as the server knows it."""

    PARKED = "parked"
    """The policy does not know it: the only worker that may serve it does not serve now."""
    POOLED = "pooled"
    BOUND = "bound"
    RUNNING = "running"


@dataclass(eq=False)
class SharedRequest:
    """A request of one front end, at the server.

    Attributes:
        arrival: as the policy is told of it; its id is (front end, serial).
        stage: how far it is.
        worker: that has it; -1: none.
        message: number of the message that binds it, of those to its front end.
    """

    arrival: Request
    stage: Stage = Stage.PARKED
    worker: int = -1
    message: int = 0


class PolicyServer:
    """Has the policy of several front ends, and tells each what concerns its requests.

    A front end that leaves has its requests aborted. A policy that fails is called no more, and
    every front end is told so.

    A worker serves while every front end says so. It is lost once every front end says so, and
    until every one says that it serves; in between it drains: no front end's word costs another one
    its requests.

    Args:
        policy: not called by anything else from now on.
        workers: number of workers that it has; all serve. None can be added.
        clock: time and timers.
        on_failure: called once, with what the policy raised.
        observe: called with the number of front ends, when it has changed.

    Attributes:
        policy: for inspection; None once it is called no more.
        states: of the workers, as the policy knows them.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        workers: int,
        clock: Clock,
        on_failure: Callable[[Exception], object],
        observe: Callable[[int], object] = lambda front_ends: None,
    ) -> None:
        self.policy: RoutingPolicy | None = policy
        self.states = [WorkerState.SERVING] * workers
        self._clock, self._on_failure, self._observe = clock, on_failure, observe
        self._sessions: dict[int, FrontEndSession] = {}
        self._connected = 0
        self._step_timer: Timer | None = None

    @property
    def sessions(self) -> "tuple[FrontEndSession, ...]":
        """Front ends that have said `hello`, the one that did first ahead."""
        return tuple(self._sessions.values())

    def connect(self, link: Link) -> "FrontEndSession":
        """Somebody has connected, and counts as a front end once it says `hello`; `link` leads
        to it."""
        number = self._connected
        self._connected += 1
        return FrontEndSession(self, number, link, self._clock)

    def close(self) -> None:
        """Let the policy go, and tell the front ends so."""
        self._drop_policy("the process that has the policy ends")

    # What sessions ask for.

    def join(self, session: "FrontEndSession") -> None:
        """A front end has said `hello`."""
        if self.policy is None:
            session.refuse("the policy has failed")
        else:
            self._sessions[session.number] = session
            self._observe(len(self._sessions))

    def arrive(self, request: SharedRequest) -> None:
        """Tell the policy of a request, unless it has to wait for its worker to serve.

        Raises `MalformedMessage` where the policy refuses it.
        """
        pin = request.arrival.worker
        if pin is not None and self.states[pin] is not WorkerState.SERVING:
            return
        request.stage = Stage.POOLED
        try:
            self.tell_refusable(lambda policy: policy.on_arrival(request.arrival))
        except MalformedMessage:
            request.stage = Stage.PARKED  # the policy does not know it, as before
            raise

    def abort(self, request: SharedRequest) -> None:
        """Take a request from the policy."""
        in_policy = request.stage is not Stage.PARKED
        request.stage, request.worker = Stage.PARKED, -1
        if in_policy:
            self.tell(lambda policy: policy.on_abort(request.arrival.id))

    def update_worker(self, worker: int) -> None:
        """Tell the policy the state of a worker, if another one follows from what is said of it."""
        state = self._combined_state(worker)
        if state is self.states[worker]:
            return
        self.states[worker] = state
        change = WorkerChange(worker=worker, state=state)
        self.tell(lambda policy: policy.on_worker_change(change), worker)
        if state is WorkerState.SERVING:
            for session in self.sessions:
                for request in session.with_stage(Stage.PARKED):
                    if request.arrival.worker == worker:
                        session.tell_parked(request)

    def tell(self, event: PolicyEvent, changed_worker: int | None = None) -> None:
        """Call the policy with an event that it cannot refuse: an abort, or the state of a worker.

        A policy that refuses it has other requests or workers than it was told, and has failed.

        Args:
            event: the call.
            changed_worker: whose state it is told, if any.
        """
        try:
            self._call(event, changed_worker)
        except (RequestError, WorkerError) as error:
            self._fail(error)

    def tell_refusable(self, event: PolicyEvent) -> None:
        """Call the policy with an event that a front end has put values into.

        Raises `MalformedMessage` where the policy refuses them: nothing has changed then, and the
        other front ends go on.
        """
        try:
            self._call(event)
        except (RequestError, WorkerError) as error:
            raise MalformedMessage(f"the policy refuses it: {error}") from error

    def flush(self) -> None:
        """Send the front ends what was decided; after each event, so that what they have heard of
        can be told from the numbers of messages."""
        for session in self.sessions:
            session.flush()

    def leave(self, session: "FrontEndSession") -> None:
        """A front end is gone: its requests are aborted, and its word of workers is forgotten."""
        # It stays connected until then: aborting one of its requests may bind another.
        for request in session.requests:
            self.abort(request)
        if self._sessions.pop(session.number, None) is not None:
            self._observe(len(self._sessions))
        for worker in range(len(self.states)):
            self.update_worker(worker)
        self.flush()

    # The policy.

    def _call(self, event: PolicyEvent, changed_worker: int | None = None) -> None:
        """Call the policy, and keep in mind for the front ends what it decides.

        Raises what it refuses the event with; any other error is a failure of the policy.
        """
        if self.policy is None:
            return
        try:
            decision = event(self.policy)
            if not isinstance(decision, Decision):
                raise PolicyError(f"a policy must return a Decision, got {decision!r}")
            self._take(decision, changed_worker)
        except (RequestError, WorkerError):
            raise
        except Exception as error:
            self._fail(error)
            return
        self._wait_for_rest(decision.due)

    def _fail(self, error: Exception) -> None:
        self._drop_policy(f"{type(error).__name__}: {error}")
        self._on_failure(error)

    def _take(self, decision: Decision, changed_worker: int | None) -> None:
        for name in decision.lost:
            match self._find(name):
                case (session, request):
                    session.lose(request)
        if changed_worker is not None and self.states[changed_worker] is WorkerState.LOST:
            # What the worker had not begun is in the pool again, and may be bound in this decision.
            for session in self.sessions:
                for request in session.with_stage(Stage.BOUND):
                    if request.worker == changed_worker:
                        request.stage, request.worker = Stage.POOLED, -1
        for assignment in decision.assignments:
            match self._find(assignment.request):
                case (session, request) if self._can_bind(request, assignment.worker):
                    session.bind(request, assignment.worker)
                case _:
                    raise InvalidAssignment(f"the policy cannot bind so: {assignment}")

    def _can_bind(self, request: SharedRequest, worker: int) -> bool:
        return (
            request.stage is Stage.POOLED
            and 0 <= worker < len(self.states)
            and self.states[worker] is WorkerState.SERVING
            and request.arrival.worker in (None, worker)
        )

    def _find(self, name: RequestId) -> "tuple[FrontEndSession, SharedRequest] | None":
        """A request by the policy's name of it; None: there is none, or it has ended."""
        match name:
            case (int() as number, int() as serial) if number in self._sessions:
                session = self._sessions[number]
                request = session.find(serial)
                return None if request is None else (session, request)
        return None

    def _combined_state(self, worker: int) -> WorkerState:
        reported = {session.reported_state(worker) for session in self.sessions}
        if reported <= {WorkerState.SERVING}:
            return WorkerState.SERVING
        # A lost worker has nothing to drain: it stays lost until it serves.
        lost = reported == {WorkerState.LOST} or self.states[worker] is WorkerState.LOST
        return WorkerState.LOST if lost else WorkerState.DRAINING

    def _wait_for_rest(self, due: bool) -> None:
        """Have the policy decide without the rest of a step: only here all events are known."""
        if due and self._step_timer is None and hasattr(self.policy, "decide"):
            self._step_timer = self._clock.call_later(STEP_TIMEOUT_SECONDS, self._decide)
        elif not due:
            self._stop_timer()

    def _stop_timer(self) -> None:
        if self._step_timer is not None:
            self._step_timer.cancel()
            self._step_timer = None

    def _decide(self) -> None:
        self._step_timer = None
        self.tell(lambda policy: policy.decide())
        self.flush()

    def _drop_policy(self, why: str) -> None:
        self.policy = None
        self._stop_timer()
        for session in self.sessions:
            session.refuse(why)
        self._sessions.clear()
        self._observe(0)


class FrontEndSession:
    """What the server knows of one front end.

    Attributes:
        number: of the connection; none is used twice.
        unknown: tokens and ends of requests that the policy had lost before it heard of them.
    """

    def __init__(self, server: PolicyServer, number: int, link: Link, clock: Clock) -> None:
        self.number, self.unknown = number, 0
        self._server, self._link, self._clock = server, link, clock
        self._requests: dict[int, SharedRequest] = {}
        self._reported_states: dict[int, WorkerState] = {}
        self._received = self._sent = self._answered = 0
        self._bound: list[tuple[int, int]] = []
        self._lost: list[int] = []
        self._answer_timer: Timer | None = None
        self._open, self._joined = True, False
        self._look_later(missed=0)

    @property
    def requests(self) -> tuple[SharedRequest, ...]:
        """Its requests that have not ended."""
        return tuple(self._requests.values())

    def find(self, serial: int) -> SharedRequest | None:
        """A request that has not ended."""
        return self._requests.get(serial)

    def with_stage(self, stage: Stage) -> list[SharedRequest]:
        """Its requests that are so far."""
        return [request for request in self._requests.values() if request.stage is stage]

    def reported_state(self, worker: int) -> WorkerState:
        """The state that it says a worker has."""
        return self._reported_states.get(worker, WorkerState.SERVING)

    def receive(self, message: Message) -> None:
        """Handle a message; one that is malformed, or that the policy refuses, ends this front
        end's part, and nobody else's."""
        if not self._open:
            return
        self._received += 1
        try:
            self._handle(message)
        except MalformedMessage as error:
            self.drop(str(error))
        self._server.flush()
        self._acknowledge()

    def tell_parked(self, request: SharedRequest) -> None:
        """The worker of a request serves again."""
        if self._open:  # else dropped for one before it
            try:
                self._server.arrive(request)
            except MalformedMessage as error:
                self.drop(str(error))

    def drop(self, why: str) -> None:
        """Refuse it, and abort its requests."""
        LOG.warning("equipoise: a front end of a shared policy is dropped: %s", why)
        self.refuse(why)
        self._server.leave(self)

    def disconnect(self) -> None:
        """Its link has broken."""
        if self._open:
            self._close()
            self._server.leave(self)

    def refuse(self, why: str) -> None:
        """Tell the front end that it gets no decisions any more, and close the link."""
        if self._open:
            self._link.send(["failed", why])
            self._close()

    def flush(self) -> None:
        """Send what was decided of its requests."""
        if self._bound or self._lost:
            self._answer()

    def bind(self, request: SharedRequest, worker: int) -> None:
        """The policy has bound a request."""
        request.stage, request.worker = Stage.BOUND, worker
        request.message = self._sent + 1  # the next one
        self._bound.append((_serial(request), worker))

    def lose(self, request: SharedRequest) -> None:
        """The policy does not know a request any more, which its front end has not ended."""
        del self._requests[_serial(request)]
        self._lost.append(_serial(request))

    def _answer(self) -> None:
        bound, self._bound = self._bound, []
        lost, self._lost = self._lost, []
        self._sent += 1
        self._answered = self._received
        if self._open:
            self._link.send(["decision", self._received, bound, lost])

    def _acknowledge(self) -> None:
        """Say that the server is there, once a turn, where there is nothing else to say."""
        if self._answer_timer is None and self._open:
            self._answer_timer = self._clock.call_soon(self._answer_rest)

    def _answer_rest(self) -> None:
        self._answer_timer = None
        if self._answered < self._received:
            self._answer()

    def _look_later(self, missed: int) -> None:
        """Drop a front end that is stopped: it would keep its slots for ever.

        Two looks must miss it: where this process was stopped, its timers may run before it reads
        what has come meanwhile.

        Args:
            missed: looks in a row before this one that found nothing new.
        """
        heard = self._received

        def look() -> None:
            if self._received > heard or (self._joined and not self._requests):
                self._look_later(missed=0)
            elif missed == 0:
                self._look_later(missed=1)
            else:
                self.drop(f"nothing came from it for {SILENT_SECONDS:g} seconds")

        self._look_timer = self._clock.call_later(SILENT_SECONDS / 2, look)

    def _close(self) -> None:
        self._open = False
        self._link.close()
        self._look_timer.cancel()
        if self._answer_timer is not None:
            self._answer_timer.cancel()

    def _handle(self, message: Message) -> None:
        server = self._server
        check_message(message, len(server.states))
        if self._joined is (message[0] == "hello"):
            raise MalformedMessage("`hello` comes first, and once")
        match message:
            case ["hello", version, workers]:
                if (version, workers) != (VERSION, len(server.states)):
                    raise MalformedMessage(
                        f"version {version} with {workers} workers: the policy has version "
                        f"{VERSION} and {len(server.states)}: restart all front ends"
                    )
                self._joined = True
                server.join(self)
            case ["alive"]:
                pass
            case ["arrive", serial, size, worker, hits, expected]:
                if serial in self._requests:
                    raise MalformedMessage(f"request {serial} has arrived already")
                name = (self.number, serial)
                arrival = Request(id=name, size=size, worker=worker, hits=hits, expected=expected)
                self._requests[serial] = SharedRequest(arrival)
                server.arrive(self._requests[serial])
            case ["tokens", serials, counts, ended]:
                if len(serials) != len(counts):
                    raise MalformedMessage(f"{len(counts)} counts of {len(serials)} requests")
                self._on_tokens(dict(zip(serials, counts, strict=True)), ended)
            case ["abort", serial]:
                request = self._requests.pop(serial, None)
                if request is not None:  # else the policy has lost it meanwhile
                    server.abort(request)
            case ["state", worker, state, acknowledged]:
                self._on_state(worker, WorkerState(state), acknowledged)
            case ["capacity", worker, slots, kv_tokens]:
                capacity = Capacity(slots=slots, kv_tokens=kv_tokens)
                change = WorkerChange(worker=worker, capacity=capacity)
                server.tell_refusable(lambda policy: policy.on_worker_change(change))
            case ["report", worker, waiting, running, tokens, kv_usage]:
                self._on_report(
                    worker,
                    WorkerReport(
                        waiting=waiting, running=running, tokens=tokens, kv_usage=kv_usage
                    ),
                )

    def _on_tokens(self, counts: Mapping[int, int], ended: Iterable[int]) -> None:
        tokens: dict[RequestId, int] = {}
        for serial, count in counts.items():
            request = self._begun(serial)
            if request is not None:
                request.stage = Stage.RUNNING
                tokens[request.arrival.id] = count
        finished: dict[int, RequestId] = {}
        for serial in ended:
            request = self._begun(serial)
            if request is not None:
                finished[serial] = request.arrival.id
        if tokens or finished:
            ends = list(finished.values())
            self._server.tell_refusable(lambda policy: policy.on_tokens(tokens, ends))
        # Not before: of an event that is refused the policy still has all requests.
        for serial in finished:
            self._requests.pop(serial, None)

    def _begun(self, serial: int) -> SharedRequest | None:
        request = self._requests.get(serial)
        if request is None:
            self.unknown += 1
        elif request.worker < 0:
            raise MalformedMessage(f"request {serial} makes tokens, and is on no worker")
        return request

    def _on_state(self, worker: int, state: WorkerState, acknowledged: int) -> None:
        """Take its word of a worker, and with it what of its own requests that worker had.

        Assignments to the worker that were on their way (in messages after the `acknowledged` one)
        are ignored by the front end. So they are over here, too.
        """
        server = self._server
        self._reported_states[worker] = state
        server.update_worker(worker)
        if state is WorkerState.SERVING:
            return
        is_lost = state is WorkerState.LOST
        again: list[SharedRequest] = []
        for request in self.requests:
            pinned = is_lost and request.arrival.worker == worker
            begun = is_lost and request.worker == worker and request.stage is Stage.RUNNING
            if pinned or begun:
                self.lose(request)
                server.abort(request)
            elif (
                request.worker == worker
                and request.stage is Stage.BOUND
                and (is_lost or request.message > acknowledged)
            ):
                again.append(request)
        # Of a policy's view they end and arrive: it has no other word for it, as long as the worker
        # serves others.
        for request in again:
            server.abort(request)
        for request in again:
            server.arrive(request)

    def _on_report(self, worker: int, report: WorkerReport) -> None:
        """Pass on a report of the front end that has been there longest: an older one of another
        must not replace a newer one."""
        first = self._server.sessions[0] is self
        if first and self._server.states[worker] is not WorkerState.LOST:
            change = WorkerChange(worker=worker, report=report)
            self._server.tell_refusable(lambda policy: policy.on_worker_change(change))


def _serial(request: SharedRequest) -> int:
    assert isinstance(request.arrival.id, tuple)
    return int(request.arrival.id[1])
