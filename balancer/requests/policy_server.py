"""The server's end of a policy that front ends share.

The front ends are processes, or dispatchers of one process. `PolicyServer` has the policy. Each
front end has a `RemotePolicy`, which its `RequestDispatcher` calls as any policy: it sends each
event to the server and decides nothing; what the server decides comes later, by `apply_decision`.
docs/design/request-balance.md says what can cross on the way, and what then holds.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
MAX_WORKERS = 4096
"""Of a policy: each decision looks at all of them."""
SILENT_SECONDS = 30.0
"""How long the server hears nothing from a front end that has requests, or has not said `hello`,
before it drops it."""


@unique
class Stage(Enum):
    """How far a request is, as the server knows it."""

    PARKED = "parked"
    """The policy does not know it: no worker that its front end uses now may serve it."""
    POOLED = "pooled"
    BOUND = "bound"
    RUNNING = "running"


@dataclass(eq=False)
class SharedRequest:
    """A request of one front end, at the server. Workers have the numbers of the policy.

    Attributes:
        session: its front end.
        serial: the front end's name of it.
        size: prompt tokens.
        required_worker: the only worker that may serve it, says its front end; None: any.
        hits: prompt tokens that are cached, by worker; none where they are not known.
        expected: output tokens, if known.
        pin: the worker that the server has chosen, where the policy chose one that its front end
            does not use now; None: none.
        stage: how far it is.
        worker: that has it; -1: none.
        message: number of the message that binds it, of those to its front end.
    """

    session: "FrontEndSession"
    serial: int
    size: int
    required_worker: int | None = None
    hits: Mapping[int, int] = field(default_factory=dict)
    expected: int | None = None
    pin: int | None = None
    stage: Stage = Stage.PARKED
    worker: int = -1
    message: int = 0

    @property
    def id(self) -> RequestId:
        """The policy's name of it."""
        return self.session.number, self.serial

    @property
    def only_worker(self) -> int | None:
        """The only worker that it may go to now; None: any."""
        return self.pin if self.required_worker is None else self.required_worker

    def move(self, worker: int = -1, pin: int | None = None) -> None:
        """It is on another worker, or is to go there only; by default on none, and to any."""
        self.session.count(self, -1)
        self.worker, self.pin = worker, pin
        self.session.count(self, 1)

    def arrival(self, workers: int) -> Request:
        """As the policy is told of it, which has so many workers."""
        hits = [self.hits.get(worker, 0) for worker in range(workers)] if self.hits else None
        return Request(
            id=self.id, size=self.size, worker=self.only_worker, hits=hits, expected=self.expected
        )


@dataclass
class SharedWorker:
    """A worker of the policy.

    Attributes:
        name: by which front ends mean the same; None: its number is free.
        state: as the policy knows it.
        capacity: as the policy knows it; None: it was told none.
    """

    name: str | None
    state: WorkerState = WorkerState.SERVING
    capacity: Capacity | None = None


@dataclass
class ReportedWorker:
    """What one front end says of a worker.

    Attributes:
        number: of the policy.
        state: by its own health checks and its own list.
        capacity: what the worker takes; None: nothing is said of it.
        is_reporter: whether it has passed on a load report of the worker.
    """

    number: int
    state: WorkerState
    capacity: Capacity | None
    is_reporter: bool = False


class PolicyServer:
    """Has the policy of several front ends, and tells each what concerns its requests.

    A front end that leaves has its requests aborted. A policy that fails is called no more, and
    every front end is told so.

    Each front end numbers workers by itself, and names them; a name means the same worker at all.
    A worker serves while any front end says so, and is lost while all say so that know it, or none
    does. What the policy assigns to a worker that the front end of the request does not use now
    goes to the least loaded of those that it does.

    Args:
        policy: not called by anything else from now on; it has no requests.
        workers: names of the workers that it has; None: one that is to be lost, its number free.
        clock: time and timers.
        on_failure: called once, with what the policy raised.
        observe: called with the number of front ends, when it has changed.
        lockstep: whether the policy waits for the tokens of whole steps; a front end that says
            otherwise is refused. None: not known.

    Attributes:
        policy: for inspection; None once it is called no more.
        workers: as the policy knows them, by its numbers.
        counts: requests that each worker has, or that the server has chosen it for.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        workers: Sequence[str | None],
        clock: Clock,
        on_failure: Callable[[Exception], object],
        observe: Callable[[int], object] = lambda front_ends: None,
        lockstep: bool | None = None,
    ) -> None:
        self.policy: RoutingPolicy | None = policy
        self.lockstep = lockstep
        self.workers = [SharedWorker(name) for name in workers]
        self.counts: Counter[int] = Counter()
        self._misplaced: deque[SharedRequest] = deque()
        self._clock, self._on_failure, self._observe = clock, on_failure, observe
        self._sessions: dict[int, FrontEndSession] = {}
        self._connected = 0
        self._step_timer: Timer | None = None
        for number, worker in enumerate(self.workers):
            if worker.name is None:
                worker.capacity = Capacity()
                change = WorkerChange(worker=number, capacity=worker.capacity)
                self.tell(lambda policy, change=change: policy.on_worker_change(change))  # type: ignore[misc]
                self._set_state(number, WorkerState.LOST)

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
        only = request.only_worker
        if only is not None and not request.session.uses(only):
            return
        request.stage = Stage.POOLED
        arrival = request.arrival(len(self.workers))
        try:
            self.tell_refusable(lambda policy: policy.on_arrival(arrival))
        except MalformedMessage:
            request.stage = Stage.PARKED  # the policy does not know it, as before
            raise

    def abort(self, request: SharedRequest) -> None:
        """Take a request from the policy."""
        in_policy = request.stage is not Stage.PARKED
        request.stage = Stage.PARKED
        request.move()
        if in_policy:
            self.tell(lambda policy: policy.on_abort(request.id))

    def find_worker(self, name: str) -> int:
        """Return the number of a worker, which the policy gets if it has none of this name.

        Raises `MalformedMessage` where it has as many as it may have.
        """
        names = [worker.name for worker in self.workers]
        for wanted in (name, None):
            if wanted in names:
                number = names.index(wanted)
                self.workers[number].name = name
                return number
        number = len(self.workers)
        if number == MAX_WORKERS:
            raise MalformedMessage(f"the policy has {MAX_WORKERS} workers already")
        self.workers.append(SharedWorker(name, WorkerState.LOST))
        change = WorkerChange(worker=number, name=name, state=WorkerState.LOST)
        self.tell(lambda policy: policy.on_worker_change(change), number)
        return number

    def update_worker(self, number: int) -> None:
        """Tell the policy the state of a worker, if another one follows from what is said of it."""
        worker = self.workers[number]
        known = self._reports_of(number)
        states = {one.state for one in known}
        # In the order of the states: what one front end uses, serves.
        state = next((one for one in WorkerState if one in states), WorkerState.LOST)
        if state is not worker.state:
            self._set_state(number, state)
        if not known:
            worker.name = None  # the next worker of this number is another one

    def update_capacity(self, number: int) -> None:
        """Tell the policy what a worker takes: the least that a front end says that has it.

        Before its state: a worker that serves gets requests at once.

        Raises `MalformedMessage` where the policy refuses it.
        """
        worker = self.workers[number]
        capacities = [
            one.capacity
            for one in self._reports_of(number)
            if one.state is not WorkerState.LOST and one.capacity is not None
        ]
        if not capacities and worker.capacity is None:
            return  # the policy was made with a capacity, and nobody says another one
        capacity = Capacity(
            slots=_least(one.slots for one in capacities),
            kv_tokens=_least(one.kv_tokens for one in capacities),
        )
        if capacity != worker.capacity:
            change = WorkerChange(worker=number, capacity=capacity)
            self.tell_refusable(lambda policy: policy.on_worker_change(change))
            worker.capacity = capacity

    def _reports_of(self, number: int) -> "list[ReportedWorker]":
        reported = (session.reported(number) for session in self.sessions)
        return [one for one in reported if one is not None]

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
        self._place_misplaced()

    def tell_refusable(self, event: PolicyEvent) -> None:
        """Call the policy with an event that a front end has put values into.

        Raises `MalformedMessage` where the policy refuses them: nothing has changed then, and the
        other front ends go on.
        """
        try:
            self._call(event)
        except (RequestError, WorkerError) as error:
            raise MalformedMessage(f"the policy refuses it: {error}") from error
        self._place_misplaced()

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
        for number in range(len(self.workers)):
            self.update_worker(number)
            try:
                self.update_capacity(number)
            except MalformedMessage as error:  # it has taken the same before
                self._fail(error)
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
            request = self._find(name)
            if request is not None:
                request.session.lose(request)
        if changed_worker is not None and self.workers[changed_worker].state is WorkerState.LOST:
            # What the worker had not begun is in the pool again, and may be bound in this decision.
            for session in self.sessions:
                for request in session.with_stage(Stage.BOUND):
                    if request.worker == changed_worker:
                        request.stage = Stage.POOLED
                        request.move(pin=request.pin)
        for assignment in decision.assignments:
            request, worker = self._find(assignment.request), assignment.worker
            if request is None or not self._can_bind(request, worker):
                raise InvalidAssignment(f"the policy cannot bind so: {assignment}")
            if request.session.uses(worker):
                request.session.bind(request, worker)
            else:
                self._misplaced.append(request)

    def _can_bind(self, request: SharedRequest, worker: int) -> bool:
        return (
            request.stage is Stage.POOLED
            and 0 <= worker < len(self.workers)
            and self.workers[worker].state is WorkerState.SERVING
            and request.only_worker in (None, worker)
        )

    def _find(self, name: RequestId) -> SharedRequest | None:
        """A request by the policy's name of it; None: there is none, or it has ended."""
        match name:
            case (int() as number, int() as serial) if number in self._sessions:
                return self._sessions[number].find(serial)
        return None

    def _place_misplaced(self) -> None:
        """Take from the policy what it has assigned to workers that the front ends of the requests
        do not use, and let it arrive for one that they do.

        In a loop and not where that is found: what is decided meanwhile may be misplaced, too.
        """
        while self._misplaced:
            request = self._misplaced.popleft()
            try:
                self._call(lambda policy, request=request: policy.on_abort(request.id))  # type: ignore[misc]
                request.stage = Stage.PARKED
                request.move()
                if request.required_worker is None:
                    request.move(pin=self._least_loaded(request))
                only = request.only_worker
                if only is None or not request.session.uses(only):
                    continue  # until one of its workers serves
                request.stage = Stage.POOLED
                arrival = request.arrival(len(self.workers))
                self._call(lambda policy, arrival=arrival: policy.on_arrival(arrival))  # type: ignore[misc]
            except (RequestError, WorkerError) as error:
                self._fail(error)

    def _least_loaded(self, request: SharedRequest) -> int | None:
        """The worker with the fewest requests of those that its front end uses and that have room
        for it; None: there is none."""
        candidates = []
        for number in request.session.used:
            capacity = self.workers[number].capacity
            room = None if capacity is None else capacity.kv_tokens
            if room is None or request.size <= room:
                candidates.append((self.counts[number], number))
        return min(candidates)[1] if candidates else None

    def _set_state(self, number: int, state: WorkerState) -> None:
        worker = self.workers[number]
        # A lost worker has nothing to drain, unless a front end comes that has requests on it.
        name = worker.name if worker.state is WorkerState.LOST else None
        worker.state = state
        change = WorkerChange(worker=number, name=name, state=state)
        self.tell(lambda policy: policy.on_worker_change(change), number)

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
        self._misplaced.clear()
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
        self._workers: list[ReportedWorker | None] = []  # by its own numbers; None: it is gone
        self._numbers: dict[int, int] = {}  # of the policy: its own
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

    def reported(self, number: int) -> ReportedWorker | None:
        """What it says of a worker of the policy; None: it has none such."""
        own = self._numbers.get(number)
        return None if own is None else self._workers[own]

    def _worker(self, own: int) -> ReportedWorker:
        worker = self._workers[own]
        if worker is None:
            raise MalformedMessage(f"number {own} is that of a worker that is gone")
        return worker

    @property
    def used(self) -> list[int]:
        """The workers of the policy that it says serve."""
        return [number for number in self._numbers if self.uses(number)]

    def count(self, request: SharedRequest, by: int) -> None:
        """Count a request at the worker that it is on, or is to go to."""
        worker = request.pin if request.worker < 0 else request.worker
        if worker is not None:
            self._server.counts[worker] += by

    def uses(self, number: int) -> bool:
        """Whether it says that a worker of the policy serves."""
        reported = self.reported(number)
        return reported is not None and reported.state is WorkerState.SERVING

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
        request.stage = Stage.BOUND
        request.move(worker, request.pin)
        request.message = self._sent + 1  # the next one
        self._bound.append((request.serial, self._numbers[worker]))

    def lose(self, request: SharedRequest) -> None:
        """The policy does not know a request any more, which its front end has not ended."""
        self._remove(request.serial)
        self._lost.append(request.serial)

    def _remove(self, serial: int) -> SharedRequest | None:
        """A request has ended; None: it had before."""
        request = self._requests.pop(serial, None)
        if request is not None:
            self.count(request, -1)
        return request

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
        check_message(message, len(self._workers))
        if self._joined is (message[0] == "hello"):
            raise MalformedMessage("`hello` comes first, and once")
        match message:
            case ["hello", version, lockstep]:
                self._check_hello(version, lockstep)
                self._joined = True
                server.join(self)
            case ["alive"]:
                pass
            case ["arrive", serial, size, worker, hits, expected]:
                request = self._add(serial, size, worker)
                request.hits = self._hits(hits or ())
                request.expected = expected
                server.arrive(request)
            case ["running", serial, size, required, worker, tokens]:
                self._on_running(self._add(serial, size, required), worker, tokens)
            case ["tokens", serials, counts, ended]:
                if len(serials) != len(counts):
                    raise MalformedMessage(f"{len(counts)} counts of {len(serials)} requests")
                self._on_tokens(dict(zip(serials, counts, strict=True)), ended)
            case ["abort", serial]:
                known = self._requests.get(serial)
                if known is not None:  # else the policy has lost it meanwhile
                    server.abort(known)
                    self._remove(serial)
            case ["worker", number, name, slots, kv_tokens, state]:
                self._on_worker(number, name, _capacity(slots, kv_tokens), WorkerState(state))
            case ["state", worker, state, acknowledged]:
                self._on_state(self._worker(worker), WorkerState(state), acknowledged)
            case ["capacity", worker, slots, kv_tokens]:
                self._worker(worker).capacity = _capacity(slots, kv_tokens)
                self._use(self._worker(worker))
            case ["report", worker, waiting, running, tokens, kv_usage]:
                self._on_report(
                    self._worker(worker).number,
                    WorkerReport(
                        waiting=waiting, running=running, tokens=tokens, kv_usage=kv_usage
                    ),
                )

    def _check_hello(self, version: int, lockstep: bool | None) -> None:
        if version != VERSION:
            raise MalformedMessage(
                f"its messages are of version {version}, and the policy's of {VERSION}: have all "
                "front ends run the version of the policy's process"
            )
        ours = self._server.lockstep
        if None not in (lockstep, ours) and lockstep is not ours:
            raise MalformedMessage(
                f"lockstep is {_text(lockstep)} at the front end and {_text(ours)} at the policy "
                "server: set the policy option `lockstep` of one as that of the other"
            )

    def _add(self, serial: int, size: int, required: int | None) -> SharedRequest:
        if serial in self._requests:
            raise MalformedMessage(f"request {serial} has arrived already")
        worker = None if required is None else self._worker(required).number
        request = self._requests[serial] = SharedRequest(self, serial, size, worker)
        return request

    def _hits(self, hits: Sequence[int]) -> dict[int, int]:
        """By numbers of the policy, without those that are none."""
        pairs = zip(hits[::2], hits[1::2], strict=True)
        return {self._worker(own).number: tokens for own, tokens in pairs}

    def _on_running(self, request: SharedRequest, worker: int, tokens: int) -> None:
        """It runs already: this front end had another policy before."""
        number = self._worker(worker).number
        if self._worker(worker).state is WorkerState.LOST:
            raise MalformedMessage(f"request {request.serial} runs on a worker that is lost")
        request.move(number)
        request.stage = Stage.RUNNING if tokens else Stage.BOUND
        running = Request(id=request.id, size=request.size, worker=request.required_worker)
        try:
            self._server.tell_refusable(lambda policy: policy.on_running(running, number, tokens))
        except MalformedMessage:
            request.stage = Stage.PARKED  # the policy does not know it
            request.move()
            raise

    def _on_tokens(self, counts: Mapping[int, int], ended: Iterable[int]) -> None:
        tokens: dict[RequestId, int] = {}
        for serial, count in counts.items():
            request = self._begun(serial)
            if request is not None:
                request.stage = Stage.RUNNING
                tokens[request.id] = count
        finished: dict[int, RequestId] = {}
        for serial in ended:
            request = self._begun(serial)
            if request is not None:
                finished[serial] = request.id
        if tokens or finished:
            ends = list(finished.values())
            self._server.tell_refusable(lambda policy: policy.on_tokens(tokens, ends))
        # Not before: of an event that is refused the policy still has all requests.
        for serial in finished:
            self._remove(serial)

    def _begun(self, serial: int) -> SharedRequest | None:
        request = self._requests.get(serial)
        if request is None:
            self.unknown += 1
        elif request.worker < 0:
            raise MalformedMessage(f"request {serial} makes tokens, and is on no worker")
        return request

    def _on_worker(
        self, own: int, name: str, capacity: Capacity | None, state: WorkerState
    ) -> None:
        """By this number it has a worker of this name from now on; an empty name: none."""
        if own < len(self._workers):
            self._forget_worker(own)
        else:
            self._workers.append(None)
        if not name:
            return
        number = self._server.find_worker(name)
        if number in self._numbers:
            raise MalformedMessage(f"worker {name!r} has two numbers")
        self._numbers[number] = own
        reported = self._workers[own] = ReportedWorker(number, state, capacity)
        self._use(reported)

    def _forget_worker(self, own: int) -> None:
        """One of its numbers is that of no worker now. Raises `MalformedMessage` where the worker
        is not lost: it may have requests."""
        before = self._workers[own]
        if before is None:
            return
        if before.state is not WorkerState.LOST:
            raise MalformedMessage(f"number {own} is that of a worker that is not lost")
        self._workers[own] = None
        del self._numbers[before.number]
        self._server.update_worker(before.number)

    def _on_state(self, worker: ReportedWorker, state: WorkerState, acknowledged: int) -> None:
        """Take its word of a worker, and with it what of its own requests that worker had.

        Assignments to the worker that were on their way (in messages after the `acknowledged` one)
        are ignored by the front end. So they are over here, too.
        """
        server, number = self._server, worker.number
        worker.state = state
        if state is WorkerState.SERVING:
            self._use(worker)
            return
        is_lost = state is WorkerState.LOST
        # What the server has sent there goes anywhere else. Before the policy hears of a loss, with
        # which it would lose them.
        again: list[SharedRequest] = []
        for request in self.requests:
            pooled, bound = (request.stage is stage for stage in (Stage.POOLED, Stage.BOUND))
            if request.pin == number and (pooled or (bound and is_lost)):
                server.abort(request)
                again.append(request)
        self._use(worker)
        for request in self.requests:
            required = is_lost and request.required_worker == number
            begun = is_lost and request.worker == number and request.stage is Stage.RUNNING
            if required or begun:
                server.abort(request)
                self.lose(request)
            elif (
                request.worker == number
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

    def _use(self, worker: ReportedWorker) -> None:
        """Tell the policy what follows from what is said of a worker; what waits for one may go
        there, too."""
        server = self._server
        server.update_capacity(worker.number)
        server.update_worker(worker.number)
        if worker.state is not WorkerState.SERVING:
            return
        for request in self.requests:
            if request.stage is Stage.POOLED and request.pin not in (None, worker.number):
                server.abort(request)
        for request in self.with_stage(Stage.PARKED):
            if request.required_worker in (None, worker.number):
                server.arrive(request)

    def _on_report(self, number: int, report: WorkerReport) -> None:
        """Pass on a report of the front end that has been there longest of those that use the
        worker and report: an older one of another must not replace a newer one."""
        mine = self.reported(number)
        assert mine is not None
        mine.is_reporter = True
        reporters = [
            one
            for one in self._server.sessions
            if one.uses(number) and (reported := one.reported(number)) and reported.is_reporter
        ]
        if reporters[:1] == [self]:
            change = WorkerChange(worker=number, report=report)
            self._server.tell_refusable(lambda policy: policy.on_worker_change(change))


def _least(amounts: Iterable[int | None]) -> int | None:
    """The least of those that are limits."""
    return min((amount for amount in amounts if amount is not None), default=None)


def _capacity(slots: int | None, kv_tokens: int | None) -> Capacity | None:
    both_unknown = slots is None and kv_tokens is None
    return None if both_unknown else Capacity(slots=slots, kv_tokens=kv_tokens)


def _text(lockstep: bool | None) -> str:
    return str(lockstep).lower()
