"""The front end's end of a policy that another process, or another dispatcher, has."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from equipoise.balancer.requests.dispatcher import Clock, RequestDispatcher, Timer
from equipoise.balancer.requests.policy import (
    Assignment,
    Decision,
    Request,
    RequestId,
    WorkerChange,
    WorkerState,
)
from equipoise.balancer.requests.policy_messages import (
    VERSION,
    Link,
    Message,
    SharedPolicyLost,
)
from equipoise.balancer.requests.policy_server import FrontEndSession, PolicyServer
from equipoise.hal.errors import WorkerError

GREETING_SECONDS = 120.0
"""How long a front end waits for the server's first answer: its process may still load."""
ANSWER_SECONDS = 30.0
"""How long a front end waits for an answer later: the server acknowledges every turn."""
ALIVE_SECONDS = 5.0
"""A front end that has requests says so as often."""


class RemotePolicy:
    """The policy of one front end, which a `PolicyServer` decides for.

    Every event returns an empty decision. An assignment that has crossed with what ends it (an
    abort, a timeout, a retry, a worker that drains or is lost) is left out: the server gets to know
    the same, and has the request in its pool again, or no more.

    Args:
        clock: time and timers.
        on_lost: called once, when the server is gone; it has to let this policy go.
        on_joined: called once, when the server has answered.
        answer_seconds: how long the server may take for an answer.
        greeting_seconds: how long for the first.
        lockstep: whether this front end tells all tokens of a step; None: what the policy has.

    Attributes:
        superseded: assignments that were left out.
    """

    def __init__(
        self,
        clock: Clock,
        on_lost: Callable[[SharedPolicyLost], object],
        on_joined: Callable[[], object] = lambda: None,
        answer_seconds: float = ANSWER_SECONDS,
        greeting_seconds: float = GREETING_SECONDS,
        lockstep: bool | None = None,
    ) -> None:
        self.superseded = 0
        self._clock, self._on_lost, self._on_joined = clock, on_lost, on_joined
        self._answer_seconds, self._greeting_seconds = answer_seconds, greeting_seconds
        self._lockstep = lockstep
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
        self._stopped_at: list[int] = []
        self._answer_timer: Timer | None = None
        self._alive_timer: Timer | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the server is gone; then every event raises."""
        return self._lost is not None

    def connect(self, link: Link, dispatcher: RequestDispatcher) -> None:
        """Begin: `link` leads to the server, and `dispatcher` does what it decides.

        The dispatcher's `replace_policy` has to follow, at once or once it has joined.
        """
        self._link, self._dispatcher = link, dispatcher
        self._send("hello", VERSION, self._lockstep)

    def on_arrival(self, request: Request) -> Decision:
        """A request arrived."""
        serial = self._name(request)
        # Most are 0: a front end that joins tells all that waits at once.
        hits = [
            number for pair in enumerate(request.hits or ()) if pair[1] for number in pair
        ] or None
        return self._send("arrive", serial, request.size, request.worker, hits, request.expected)

    def on_running(self, request: Request, worker: int, tokens: int) -> Decision:
        """A worker has a request already."""
        serial = self._name(request)
        return self._send("running", serial, request.size, request.worker, worker, tokens)

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
        """A worker changed. Raises `WorkerError` for one that is not known, and has no name."""
        worker, capacity, state = change.worker, change.capacity, change.state
        if not 0 <= worker < len(self._stopped_at) + (change.name is not None):
            raise WorkerError(f"there is no worker {worker}: there are {len(self._stopped_at)}")
        limits = (None, None) if capacity is None else (capacity.slots, capacity.kv_tokens)
        if change.name is not None:
            if worker == len(self._stopped_at):
                self._stopped_at.append(0)
            state = state or WorkerState.SERVING
            self._send("worker", worker, change.name, *limits, state.value)
        else:
            if capacity is not None:
                self._send("capacity", worker, *limits)
            if state is not None:
                self._send("state", worker, state.value, self._received)
        if state not in (None, WorkerState.SERVING):
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
                self._received += 1
                self._acknowledged = acknowledged
                if self._received == 1:
                    self._end_greeting(acknowledged)
                self._apply(bound, lost)
            case ["failed", str() as why]:
                self.lose(why)
            case _:
                self.lose(f"not a message of the policy: {str(message)[:80]}")

    def lose(self, why: str) -> None:
        """The server is gone: the dispatcher does as with any policy that failed."""
        if self._lost is not None:
            return
        self._lost = SharedPolicyLost(why)
        self._stop()
        self._on_lost(self._lost)

    def close(self) -> None:
        """Leave the server, which aborts what it still has of this front end."""
        if self._lost is None:
            self._lost = SharedPolicyLost("this front end has left it")
            self._stop()

    def _stop(self) -> None:
        for timer in (self._answer_timer, self._alive_timer):
            if timer is not None:
                timer.cancel()
        if self._link is not None:
            self._link.close()
        self._serials.clear()
        self._ids.clear()

    def _name(self, request: Request) -> int:
        serial = self._arrived
        self._arrived += 1
        self._serials[request.id], self._ids[serial] = serial, request.id
        return serial

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
            self._expect_answer(
                self._greeting_seconds if self._received == 0 else self._answer_seconds
            )
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
            self._expect_answer(self._answer_seconds)
        self._on_joined()

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
                    self._expect_answer(self._answer_seconds)
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
    dispatcher.replace_policy(policy)
    return session
