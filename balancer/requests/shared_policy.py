"""One policy for the requests of several front ends.

The front ends are processes, or dispatchers of one process. `PolicyServer` has the policy. Each
front end has a `RemotePolicy`, which its `RequestDispatcher` calls as any policy: it sends each
event to the server and decides nothing; what the server decides comes later, by `apply_decision`.

Nothing here does I/O. A `Link` carries messages, which JSON can express, in order, and delivers
each in a turn of its own, so that neither end is called while it works.
docs/design/request-balance.md says what can cross on the way, and what then holds.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, unique
from math import inf
from typing import Any, Protocol, TypeAlias

from equipoise.balancer.requests.dispatcher import (
    Clock,
    InvalidAssignment,
    PolicyEvent,
    RequestDispatcher,
    Timer,
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
from equipoise.hal.errors import PolicyError, RequestError, WorkerError

LOG = logging.getLogger(__name__)
VERSION = 1
"""Of the messages; both ends are of one installation, unless it was changed while they ran."""
GREETING_SECONDS = 120.0
"""How long a front end waits for the server's first answer: its process may still load."""
ANSWER_SECONDS = 30.0
"""How long a front end waits for an answer later: the server acknowledges every turn."""
SILENT_SECONDS = 30.0
"""How long the server hears nothing from a front end that has requests, or has not said `hello`,
before it drops it."""
ALIVE_SECONDS = 5.0
"""A front end that has requests says so as often."""
Message: TypeAlias = list[Any]


class Link(Protocol):
    """One direction of a connection.

    Messages arrive in the order in which they were sent, each in a turn of its own, never within
    `send`. A link that breaks, or whose peer does not read, loses the rest and says so at its end.
    """

    def send(self, message: Message) -> None:
        """Send a message; does nothing on a link that is closed."""
        ...

    def close(self) -> None:
        """Close it, after what was sent."""
        ...


class SharedPolicyLost(PolicyError):
    """The process that has the shared policy does not answer, or its policy has failed."""


class MalformedMessage(Exception):
    """A front end sent what no front end of this version sends, or what the policy refuses."""


MAX_TOKENS = 2**31 - 1
"""Of a request, as `RequestRouter` has it."""
MAX_NUMBER = 2**53
"""Of anything else: exact in JSON everywhere."""
FieldCheck: TypeAlias = Callable[[Any, int], bool]
"""Whether a field can have this value, where there are so many workers."""


def _whole(least: int, most: int) -> FieldCheck:
    # `type`: to Python, `true` is a whole number.
    return lambda value, _: type(value) is int and least <= value <= most


def _whole_list(most: int) -> FieldCheck:
    """Without a call for each number: a step has all requests that run."""
    return lambda values, _: (
        type(values) is list
        and set(map(type, values)) <= {int}
        and (not values or (min(values) >= 0 and max(values) <= most))
    )


def _optional(check: FieldCheck) -> FieldCheck:
    return lambda value, workers: value is None or check(value, workers)


def _is_worker(value: Any, workers: int) -> bool:
    return type(value) is int and 0 <= value < workers


def _is_state(value: Any, _: int) -> bool:
    return type(value) is str and value in {state.value for state in WorkerState}


def _is_usage(value: Any, _: int) -> bool:
    return type(value) in (int, float) and 0 <= value < inf


def _is_hits(value: Any, workers: int) -> bool:
    return _whole_list(MAX_TOKENS)(value, workers) and len(value) == workers


_NUMBER, _TOKENS = _whole(0, MAX_NUMBER), _whole(0, MAX_TOKENS)
FIELDS: Mapping[str, tuple[FieldCheck, ...]] = {
    "hello": (_NUMBER, _NUMBER),
    "alive": (),
    "arrive": (
        _NUMBER, _whole(1, MAX_TOKENS), _optional(_is_worker), _optional(_is_hits),
        _optional(_TOKENS),
    ),
    "tokens": (_whole_list(MAX_NUMBER), _whole_list(MAX_TOKENS), _whole_list(MAX_NUMBER)),
    "abort": (_NUMBER,),
    "state": (_is_worker, _is_state, _NUMBER),
    "capacity": (_is_worker, _optional(_NUMBER), _optional(_NUMBER)),
    "report": (_is_worker, _NUMBER, _NUMBER, _NUMBER, _is_usage),
}  # fmt: skip
"""Messages of a front end, and what their fields can be."""


def check_message(message: Message, workers: int) -> None:
    """Raises `MalformedMessage` for one that is not in `FIELDS`."""
    match message:
        case [str() as name, *fields] if name in FIELDS and len(fields) == len(FIELDS[name]):
            for number, (check, value) in enumerate(zip(FIELDS[name], fields, strict=True), 1):
                if not check(value, workers):
                    raise MalformedMessage(f"field {number} of {name!r} cannot be {_short(value)}")
        case _:
            raise MalformedMessage(f"not a message: {_short(message)}")


def _short(value: object) -> str:
    return repr(value)[:80]


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


class RemotePolicy:
    """The policy of one front end, which a `PolicyServer` decides for.

    Every event returns an empty decision. An assignment that has crossed with what ends it (an
    abort, a timeout, a retry, a worker that drains or is lost) is left out: the server gets to know
    the same, and has the request in its pool again, or no more.

    Args:
        workers: number of workers, as the server's policy has.
        clock: time and timers.

    Attributes:
        superseded: assignments that were left out.
    """

    def __init__(self, workers: int, clock: Clock) -> None:
        self.superseded = 0
        self._clock = clock
        self._link: Link | None = None
        self._dispatcher: RequestDispatcher | None = None
        self._lost: SharedPolicyLost | None = None
        # Serials tell attempts of one request apart, and requests that have one id after the other:
        # an assignment says which it means.
        self._serials: dict[RequestId, int] = {}
        self._ids: dict[int, RequestId] = {}
        self._arrived = self._sent = self._received = self._acknowledged = 0
        # By worker, the number of the last message that said it takes nothing: the server assigns
        # to it before it has that, and not after.
        self._stopped_at = [0] * workers
        self._answer_timer: Timer | None = None
        self._alive_timer: Timer | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the server is gone; then every event raises."""
        return self._lost is not None

    def connect(self, link: Link, dispatcher: RequestDispatcher) -> None:
        """Begin: `link` leads to the server, and `dispatcher` does what it decides."""
        self._link, self._dispatcher = link, dispatcher
        self._send("hello", VERSION, len(self._stopped_at))

    def on_arrival(self, request: Request) -> Decision:
        """A request arrived."""
        serial = self._arrived
        self._arrived += 1
        self._serials[request.id], self._ids[serial] = serial, request.id
        hits = None if request.hits is None else list(request.hits)
        return self._send("arrive", serial, request.size, request.worker, hits, request.expected)

    def on_tokens(
        self, counts: Mapping[RequestId, int], finished: Iterable[RequestId] = ()
    ) -> Decision:
        """Requests made tokens, and ended; what the server has lost meanwhile is left out."""
        tokens = {self._serials[name]: n for name, n in counts.items() if name in self._serials}
        ended = [self._forget(name) for name in finished if name in self._serials]
        return self._send("tokens", list(tokens), list(tokens.values()), ended)

    def on_finish(self, request: RequestId) -> Decision:
        """A request ended."""
        return self.on_tokens({}, (request,))

    def on_abort(self, request: RequestId) -> Decision:
        """A request was given up."""
        if request not in self._serials:  # the server has lost it meanwhile
            return Decision()
        return self._send("abort", self._forget(request))

    def on_worker_change(self, change: WorkerChange) -> Decision:
        """A worker changed. Raises `WorkerError` for one that would be new."""
        worker = change.worker
        if not 0 <= worker < len(self._stopped_at):
            raise WorkerError(
                f"there is no worker {worker}: a shared policy has {len(self._stopped_at)} and "
                "gets no new ones"
            )
        if change.capacity is not None:
            capacity = change.capacity
            self._send("capacity", worker, capacity.slots, capacity.kv_tokens)
        if change.state is not None:
            self._send("state", worker, change.state.value, self._received)
            if change.state is not WorkerState.SERVING:
                self._stopped_at[worker] = self._sent
        if change.report is not None:
            report = change.report
            self._send(
                "report", worker, report.waiting, report.running, report.tokens, report.kv_usage
            )
        return Decision()

    def decide(self) -> Decision:
        """Nothing: a decision is never due here, since the server has the timer of steps."""
        return Decision()

    def receive(self, message: Message) -> None:
        """Handle a message of the server."""
        if self._lost is not None:
            return
        match message:
            case ["decision", int() as acknowledged, list() as bound, list() as lost]:
                if self._received == 0:
                    self._end_greeting(acknowledged)
                self._received += 1
                self._acknowledged = acknowledged
                self._apply(bound, lost)
            case ["failed", str() as why]:
                self.lose(why)
            case _:
                self.lose(f"not a message of the policy: {str(message)[:80]}")

    def lose(self, why: str) -> None:
        """The server is gone: the dispatcher does as with any policy that failed."""
        if self._lost is not None:
            return
        self._lost = SharedPolicyLost(f"the policy that front ends share is lost: {why}")
        self._stop()
        if self._dispatcher is not None:
            self._dispatcher.fail_policy(self._lost)

    def close(self) -> None:
        """Leave the server, which aborts what it still has of this front end."""
        if self._lost is None:
            self._lost = SharedPolicyLost("this front end has left the policy")
            self._stop()

    def _stop(self) -> None:
        for timer in (self._answer_timer, self._alive_timer):
            if timer is not None:
                timer.cancel()
        if self._link is not None:
            self._link.close()
        self._serials.clear()
        self._ids.clear()

    def _forget(self, request: RequestId) -> int:
        serial = self._serials.pop(request)
        del self._ids[serial]
        return serial

    def _send(self, *message: Any) -> Decision:
        """Send an event, and expect an acknowledgement."""
        if self._lost is not None:
            raise self._lost
        assert self._link is not None, "`connect` comes before the first event"
        self._sent += 1
        self._link.send(list(message))
        if self._answer_timer is None:
            self._expect_answer(GREETING_SECONDS if self._received == 0 else ANSWER_SECONDS)
        if self._alive_timer is None:
            self._alive_timer = self._clock.call_later(ALIVE_SECONDS, self._say_alive)
        return Decision()

    def _say_alive(self) -> None:
        """The server drops a front end that is silent with requests; one without need not speak."""
        self._alive_timer = None
        if self._serials:
            self._send("alive")

    def _end_greeting(self, acknowledged: int) -> None:
        """The server is there: from now on it answers in the shorter time."""
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None
        if acknowledged < self._sent:
            self._expect_answer(ANSWER_SECONDS)

    def _expect_answer(self, seconds: float, sent: int | None = None) -> None:
        """Look twice: where this process was stopped, its timers may run before it reads what has
        come meanwhile.

        Args:
            seconds: until the second look.
            sent: number of the message that was missed at the first look; None: it is to come.
        """
        last = self._sent if sent is None else sent

        def look() -> None:
            self._answer_timer = None
            if self._acknowledged >= last:
                if self._acknowledged < self._sent:
                    self._expect_answer(ANSWER_SECONDS)
            elif sent is None:
                self._expect_answer(seconds, last)
            else:
                self.lose(f"no answer for {seconds:g} seconds")

        self._answer_timer = self._clock.call_later(seconds / 2, look)

    def _apply(self, bound: Iterable[tuple[int, int]], lost: Iterable[int]) -> None:
        assignments: list[Assignment] = []
        for serial, worker in bound:
            # The first: the request has ended. The second: this front end takes nothing to the
            # worker, and the server did not know it. Either is on its way there, and undoes this.
            if serial not in self._ids or self._acknowledged < self._stopped_at[worker]:
                self.superseded += 1
            else:
                assignments.append(Assignment(self._ids[serial], worker))
        names = [self._ids[serial] for serial in lost if serial in self._ids]
        for name in names:
            self._forget(name)
        if assignments or names:
            assert self._dispatcher is not None
            self._dispatcher.apply_decision(Decision(tuple(assignments), tuple(names)))


class TurnLink:
    """A link within a process: each message is received at the end of this turn of the event loop.

    Args:
        clock: schedules that.
        receive: the other end.
        closed: called after the last message.
    """

    def __init__(
        self, clock: Clock, receive: Callable[[Message], object], closed: Callable[[], object]
    ) -> None:
        self._clock, self._receive, self._closed = clock, receive, closed
        self._open = True

    def send(self, message: Message) -> None:
        """As `Link`."""
        if self._open:
            self._clock.call_soon(lambda: self._receive(message))

    def close(self) -> None:
        """As `Link`."""
        if self._open:
            self._open = False
            self._clock.call_soon(self._closed)


def connect_in_process(
    server: PolicyServer, policy: RemotePolicy, dispatcher: RequestDispatcher, clock: Clock
) -> FrontEndSession:
    """Connect the front end of the process that has the server, by the way that all others go."""
    to_front_end = TurnLink(clock, policy.receive, lambda: policy.lose("the link has ended"))
    session = server.connect(to_front_end)
    policy.connect(TurnLink(clock, session.receive, session.disconnect), dispatcher)
    return session


def _serial(request: SharedRequest) -> int:
    assert isinstance(request.arrival.id, tuple)
    return int(request.arrival.id[1])
