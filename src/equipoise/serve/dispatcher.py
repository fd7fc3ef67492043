"""Where requests meet the policy: the only caller of it, and the only writer of tickets.

Everything here is called by the event loop's own thread and returns at once. Tokens of one turn of
the loop are told together: a step of an engine brings a token to each of its requests, and deciding
after each of them would give a free slot away before the others are known.
"""

import asyncio
import logging
from collections.abc import Callable
from time import perf_counter

from equipoise.balancer.requests.policy import (
    Decision,
    Request,
    RequestId,
    RoutingPolicy,
    WorkerChange,
    WorkerReport,
    WorkerState,
)
from equipoise.serve.cancel_scope import CancelReason
from equipoise.serve.outcomes import (
    AT_ONCE,
    ErrorResponse,
    RequestOutcome,
    RequestRefused,
    overloaded,
)
from equipoise.serve.request_state import (
    CLOSED,
    QUEUED,
    Bound,
    Queued,
    RequestState,
    Running,
    WorkerView,
    least_loaded,
)

LOG = logging.getLogger("equipoise.route")
NO_DECISION = Decision()


class RequestDispatcher:
    """Binds requests to workers as a policy says.

    Args:
        policy: nobody else calls it from now on.
        workers: how many it has.
        most_held: requests that may wait in it.
        observe: told the seconds that each decision took.

    Attributes:
        workers: what is known of each.
        held: requests that wait in the policy.
        errors: events that the policy raised at.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        workers: int,
        most_held: int,
        observe: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._policy = policy
        self._most_held = most_held
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._known: dict[int, RequestState] = {}
        self._counts: dict[RequestId, int] = {}
        self._ended: list[RequestId] = []
        self._flushing = False
        self._next = 0
        self.workers = tuple(WorkerView() for _ in range(workers))
        self.held = 0
        self.errors = 0

    @property
    def tickets(self) -> tuple[RequestState, ...]:
        """Those that are not gone."""
        return tuple(self._known.values())

    def arrive(self, size: int, wanted: int | None = None) -> RequestState:
        """A request has arrived; it is bound at once, or waits.

        Raises: Refused: 429 where too many wait, 503 where the one worker wanted does not serve.
        """
        ticket = RequestState(self._next, size, wanted)
        self._next += 1
        self._flush()
        self._enter(ticket)
        if isinstance(ticket.state, Queued) and self.held > self._most_held:
            self.leave(ticket)
            raise overloaded(f"{self._most_held} requests wait for a worker already")
        return ticket

    def begin(self, ticket: RequestState, bound: Bound) -> bool:
        """Something of its answer is about to be passed on; False: that binding is over."""
        if ticket.state is not bound:
            return False
        ticket.state = Running(bound.worker)
        self._tell(ticket, 1)  # it can be moved no more, which a policy learns from a token
        return True

    def made(self, ticket: RequestState, tokens: int) -> None:
        """It has made so many tokens since it was bound."""
        if isinstance(ticket.state, Running):
            self.workers[ticket.state.worker].heard = self._loop.time()
            if tokens > ticket.told:
                self._tell(ticket, tokens - ticket.told)

    def finish(self, ticket: RequestState, bound: Bound, tokens: int) -> None:
        """It ended well, with so many tokens in all."""
        if tokens:
            self.begin(ticket, bound)
        if not isinstance(ticket.state, Running):
            self.leave(ticket)  # to a policy, what made no token was given up
            return
        self.made(ticket, tokens)
        self._release(ticket)
        ticket.state = CLOSED
        self._ended.append(ticket.number)
        self._schedule()

    def leave(self, ticket: RequestState) -> None:
        """It was given up, wherever it is; again and again is no harm."""
        if ticket.state is CLOSED:
            return
        self._release(ticket)
        ticket.state = CLOSED
        self._counts.pop(ticket.number, None)
        self._apply(self._ask(lambda: self._policy.on_abort(ticket.number)))

    def again(self, ticket: RequestState, bound: Bound) -> None:
        """Its attempt came to nothing: it is to be bound to another worker.

        Raises: Refused (503) where its client wants that worker only, and it does not serve.
        """
        if ticket.state is not bound:
            return  # the worker was lost meanwhile, and the policy has it again
        self.leave(ticket)
        ticket.told = 0
        ticket.pin = ticket.wanted
        if ticket.wanted is None:
            ticket.pin = least_loaded(self.workers, bound.worker, ticket.size)
        self._flush()
        self._enter(ticket)

    def change(self, worker: int, state: WorkerState) -> None:
        """A worker was found to serve, or not to."""
        self.workers[worker].health = state
        self._settle(worker)

    def set_aside(self, worker: int) -> None:
        """It keeps what it has, and gets nothing more until it is taken back."""
        self.workers[worker].aside = True
        self._settle(worker)

    def take_back(self, worker: int) -> None:
        """It gets requests again, if it is well."""
        self.workers[worker].aside = False
        self._settle(worker)

    def _settle(self, worker: int) -> None:
        """Tell the policy what is due, and see to the requests that this concerns."""
        view = self.workers[worker]
        state = view.due
        if state is view.state:
            return
        self._flush()  # the policy has to know first which requests have begun
        view.state = state
        decision = self._ask(
            lambda: self._policy.on_worker_change(WorkerChange(worker=worker, state=state))
        )
        free = self._lose(decision)
        if state is WorkerState.LOST:
            self._unbind(view)
        self._assign(decision)
        if state is not WorkerState.SERVING:
            for ticket in [*free, *self._pinned(worker)]:
                self._move(ticket, worker)

    def report(self, worker: int, report: WorkerReport) -> None:
        """A worker says what it has to do, by whomever; one that is lost has nothing to say."""
        if self.workers[worker].state is WorkerState.LOST:
            return
        self._flush()  # what it says is to be held against what the policy knows now
        change = WorkerChange(worker=worker, report=report)
        self._apply(self._ask(lambda: self._policy.on_worker_change(change)))

    def _move(self, ticket: RequestState, away: int) -> None:
        """Nothing of it has begun: any worker but `away` may have it."""
        self.leave(ticket)
        ticket.pin = least_loaded(self.workers, away, ticket.size)
        try:
            self._enter(ticket)
        except Exception:  # told of already; it is one request's end, and not the proxy's
            ticket.interrupt(CancelReason.LOST)

    def _pinned(self, worker: int) -> list[RequestState]:
        """What was to be tried again there, and there only: it may go elsewhere."""
        return [
            one
            for one in self.tickets
            if one.pin == worker and one.wanted is None and isinstance(one.state, Queued)
        ]

    def _unbind(self, view: WorkerView) -> None:
        """The policy holds again what its worker, which is lost, had not begun."""
        for ticket in [one for one in view.tickets.values() if isinstance(one.state, Bound)]:
            view.release(ticket)
            self.held += 1
            ticket.unbind()

    def _enter(self, ticket: RequestState) -> None:
        pin = ticket.pin
        if pin is not None and self.workers[pin].state is not WorkerState.SERVING:
            message = f"worker {pin}, which was asked for, does not serve"
            raise RequestRefused(
                ErrorResponse(503, RequestOutcome.WORKERS_FAILED, message, "no_worker", AT_ONCE)
            )
        ticket.state = QUEUED
        self.held += 1
        self._known[ticket.number] = ticket
        request = Request(id=ticket.number, size=ticket.size, worker=pin)
        try:
            self._apply(self._ask(lambda: self._policy.on_arrival(request), silent=False))
        except Exception:
            self._release(ticket)
            ticket.state = CLOSED
            raise

    def _release(self, ticket: RequestState) -> None:
        """From where it is: the policy, or a worker."""
        match ticket.state:
            case Queued():
                self.held -= 1
            case Bound(worker) | Running(worker):
                self.workers[worker].release(ticket)
        self._known.pop(ticket.number, None)

    def _tell(self, ticket: RequestState, tokens: int) -> None:
        assert isinstance(ticket.state, Running)
        ticket.told += tokens
        self.workers[ticket.state.worker].load += tokens
        self._counts[ticket.number] = self._counts.get(ticket.number, 0) + tokens
        self._schedule()

    def _schedule(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Tell what this turn of the loop has brought."""
        self._flushing = False
        if not self._counts and not self._ended:
            return
        counts, ended = self._counts, self._ended
        self._counts, self._ended = {}, []
        self._apply(self._ask(lambda: self._policy.on_tokens(counts, ended)))

    def _ask(self, event: Callable[[], Decision], silent: bool = True) -> Decision:
        began = perf_counter()
        try:
            decision = event()
        except Exception:
            self.errors += 1
            LOG.exception("the policy failed at an event")
            if not silent:
                raise
            return NO_DECISION
        self._observe(perf_counter() - began)
        return decision

    def _apply(self, decision: Decision) -> None:
        if decision.lost:
            self._lose(decision)
        if decision.assignments:
            self._assign(decision)

    def _lose(self, decision: Decision) -> list[RequestState]:
        """What the policy has forgotten ends; returns what has not begun, and may go elsewhere."""
        free: list[RequestState] = []
        for lost in decision.lost:
            ticket = self._known.get(_number(lost))
            if ticket is None:
                continue
            movable = ticket.wanted is None and not isinstance(ticket.state, Running)
            was_bound = isinstance(ticket.state, Bound)
            self._release(ticket)
            ticket.state = CLOSED
            if movable:
                free.append(ticket)
            if was_bound or not movable:
                ticket.interrupt(CancelReason.UNBOUND if movable else CancelReason.LOST)
        return free

    def _assign(self, decision: Decision) -> None:
        now = self._loop.time()
        for assignment in decision.assignments:
            ticket = self._known.get(_number(assignment.request))
            there = 0 <= assignment.worker < len(self.workers)
            if ticket is None or not isinstance(ticket.state, Queued) or not there:
                self.errors += 1
                LOG.error("the policy cannot bind so: %s", assignment)
                continue
            self.held -= 1
            self.workers[assignment.worker].take(ticket)
            ticket.bind(assignment.worker, now)


def _number(request: object) -> int:
    assert isinstance(request, int)
    return request
