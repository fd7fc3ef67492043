"""The only caller of the routing policy, and the only writer of request states.

All methods are called on the event loop's thread and return at once. Tokens of one turn of the loop
are reported together. Where those of a step come in several turns, the policy waits for the rest,
and is asked to decide without it if that takes too long.
"""

import asyncio
import logging
from collections.abc import Callable
from time import perf_counter

from equipoise.balancer.requests.policy import (
    STEP_TIMEOUT_SECONDS,
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
    RETRY_AFTER,
    ErrorResponse,
    RequestOutcome,
    RequestRefused,
    overloaded,
)
from equipoise.serve.request_state import (
    CLOSED,
    QUEUED,
    BoundToWorker,
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
        policy: must not be called by anything else from now on.
        workers: how many it has.
        max_queued: requests that may wait in it.
        observe: called with the seconds that each decision took.

    Attributes:
        workers: what is known of each.
        queued: requests that wait in the policy.
        policy_errors: events that the policy raised at.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        workers: int,
        max_queued: int,
        observe: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._policy = policy
        self._max_queued = max_queued
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._requests: dict[int, RequestState] = {}
        self._pending_tokens: dict[RequestId, int] = {}
        self._pending_ends: list[RequestId] = []
        self._flushing = False
        self._step_timer: asyncio.TimerHandle | None = None
        self._next = 0
        self.workers = tuple(WorkerView() for _ in range(workers))
        self.queued = 0
        self.policy_errors = 0

    @property
    def requests(self) -> tuple[RequestState, ...]:
        """Those that are not gone."""
        return tuple(self._requests.values())

    def submit(self, size: int, wanted: int | None = None) -> RequestState:
        """A request has arrived; it is bound at once, or waits.

        Raises: RequestRefused: 429 where too many wait, 503 where the required
            worker does not serve.
        """
        state = RequestState(self._next, size, wanted)
        self._next += 1
        # Ends that wait free slots: the policy has to know them before it decides on an arrival.
        self._flush()
        self._enqueue(state)
        if isinstance(state.status, Queued) and self.queued > self._max_queued:
            self.abort(state)
            raise overloaded(f"{self._max_queued} requests wait for a worker already")
        return state

    def start_answer(self, state: RequestState, bound: BoundToWorker) -> bool:
        """Something of its answer is about to be passed on; False: that binding is over."""
        if state.status is not bound:
            return False
        state.status = Running(bound.worker)
        self._add_tokens(state, 1)  # it can be moved no more, which a policy learns from a token
        return True

    def report_tokens(self, state: RequestState, tokens: int) -> None:
        """It has made so many tokens since it was bound."""
        if isinstance(state.status, Running):
            self.workers[state.status.worker].last_answer_at = self._loop.time()
            if tokens > state.reported_tokens:
                self._add_tokens(state, tokens - state.reported_tokens)

    def finish(self, state: RequestState, bound: BoundToWorker, tokens: int) -> None:
        """It ended well, with so many tokens in all."""
        if tokens:
            self.start_answer(state, bound)
        if not isinstance(state.status, Running):
            self.abort(state)  # to a policy, what made no token was given up
            return
        self.report_tokens(state, tokens)
        self._release(state)
        state.status = CLOSED
        self._pending_ends.append(state.request_id)
        self._schedule()

    def abort(self, state: RequestState) -> None:
        """It was given up, wherever it is; again and again is no harm."""
        if state.status is CLOSED:
            return
        self._release(state)
        state.status = CLOSED
        self._pending_tokens.pop(state.request_id, None)
        self._apply(self._call_policy(lambda: self._policy.on_abort(state.request_id)))

    def retry(self, state: RequestState, bound: BoundToWorker) -> None:
        """Its attempt came to nothing: it is to be bound to another worker.

        Raises: RequestRefused (503) where its client wants that worker only, and it does not serve.
        """
        if state.status is not bound:
            return  # the worker was lost meanwhile, and the policy has it again
        self.abort(state)
        state.reported_tokens = 0
        state.pinned_worker = state.required_worker
        if state.required_worker is None:
            state.pinned_worker = least_loaded(self.workers, bound.worker, state.size)
        # Ends first, as in `submit`.
        self._flush()
        self._enqueue(state)

    def set_health(self, worker: int, state: WorkerState) -> None:
        """A worker was found to serve, or not to."""
        self.workers[worker].health = state
        self._update_worker(worker)

    def drain_worker(self, worker: int) -> None:
        """It keeps what it has, and gets nothing more until it is taken back."""
        self.workers[worker].manually_drained = True
        self._update_worker(worker)

    def resume_worker(self, worker: int) -> None:
        """It gets requests again, if it is well."""
        self.workers[worker].manually_drained = False
        self._update_worker(worker)

    def _update_worker(self, worker: int) -> None:
        """Report a changed worker state to the policy, and move the requests that it affects."""
        view = self.workers[worker]
        state = view.target_state
        if state is view.state:
            return
        # Tokens first: the policy must know which requests have begun, or it would move them.
        self._flush()
        view.state = state
        decision = self._call_policy(
            lambda: self._policy.on_worker_change(WorkerChange(worker=worker, state=state))
        )
        free = self._drop_lost(decision)
        # Before the assignments: in the same decision the policy may bind to another worker what
        # the lost one had, and only what is queued can be bound.
        if state is WorkerState.LOST:
            self._unbind(view)
        self._assign(decision)
        if state is not WorkerState.SERVING:
            for request in [*free, *self._pinned(worker)]:
                self._move(request, worker)

    def report_worker(self, worker: int, report: WorkerReport) -> None:
        """Hand a load report of a worker to the policy; reports of lost workers are dropped."""
        if self.workers[worker].state is WorkerState.LOST:
            return
        self._flush()  # first the tokens: the report is compared with what the policy knows now
        change = WorkerChange(worker=worker, report=report)
        self._apply(self._call_policy(lambda: self._policy.on_worker_change(change)))

    def _move(self, state: RequestState, away: int) -> None:
        """Nothing of it has begun: any worker but `away` may have it."""
        self.abort(state)
        state.pinned_worker = least_loaded(self.workers, away, state.size)
        try:
            self._enqueue(state)
        except Exception:  # logged already; one request fails, the proxy goes on
            state.cancel(CancelReason.WORKER_LOST)

    def _pinned(self, worker: int) -> list[RequestState]:
        """What was to be tried again there, and there only: it may go elsewhere."""
        return [
            one
            for one in self.requests
            if one.pinned_worker == worker
            and one.required_worker is None
            and isinstance(one.status, Queued)
        ]

    def _unbind(self, view: WorkerView) -> None:
        """The policy holds again what its worker, which is lost, had not begun."""
        for state in [
            one for one in view.requests.values() if isinstance(one.status, BoundToWorker)
        ]:
            view.remove_request(state)
            self.queued += 1
            state.unbind()

    def _enqueue(self, state: RequestState) -> None:
        pin = state.pinned_worker
        if pin is not None and self.workers[pin].state is not WorkerState.SERVING:
            message = f"worker {pin}, which was asked for, does not serve"
            raise RequestRefused(
                ErrorResponse(503, RequestOutcome.WORKERS_FAILED, message, "no_worker", RETRY_AFTER)
            )
        state.status = QUEUED
        self.queued += 1
        self._requests[state.request_id] = state
        request = Request(id=state.request_id, size=state.size, worker=pin)
        try:
            self._apply(self._call_policy(lambda: self._policy.on_arrival(request), silent=False))
        except Exception:
            self._release(state)
            state.status = CLOSED
            raise

    def _release(self, state: RequestState) -> None:
        """From where it is: the policy, or a worker."""
        match state.status:
            case Queued():
                self.queued -= 1
            case BoundToWorker(worker) | Running(worker):
                self.workers[worker].remove_request(state)
        self._requests.pop(state.request_id, None)

    def _add_tokens(self, state: RequestState, tokens: int) -> None:
        assert isinstance(state.status, Running)
        state.reported_tokens += tokens
        self.workers[state.status.worker].load += tokens
        self._pending_tokens[state.request_id] = (
            self._pending_tokens.get(state.request_id, 0) + tokens
        )
        self._schedule()

    def _schedule(self) -> None:
        if not self._flushing:
            self._flushing = True
            # At the end of this turn of the loop: one event costs less than many.
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Report the tokens and ends of this turn of the loop to the policy, as one event."""
        self._flushing = False
        if not self._pending_tokens and not self._pending_ends:
            return
        # Emptied before the call: what its decision brings belongs to the next event.
        counts, ends = self._pending_tokens, self._pending_ends
        self._pending_tokens, self._pending_ends = {}, []
        self._apply(self._call_policy(lambda: self._policy.on_tokens(counts, ends)))

    def _call_policy(self, event: Callable[[], Decision], silent: bool = True) -> Decision:
        began = perf_counter()
        try:
            decision = event()
        except Exception:
            self.policy_errors += 1
            LOG.exception("the policy failed at an event")
            if not silent:
                raise
            return NO_DECISION
        self._observe(perf_counter() - began)
        self._wait_for_rest(decision.due)
        return decision

    def _wait_for_rest(self, due: bool) -> None:
        """Have the policy decide without the rest of a step, if that does not come in time."""
        if due and self._step_timer is None and hasattr(self._policy, "decide"):
            self._step_timer = self._loop.call_later(STEP_TIMEOUT_SECONDS, self._decide)
        elif not due and self._step_timer is not None:
            self._step_timer.cancel()
            self._step_timer = None

    def _decide(self) -> None:
        self._step_timer = None
        self._flush()
        self._apply(self._call_policy(self._policy.decide))

    def _apply(self, decision: Decision) -> None:
        if decision.lost:
            self._drop_lost(decision)
        if decision.assignments:
            self._assign(decision)

    def _drop_lost(self, decision: Decision) -> list[RequestState]:
        """Close requests that the policy lost; returns those that another worker may still take."""
        free: list[RequestState] = []
        for lost_id in decision.lost:
            state = self._requests.get(_number(lost_id))
            if state is None:
                continue
            movable = state.required_worker is None and not isinstance(state.status, Running)
            was_bound = isinstance(state.status, BoundToWorker)
            self._release(state)
            state.status = CLOSED
            if movable:
                free.append(state)
            if was_bound or not movable:
                state.cancel(
                    CancelReason.LOST_BEFORE_FIRST_TOKEN if movable else CancelReason.WORKER_LOST
                )
        return free

    def _assign(self, decision: Decision) -> None:
        now = self._loop.time()
        for assignment in decision.assignments:
            state = self._requests.get(_number(assignment.request))
            there = 0 <= assignment.worker < len(self.workers)
            if state is None or not isinstance(state.status, Queued) or not there:
                # A policy may be a user's own: its mistake must cost a log line, not the proxy.
                self.policy_errors += 1
                LOG.error("the policy cannot bind so: %s", assignment)
                continue
            self.queued -= 1
            self.workers[assignment.worker].add_request(state)
            state.bind(assignment.worker, now)


def _number(request: object) -> int:
    assert isinstance(request, int)
    return request
