"""Dispatches the requests of one front end to workers as a policy decides.

The state machine that every transport shares: the proxy, vLLM's client, and whatever else takes
requests. It is the only caller of a policy and the only writer of request states. A transport tells
it what happens and hears of decisions by the methods of its requests; it does the I/O itself.

All methods run on one thread, return at once and need no lock. docs/design/request-balance.md has
the table of states.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from time import perf_counter
from typing import Protocol, TypeAlias

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
from equipoise.balancer.requests.prefix_index import PrefixIndex
from equipoise.hal.errors import PolicyError, RequestError, WorkerError


class Timer(Protocol):
    """A callback that was scheduled."""

    def cancel(self) -> None:
        """Do not call it."""
        ...


class Clock(Protocol):
    """Time and timers. An asyncio event loop is one."""

    def time(self) -> float:
        """Monotonic seconds."""
        ...

    def call_soon(self, callback: Callable[[], object], /) -> Timer:
        """Call it once, at the end of this turn of the event loop."""
        ...

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        """Call it once, in `delay` seconds."""
        ...


@unique
class CloseReason(Enum):
    """Why a request is closed."""

    FINISHED = "finished"
    ABORTED = "aborted"
    """By its transport, or it ended without a token."""
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    WORKER_UNAVAILABLE = "worker_unavailable"
    """The only worker that may serve it does not serve."""
    WORKER_LOST = "worker_lost"
    """Its worker was lost after it had begun, or is the only one that may serve it."""
    POLICY_FAILED = "policy_failed"
    """The policy refused it, or is called no more."""


@dataclass(frozen=True)
class New:
    """The policy does not know it: it was not submitted yet, or is between two attempts."""


@dataclass(frozen=True)
class Queued:
    """It waits in the policy, `since` this time of the clock."""

    since: float


@dataclass(frozen=True, eq=False)
class BoundToWorker:
    """The policy has chosen `worker` at time `at`; nothing of an answer has come.

    One object per binding, so that a transport sees that an earlier one is over.
    """

    worker: int
    at: float = 0.0


@dataclass(frozen=True)
class Running:
    """Something of an answer by `worker` has come: it is moved no more."""

    worker: int


@dataclass(frozen=True)
class Aborting:
    """Its client has left, and it occupies `worker` until the worker reports its end."""

    worker: int


@dataclass(frozen=True)
class RequestClosed:
    """It ended; `message` says more where a client is to be told."""

    reason: CloseReason
    message: str = ""


RequestStatus: TypeAlias = New | Queued | BoundToWorker | Running | Aborting | RequestClosed
NEW = New()
TRANSITIONS: Mapping[type[RequestStatus], tuple[type[RequestStatus], ...]] = {
    New: (Queued, RequestClosed),
    Queued: (New, BoundToWorker, RequestClosed),
    BoundToWorker: (New, Queued, Running, Aborting, RequestClosed),
    Running: (Aborting, RequestClosed),
    Aborting: (RequestClosed,),
    RequestClosed: (),
}
"""States that may follow each; every other transition is a mistake of the dispatcher."""


class DispatchedRequest:
    """A request; a transport derives from it to hear what is decided.

    Its methods are called after the books are in order; they must not call the dispatcher.

    Args:
        request_id: the policy's name of it, unique among requests that have not ended.
        size: prompt tokens, at least 1.
        required_worker: the only worker that may ever serve it; None: any.
        blocks: hashes of its prompt's blocks, as of `prefix_index`; none where it is not read.

    Attributes:
        status: see the types above; written by the dispatcher.
        pinned_worker: the only worker that the policy may bind it to now; None: any.
        tokens: made so far, as reported.
    """

    def __init__(
        self,
        request_id: RequestId,
        size: int,
        required_worker: int | None = None,
        blocks: Sequence[int] = (),
    ) -> None:
        self.request_id = request_id
        self.blocks = blocks
        self.size = size
        self.required_worker = self.pinned_worker = required_worker
        self.status: RequestStatus = NEW
        self.tokens = 0

    @property
    def worker(self) -> int | None:
        """The worker that has it; None: none."""
        match self.status:
            case BoundToWorker(worker) | Running(worker) | Aborting(worker):
                return worker
        return None

    def on_bound(self, bound: BoundToWorker) -> None:
        """It is to be sent to a worker."""

    def on_requeued(self) -> None:
        """Its worker was lost before anything of an answer came: the binding is over."""

    def on_closed(self, reason: CloseReason) -> None:
        """It was closed, though its transport neither finished nor aborted it."""


@dataclass
class WorkerView:
    """What is known of one worker.

    Attributes:
        name: by which several front ends mean the same worker; empty: it was removed.
        capacity: what it takes at once; None: as the policy was made with.
        state: as last reported to the policy.
        health: state found by health checks.
        manually_drained: whether an operator has drained it.
        requests: bound to it or running on it, by id.
        load: their tokens, prompts and generated ones.
        report_failures: load reports that could not be read.
        last_answer_at: clock's time at which tokens came from it last.
    """

    name: str = ""
    capacity: Capacity | None = None
    state: WorkerState = WorkerState.SERVING
    health: WorkerState = WorkerState.SERVING
    manually_drained: bool = False
    requests: dict[RequestId, DispatchedRequest] = field(default_factory=dict)
    load: int = 0
    report_failures: int = 0
    last_answer_at: float = float("-inf")

    @property
    def target_state(self) -> WorkerState:
        """State to report to the policy: that of health checks, unless drained by hand.

        A lost worker that does not serve yet stays lost: it has nothing to drain.
        """
        drains = self.manually_drained and self.health is WorkerState.SERVING
        target = WorkerState.DRAINING if drains else self.health
        nothing = target is WorkerState.DRAINING and self.state is WorkerState.LOST
        return WorkerState.LOST if nothing else target

    def takes(self, size: int) -> bool:
        """Whether its KV cache is large enough for a prompt of `size` tokens, as far as known."""
        kv_tokens = None if self.capacity is None else self.capacity.kv_tokens
        return kv_tokens is None or size <= kv_tokens

    def add_request(self, request: DispatchedRequest) -> None:
        """A request was bound to this worker."""
        self.requests[request.request_id] = request
        self.load += request.size + request.tokens

    def remove_request(self, request: DispatchedRequest) -> None:
        """A request left this worker."""
        del self.requests[request.request_id]
        self.load -= request.size + request.tokens


class InvalidAssignment(PolicyError):
    """A policy bound a request that does not wait, or to a worker that may not serve it."""


@unique
class FailureAction(Enum):
    """What follows from a failure of the policy."""

    SKIP_EVENT = "skip_event"
    """Leave this event or assignment out; a request that was refused at its arrival is closed."""
    STOP_POLICY = "stop_policy"
    """Call the policy no more, and close every request: its transport goes on without one."""


FailureStrategy: TypeAlias = Callable[[Exception], FailureAction]
"""Called with what a policy raised, or with an `InvalidAssignment`; logs it, and decides."""
PolicyEvent: TypeAlias = Callable[[RoutingPolicy], Decision]


class RequestDispatcher:
    """Holds requests until the policy binds them, and reports to it what becomes of them.

    Tokens and ends of one turn of the event loop are reported together. Where those of a step come
    in several turns, the policy waits for the rest, and is asked to decide without it after
    `STEP_TIMEOUT_SECONDS`.

    Args:
        policy: not called by anything else from now on.
        workers: number of workers that it has; all serve.
        clock: time and timers.
        on_failure: decides what follows from a failure of the policy.
        max_queued: requests that may wait; None: no limit.
        queue_timeout: seconds that a request may wait; None: no limit.
        observe: called with the seconds that each call of the policy took.

    Attributes:
        clock: as above.
        policy: for inspection; None once it is called no more.
        workers: what is known of each, by number.
        policy_errors: events that the policy raised at, and assignments that were invalid.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        workers: int,
        clock: Clock,
        on_failure: FailureStrategy,
        max_queued: int | None = None,
        queue_timeout: float | None = None,
        observe: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.policy: RoutingPolicy | None = policy
        self.clock = clock
        self._on_failure, self._observe = on_failure, observe
        self._max_queued, self._queue_timeout = max_queued, queue_timeout
        self._requests: dict[RequestId, DispatchedRequest] = {}
        self._queued: dict[RequestId, Queued] = {}
        self._pending_tokens: dict[RequestId, int] = {}
        self._pending_ends: list[RequestId] = []
        self._pending_aborts: list[RequestId] = []
        self._flush_handle: Timer | None = None
        self._step_timer: Timer | None = None
        self._queue_timer: Timer | None = None
        self._removed: set[int] = set()
        self._prefixes = PrefixIndex()
        self.workers = [WorkerView(name=str(number)) for number in range(workers)]
        self.policy_errors = 0

    @property
    def requests(self) -> tuple[DispatchedRequest, ...]:
        """Requests that wait, or that a worker has."""
        return tuple(self._requests.values())

    @property
    def queued(self) -> int:
        """Number of requests that wait."""
        return len(self._queued)

    # What a transport reports of requests.

    def submit(self, request: DispatchedRequest) -> None:
        """A request has arrived; afterwards it is bound, queued, or closed with a reason.

        Raises `RequestError` where one of that id has not ended, or it was submitted before.
        """
        if not isinstance(request.status, New) or request.request_id in self._requests:
            raise RequestError(f"request {request.request_id!r} has arrived already")
        # Ends that wait free slots: the policy has to know them before it decides on an arrival.
        self._flush()
        self._arrive(request)
        most = self._max_queued
        if isinstance(request.status, Queued) and most is not None and self.queued > most:
            message = f"{most} requests wait for a worker already"
            self._give_up(request, RequestClosed(CloseReason.QUEUE_FULL, message))

    def start(self, request: DispatchedRequest, bound: BoundToWorker) -> bool:
        """Something of an answer came by this binding; False: the binding is over.

        It is reported as a first token, by which a policy learns that the request moves no more.
        """
        if request.status is not bound:
            return False
        self._set_status(request, Running(bound.worker))
        self._add_tokens(request, self.workers[bound.worker], 1)
        return True

    def report_tokens(self, request: DispatchedRequest, total: int) -> None:
        """A request that has begun has made so many tokens in all."""
        match request.status:
            case Running(worker) | Aborting(worker):
                view = self.workers[worker]
                view.last_answer_at = self.clock.time()
                if total > request.tokens:
                    self._add_tokens(request, view, total - request.tokens)

    def finish(self, request: DispatchedRequest) -> None:
        """Its worker is done with it; without a token, or aborted before, it counts as aborted."""
        match request.status:
            case Running():
                self._set_status(request, RequestClosed(CloseReason.FINISHED))
                self._pending_ends.append(request.request_id)
                self._schedule_flush()
            case BoundToWorker() | Aborting():
                self._set_status(request, RequestClosed(CloseReason.ABORTED))
                self._pending_aborts.append(request.request_id)
                self._schedule_flush()
            case _:
                self.abort(request)

    def begin_abort(self, request: DispatchedRequest) -> None:
        """Its worker was told to give it up, and has it until `finish`."""
        match request.status:
            case BoundToWorker(worker) | Running(worker):
                self._set_status(request, Aborting(worker))

    def abort(self, request: DispatchedRequest) -> None:
        """It was given up, and no worker has it any more; does nothing to one that is closed."""
        match request.status:
            case New():
                self._close(request, RequestClosed(CloseReason.ABORTED))
            case Queued() | BoundToWorker() | Running() | Aborting():
                self._withdraw(request, RequestClosed(CloseReason.ABORTED))

    def retry(self, request: DispatchedRequest, bound: BoundToWorker) -> None:
        """An attempt by this binding failed: have the least loaded other worker serve it."""
        if request.status is not bound:
            return  # the worker was lost meanwhile, and the policy has the request again
        self._withdraw(request, NEW)
        self._pin(request, without=bound.worker)
        # Ends first, as in `submit`.
        self._flush()
        self._arrive(request)

    # What a transport reports of workers.

    def add_worker(
        self, capacity: Capacity, health: WorkerState = WorkerState.SERVING, name: str = ""
    ) -> int:
        """Add a worker that serves, or is lost until a health check finds it; returns its number.

        Numbers of removed workers are used again; `name` is its number where there is none. Raises
        `WorkerError` where the policy does not take it, or for a worker that drains.
        """
        if health is WorkerState.DRAINING:
            raise WorkerError("a new worker has nothing to drain")
        self._flush()
        worker = min(self._removed, default=len(self.workers))
        view = WorkerView(name or str(worker), capacity, state=health, health=health)
        decision = self._ask(lambda policy: policy.on_worker_change(_introduction(worker, view)))
        if decision is None:
            raise WorkerError(f"the policy does not take worker {worker}")
        self.workers[worker : worker + 1] = [view]
        self._removed.discard(worker)
        self._apply(decision)
        return worker

    def set_capacity(self, worker: int, capacity: Capacity) -> None:
        """A worker takes another number of requests from now on."""
        self._member(worker).capacity = capacity
        change = WorkerChange(worker=worker, capacity=capacity)
        self._flush()
        self._tell(lambda policy: policy.on_worker_change(change))

    def remove_worker(self, worker: int) -> None:
        """Remove a worker as if it were lost; drain it before, to let its requests end."""
        self.set_health(worker, WorkerState.LOST)
        self._removed.add(worker)
        view = self.workers[worker]
        view.name, view.capacity = "", None
        self._tell(lambda policy: policy.on_worker_change(_introduction(worker, view)))

    def set_health(self, worker: int, state: WorkerState) -> None:
        """A health check found a worker in this state."""
        self._member(worker).health = state
        self._update_worker(worker)

    def drain_worker(self, worker: int) -> None:
        """Let a worker keep its requests and get no more, until it is resumed."""
        self._member(worker).manually_drained = True
        self._update_worker(worker)

    def resume_worker(self, worker: int) -> None:
        """Let a drained worker get requests again, if it is healthy."""
        self._member(worker).manually_drained = False
        self._update_worker(worker)

    def report_worker(self, worker: int, report: WorkerReport) -> None:
        """Hand a load report of a worker to the policy; reports of lost workers are dropped."""
        if self._member(worker).state is WorkerState.LOST:
            return
        self._flush()  # first the tokens: the report is compared with what the policy knows now
        change = WorkerChange(worker=worker, report=report)
        self._tell(lambda policy: policy.on_worker_change(change))

    # Policies that come and go, and those that answer later than they are asked.

    def replace_policy(self, policy: RoutingPolicy) -> None:
        """Have another policy decide from now on.

        It is told of all workers, of the requests that they have, and then of those that wait.
        Requests that wait for a worker that does not serve are closed.

        Args:
            policy: knows of no requests yet, and has `on_running`; it may be the present one.
        """
        if policy is not self.policy:
            self._drop_policy()
        self.policy = policy
        for worker, view in enumerate(self.workers):
            change = _introduction(worker, view)
            self._tell(lambda policy, change=change: policy.on_worker_change(change))  # type: ignore[misc]
        for view in list(self.workers):
            for request in list(view.requests.values()):
                self._tell_running(request)
        for request in _with_status(self._requests, Queued):
            if isinstance(request.status, Queued):  # else the policy failed at one before it
                self._tell_arrival(request, CloseReason.POLICY_FAILED)
        self._arm_queue_timer()

    def apply_decision(self, decision: Decision) -> None:
        """Do what the policy has decided since it was asked; nothing once it is called no more."""
        if self.policy is not None:
            # A request that is lost here may arrive again: ends first, as in `submit`.
            self._flush()
            self._apply(decision)

    def fail_policy(self, error: Exception) -> None:
        """The policy has failed while nobody was asking it."""
        if self.policy is not None:
            self._policy_failed(error)

    def close(self) -> None:
        """Let the policy go and close all requests, without a call of their methods."""
        self._drop_policy()
        for request in self.requests:
            self._close(request, RequestClosed(CloseReason.ABORTED))

    # States of requests.

    def _set_status(self, request: DispatchedRequest, status: RequestStatus) -> None:
        """Make a transition, and keep the books that follow from it."""
        name, before, left = request.request_id, request.status, request.worker
        if type(status) not in TRANSITIONS[type(before)]:
            raise RequestError(f"request {name!r} cannot become {status}: it is {before}")
        request.status = status
        self._queued.pop(name, None)
        if left is not None and request.worker != left:
            self.workers[left].remove_request(request)
        match status:
            case Queued():
                self._requests[name], self._queued[name] = request, status
                self._arm_queue_timer()
            case BoundToWorker(worker):
                self.workers[worker].add_request(request)
            case New() | RequestClosed():
                self._requests.pop(name, None)

    def _close(self, request: DispatchedRequest, status: RequestClosed | New) -> None:
        """It is gone, and the policy will not hear of its tokens any more."""
        self._set_status(request, status)
        self._pending_tokens.pop(request.request_id, None)

    def _cancel(self, request: DispatchedRequest, closed: RequestClosed) -> None:
        """Close a request that the policy does not know."""
        self._close(request, closed)
        request.on_closed(closed.reason)

    def _withdraw(self, request: DispatchedRequest, status: RequestClosed | New) -> None:
        """Take a request from the policy."""
        self._close(request, status)
        self._tell_abort(request.request_id)

    def _give_up(self, request: DispatchedRequest, closed: RequestClosed) -> None:
        """Take a request from the policy, though its transport still wants it."""
        self._withdraw(request, closed)
        request.on_closed(closed.reason)

    def _arrive(
        self, request: DispatchedRequest, refused: CloseReason = CloseReason.POLICY_FAILED
    ) -> None:
        pin = request.pinned_worker
        if self.policy is None:
            self._cancel(request, RequestClosed(CloseReason.POLICY_FAILED))
            return
        if pin is None or self._serves(pin):
            self._set_status(request, Queued(self.clock.time()))
        self._tell_arrival(request, refused)

    def _tell_arrival(self, request: DispatchedRequest, refused: CloseReason) -> None:
        pin = request.pinned_worker
        if pin is not None and not self._serves(pin):
            message = f"worker {pin}, which was asked for, does not serve"
            self._cancel(request, RequestClosed(CloseReason.WORKER_UNAVAILABLE, message))
            return
        hits = self._hits(request)
        arrival = Request(id=request.request_id, size=request.size, worker=pin, hits=hits)
        decision = self._ask(lambda policy: policy.on_arrival(arrival))
        if decision is not None:
            self._apply(decision)
        elif isinstance(request.status, Queued):
            self._cancel(request, RequestClosed(refused))

    def _tell_running(self, request: DispatchedRequest) -> None:
        """Tell a new policy of a request that a worker has."""
        worker, pin = request.worker, request.pinned_worker
        if worker is None:  # the policy failed at one before it
            return
        running = Request(id=request.request_id, size=request.size, worker=pin)
        self._tell(lambda policy: policy.on_running(running, worker, request.tokens))

    def _hits(self, request: DispatchedRequest) -> list[int] | None:
        """Prompt tokens that each worker was sent before, as far as is remembered."""
        if not request.blocks:
            return None
        # What follows the last whole block counts as one: how long it is is not known.
        matches = self._prefixes.matches(request.blocks, len(self.workers))
        return [request.size * blocks // (len(request.blocks) + 1) for blocks in matches]

    def _arm_queue_timer(self) -> None:
        """Wait for the oldest queued request to be overdue; a timer that is early waits again."""
        if self._queue_timeout is not None and self._queue_timer is None and self._queued:
            oldest = next(iter(self._queued.values()))
            delay = oldest.since + self._queue_timeout - self.clock.time()
            self._queue_timer = self.clock.call_later(max(0.0, delay), self._expire)

    def _expire(self) -> None:
        assert self._queue_timeout is not None
        self._queue_timer = None
        self._flush()  # an end that waits may free a slot in time
        now = self.clock.time()
        for name, queued in list(self._queued.items()):
            if now < queued.since + self._queue_timeout:
                break
            if self._queued.get(name) is queued:  # else bound when the one before it left
                closed = RequestClosed(CloseReason.QUEUE_TIMEOUT)
                self._give_up(self._requests[name], closed)
        self._arm_queue_timer()

    # Tokens and ends.

    def _add_tokens(self, request: DispatchedRequest, view: WorkerView, tokens: int) -> None:
        request.tokens += tokens
        view.load += tokens
        name = request.request_id
        self._pending_tokens[name] = self._pending_tokens.get(name, 0) + tokens
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if self._flush_handle is None:
            # At the end of this turn of the loop: one event costs less than many.
            self._flush_handle = self.clock.call_soon(self._flush)

    def _flush(self) -> None:
        """Report the tokens and ends of this turn of the loop to the policy, as one event."""
        if self._flush_handle is None:
            return
        self._flush_handle.cancel()
        # Emptied before the calls: what their decisions bring belongs to the next event.
        counts, ends, aborts = self._take_pending()
        if counts or ends:
            self._tell(lambda policy: policy.on_tokens(counts, ends))
        for name in aborts:
            self._tell_abort(name)

    def _take_pending(self) -> tuple[dict[RequestId, int], list[RequestId], list[RequestId]]:
        pending = self._pending_tokens, self._pending_ends, self._pending_aborts
        self._pending_tokens, self._pending_ends, self._pending_aborts = {}, [], []
        self._flush_handle = None
        return pending

    # The policy.

    def _ask(self, event: PolicyEvent) -> Decision | None:
        """Call the policy; None where it failed, or is called no more."""
        if self.policy is None:
            return None
        began = perf_counter()
        try:
            decision = event(self.policy)
            if not isinstance(decision, Decision):
                raise PolicyError(f"a policy must return a Decision, got {decision!r}")
        except Exception as error:
            self._policy_failed(error)
            return None
        self._observe(perf_counter() - began)
        self._wait_for_rest(decision.due)
        return decision

    def _tell(self, event: PolicyEvent) -> None:
        decision = self._ask(event)
        if decision is not None:
            self._apply(decision)

    def _tell_abort(self, request_id: RequestId) -> None:
        self._tell(lambda policy: policy.on_abort(request_id))

    def _wait_for_rest(self, due: bool) -> None:
        """Have the policy decide without the rest of a step, if that does not come in time."""
        if due and self._step_timer is None and hasattr(self.policy, "decide"):
            self._step_timer = self.clock.call_later(STEP_TIMEOUT_SECONDS, self._decide)
        elif not due and self._step_timer is not None:
            self._step_timer.cancel()
            self._step_timer = None

    def _decide(self) -> None:
        self._step_timer = None
        self._flush()
        self._tell(lambda policy: policy.decide())

    def _policy_failed(self, error: Exception) -> None:
        self.policy_errors += 1
        if self._on_failure(error) is FailureAction.STOP_POLICY:
            self._drop_policy()
            for request in self.requests:
                self._cancel(request, RequestClosed(CloseReason.POLICY_FAILED))

    def _drop_policy(self) -> None:
        # One that is somewhere else has to be left there.
        leave = getattr(self.policy, "close", None)
        self.policy = None
        if leave is not None:
            leave()
        for timer in (self._flush_handle, self._step_timer, self._queue_timer):
            if timer is not None:
                timer.cancel()
        self._step_timer = self._queue_timer = None
        self._take_pending()  # what it would be told of is in the books

    def _apply(self, decision: Decision, lost_worker: WorkerView | None = None) -> None:
        movable = self._drop_lost(decision)
        # Before the assignments: in the same decision the policy may bind to another worker what
        # the lost one had, and only what is queued can be bound.
        if lost_worker is not None:
            self._empty_worker(lost_worker)
        self._assign(decision)
        for request in movable:
            self._pin(request)
            self._arrive(request, CloseReason.WORKER_LOST)

    def _drop_lost(self, decision: Decision) -> list[DispatchedRequest]:
        """Close requests that the policy lost; returns those that another worker may still take."""
        movable: list[DispatchedRequest] = []
        for name in decision.lost:
            request = self._requests.get(name)
            if request is None:
                continue
            begun = isinstance(request.status, Running | Aborting)
            if begun or request.required_worker is not None:
                self._cancel(request, RequestClosed(CloseReason.WORKER_LOST))
                continue
            bound = isinstance(request.status, BoundToWorker)
            self._close(request, NEW)
            movable.append(request)
            if bound:
                request.on_requeued()
        return movable

    def _assign(self, decision: Decision) -> None:
        now = self.clock.time()
        for assignment in decision.assignments:
            if self.policy is None:
                return  # an assignment before this one was invalid
            request, worker = self._requests.get(assignment.request), assignment.worker
            if (
                request is None
                or not isinstance(request.status, Queued)
                or not self._serves(worker)
                or request.pinned_worker not in (None, worker)
            ):
                self._policy_failed(InvalidAssignment(f"the policy cannot bind so: {assignment}"))
                continue
            bound = BoundToWorker(worker, now)
            self._set_status(request, bound)
            self._prefixes.insert(request.blocks, worker)
            request.on_bound(bound)

    # Workers.

    def _serves(self, worker: int) -> bool:
        there = 0 <= worker < len(self.workers)
        return there and self.workers[worker].state is WorkerState.SERVING

    def _member(self, worker: int) -> WorkerView:
        if not 0 <= worker < len(self.workers) or worker in self._removed:
            raise WorkerError(f"there is no worker {worker}")
        return self.workers[worker]

    def _update_worker(self, worker: int) -> None:
        """Report a changed worker state to the policy, and move the requests that it affects."""
        view = self.workers[worker]
        state = view.target_state
        if state is view.state:
            return
        # Tokens first: the policy must know which requests have begun, or it would move them.
        self._flush()
        lost = state is WorkerState.LOST
        if lost:
            self._prefixes.forget(worker)
            # Else the policy would bind again what only waits for its worker to end it
            for request in _with_status(view.requests, Aborting):
                self.abort(request)
        view.state = state
        decision = self._ask(
            lambda policy: policy.on_worker_change(WorkerChange(worker=worker, state=state))
        )
        self._apply(decision or Decision(), view if lost else None)
        if state is not WorkerState.SERVING:
            self._move_pinned(worker)

    def _empty_worker(self, view: WorkerView) -> None:
        """Requeue what a lost worker had not begun: the policy holds it again; close the rest."""
        for request in _with_status(view.requests, BoundToWorker):
            self._set_status(request, Queued(self.clock.time()))
            request.on_requeued()
        for request in _with_status(view.requests, Running):  # a policy that failed left it out
            self._give_up(request, RequestClosed(CloseReason.WORKER_LOST))

    def _move_pinned(self, worker: int) -> None:
        """Let requests that were to be retried there, and there only, go elsewhere."""
        for request in _with_status(self._requests, Queued):
            if request.pinned_worker != worker or request.required_worker is not None:
                continue
            if isinstance(request.status, Queued):  # the policy may have failed at one before it
                self._withdraw(request, NEW)
                self._pin(request)
                self._arrive(request, CloseReason.WORKER_LOST)

    def _pin(self, request: DispatchedRequest, without: int | None = None) -> None:
        """Choose the worker for a further attempt: the protocol has no word for "not this one"."""
        request.pinned_worker = request.required_worker
        if request.required_worker is None:
            request.pinned_worker = least_loaded(self.workers, without, request.size)


def _introduction(worker: int, view: WorkerView) -> WorkerChange:
    """What a policy is told of a worker that it does not know."""
    return WorkerChange(worker=worker, name=view.name, state=view.state, capacity=view.capacity)


def _with_status(
    requests: Mapping[RequestId, DispatchedRequest], status: type[RequestStatus]
) -> list[DispatchedRequest]:
    return [one for one in requests.values() if isinstance(one.status, status)]


@dataclass(frozen=True)
class LoadImbalance:
    """How even the load of the workers is that are not lost.

    Attributes:
        imbalance: G x max - sum, in tokens.
        idle: the part of that of G x max, 0 to 1; 0 where there is no load.
    """

    imbalance: int
    idle: float


def load_imbalance(workers: Sequence[WorkerView]) -> LoadImbalance:
    """As `docs/design/request-balance.md` has it."""
    loads = [one.load for one in workers if one.state is not WorkerState.LOST]
    most = max(loads, default=0) * len(loads)
    return LoadImbalance(most - sum(loads), (most - sum(loads)) / most if most else 0.0)


def least_loaded(
    workers: Sequence[WorkerView], without: int | None = None, size: int = 0
) -> int | None:
    """The serving worker with the fewest requests, other than `without`; None: there is none.

    Workers with a KV cache too small for `size` tokens are left out.
    """
    candidates = [
        (len(one.requests), one.load, number)
        for number, one in enumerate(workers)
        if one.state is WorkerState.SERVING and number != without and one.takes(size)
    ]
    return min(candidates)[2] if candidates else None
