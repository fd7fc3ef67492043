"""Implements the protocol `RoutingPolicy` with the native policies."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf, nan

from equipoise import _native
from equipoise.balancer.requests.policy import (
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
from equipoise.balancer.requests.policy_settings import RoutingPolicySettings
from equipoise.hal.arguments import check_type, real_number, short_text, whole_number
from equipoise.hal.errors import PolicyError, RequestError, WorkerError

UNLIMITED = 1 << 59
"""A capacity that no load reaches; sums of a few still fit in int64."""
MAX_TOKENS = 2**31 - 1
"""Most tokens of a request, or of a step of it, that the native core takes."""


class RequestRouter:
    """Decides which data-parallel worker serves a request, and when: one front end's view.

        router = RequestRouter(RoutingPolicySettings(name="fit"), [Capacity(slots=128)] * 4)
        for assignment in router.on_arrival(Request(id="a", size=900)).assignments:
            send(assignment.request, to=assignment.worker)

    Tell it what happens; each method returns the `Decision` that follows: `assignments`, the
    requests to send now, and `lost`, those that a lost worker had begun. Where it is `due`, call
    `decide` if no event comes for `STEP_TIMEOUT_SECONDS`. A request that is in no
    assignment waits in the router. Decisions are made by the native core, as in `equipoise
    simulate`. Not to be called by two threads at once.

    The tokens of a step may be told all at once, by rank, or one by one: decisions wait until all
    requests that made a token in the step before have made another, or left, or until one makes a
    second: the others are stuck then, or wait to be computed again. `lockstep=False` is for workers
    that do not wait for each other.

    Args:
        settings: which policy, and how it is set.
        workers: what each takes at once; they serve.
        clock: returns seconds, and never goes back; read when tokens are told, for the times of
            steps (`RoutingPolicySettings.prompt_weight`). None: nothing is fitted.

    Raises:
        PolicyError: no policy can be made of these settings.
        WorkerError: `workers` are no capacities.
    """

    def __init__(
        self,
        settings: RoutingPolicySettings,
        workers: Sequence[Capacity],
        clock: Callable[[], float] | None = None,
    ) -> None:
        check_type("settings", settings, RoutingPolicySettings, PolicyError)
        if not isinstance(workers, Sequence):
            raise WorkerError(f"workers must be a sequence of Capacity, got {short_text(workers)}")
        capacities = [_native_capacity(capacity) for capacity in workers]
        self._settings = settings
        self._clock = clock
        self._native = _native_router(settings, len(capacities))
        self._states = [WorkerState.SERVING] * len(workers)
        self._handles: dict[RequestId, int] = {}
        self._ids: dict[int, RequestId] = {}
        for worker, capacity in enumerate(capacities):
            self._native.set_capacity(worker, *capacity)

    @property
    def settings(self) -> RoutingPolicySettings:
        """The settings of the policy."""
        return self._settings

    @property
    def states(self) -> tuple[WorkerState, ...]:
        """The states of the workers."""
        return tuple(self._states)

    @property
    def loads(self) -> list[int]:
        """KV tokens by worker: of bound requests and, as far as reported, of other front ends'."""
        return self._native.loads()

    @property
    def counts(self) -> list[int]:
        """Requests by worker, counted as in `loads`."""
        return self._native.counts()

    @property
    def prompt_weight(self) -> float:
        """KV tokens that are read in the time of computing one prompt token, as policy `fit` takes
        it now: set, or fitted to the times of steps; 0 while it is not known."""
        weight = self._settings.prompt_weight
        return self._native.fitted_prompt_weight() if weight is None else weight

    @property
    def unassigned(self) -> int:
        """Number of requests without a worker."""
        return self._native.pooled()

    def on_arrival(self, request: Request) -> Decision:
        """A request arrived. Raises `RequestError` where it has already, or has a number that
        cannot be; `WorkerError` where it names a worker that does not exist."""
        size, worker = self._check_request(request)
        expected = -1
        if request.expected is not None:
            expected = whole_number(
                "expected", request.expected, RequestError, least=0, most=MAX_TOKENS
            )
        hits = _check_hits(request.hits, size)
        with _native_errors():
            handle = self._native.arrive(size, worker, hits, expected)
        self._remember(request.id, handle)
        return self._decide(arrival=True)

    def on_running(self, request: Request, worker: int, tokens: int) -> Decision:
        """A worker has a request already, and has made `tokens` of it, 0 to 2^31 - 1: the caller
        had another policy before. It takes a slot there, if one is free or not.

        Raises `RequestError` where it is known already, or has a number that cannot be;
        `WorkerError` where there is no such worker, or it is lost.
        """
        size, pin = self._check_request(request)
        worker = self._check_number(worker)
        made = whole_number("tokens", tokens, RequestError, least=0, most=MAX_TOKENS)
        with _native_errors():
            handle = self._native.adopt(size, pin, worker, made)
        self._remember(request.id, handle)
        return self._decide()

    def on_tokens(
        self, counts: Mapping[RequestId, int], finished: Iterable[RequestId] = ()
    ) -> Decision:
        """What a step brings: so many tokens for each of these requests, and those that ended.

        Raises `RequestError` for one that is not known, or not on a worker, and for a number of
        tokens that cannot be.
        """
        check_type("counts", counts, Mapping, RequestError)
        ended = list(dict.fromkeys(finished))
        handles = [self._handle(name) for name in counts]
        ended_handles = [self._handle(name) for name in ended]
        now = nan if self._clock is None else self._clock()
        try:
            with _native_errors():
                self._native.advance(handles, list(counts.values()), ended_handles, now)
        except TypeError:
            # Looked for only now: this method runs in every step, with all requests.
            for name, count in counts.items():
                whole_number(f"tokens of request {name!r}", count, RequestError, most=MAX_TOKENS)
            raise
        for name in ended:
            self._forget(name)
        return self._decide()

    def on_finish(self, request: RequestId) -> Decision:
        """A request ended. Raises `RequestError` where it is not known."""
        return self.on_tokens({}, (request,))

    def on_abort(self, request: RequestId) -> Decision:
        """A request was given up, wherever it is. Raises `RequestError` where it is not known."""
        self._native.abort(self._handle(request))
        self._forget(request)
        return self._decide()

    def on_worker_change(self, change: WorkerChange) -> Decision:
        """A worker began or ceased to serve, takes another number of requests, or reported.

        Raises `WorkerError` where there is no such worker, or it cannot change so.
        """
        # All checks come before the first native call, so that a refused change has no effect.
        check_type("change", change, WorkerChange, WorkerError)
        whole_number("worker", change.worker, WorkerError)
        amounts = None if change.capacity is None else _native_capacity(change.capacity)
        if change.report is not None:
            _check_report(change.report)
        if change.state is not None:
            check_type("state", change.state, WorkerState, WorkerError)
        self._check_worker(change)
        lost_requests: tuple[RequestId, ...] = ()
        if amounts is not None:
            self._native.set_capacity(change.worker, *amounts)
        if change.state is not None:
            lost_requests = self._set_state(change.worker, change.state)
        if change.report is not None:
            report = change.report
            self._native.report(
                change.worker, report.waiting, report.running, report.tokens, report.kv_usage
            )
        decision = self._decide()
        return replace(decision, lost=lost_requests) if lost_requests else decision

    def decide(self) -> Decision:
        """Decide now, though a step may be told in part."""
        return self._decision(self._native.dispatch(), due=False)

    def _check_worker(self, change: WorkerChange) -> None:
        """Adds a new worker; raises WorkerError for an impossible worker or change of state."""
        workers = len(self._states)
        if change.worker == workers:
            self._native.add_worker(UNLIMITED, UNLIMITED)
            self._states.append(WorkerState.SERVING)
        if not 0 <= change.worker < len(self._states):
            raise WorkerError(f"there is no worker {change.worker}: there are {workers}")
        is_lost = self._states[change.worker] is WorkerState.LOST
        if is_lost and change.name is None and change.state is WorkerState.DRAINING:
            raise WorkerError(f"worker {change.worker} is lost: it has nothing to drain")

    def _set_state(self, worker: int, state: WorkerState) -> tuple[RequestId, ...]:
        self._states[worker] = state
        if state is not WorkerState.LOST:
            # Another worker by this number may drain, though the one before it was lost.
            self._native.set_state(worker, WorkerState.SERVING.value)
            self._native.set_state(worker, state.value)
            return ()
        lost_requests = tuple(self._ids[handle] for handle in self._native.lose(worker))
        for name in lost_requests:
            self._forget(name)
        return lost_requests

    def _check_request(self, request: Request) -> tuple[int, int]:
        """Returns its size and the only worker that may serve it, or -1. Raises."""
        check_type("request", request, Request, RequestError)
        if request.id in self._handles:
            raise RequestError(f"request {request.id!r} has arrived already")
        size = whole_number("size", request.size, RequestError, least=1, most=MAX_TOKENS)
        return size, -1 if request.worker is None else self._check_number(request.worker)

    def _check_number(self, worker: int) -> int:
        number = whole_number("worker", worker, RequestError)
        if not 0 <= number < len(self._states):
            raise WorkerError(f"there is no worker {number}: there are {len(self._states)}")
        return number

    def _decide(self, *, arrival: bool = False) -> Decision:
        return self._decision(*self._native.dispatch_between_steps(arrival))

    def _decision(self, pairs: Sequence[tuple[int, int]], due: bool) -> Decision:
        if not pairs:
            return _DUE if due else _NOTHING
        return Decision(tuple(Assignment(self._ids[handle], w) for handle, w in pairs), due=due)

    def _handle(self, name: RequestId) -> int:
        handle = self._handles.get(name)
        if handle is None:
            raise RequestError(f"request {name!r} is not known, or gone")
        return handle

    def _remember(self, name: RequestId, handle: int) -> None:
        self._handles[name] = handle
        self._ids[handle] = name

    def _forget(self, name: RequestId) -> None:
        del self._ids[self._handles.pop(name)]


def prompt_weight_of(policy: RoutingPolicy | None) -> float:
    """Returns what `policy` takes a prompt token to weigh now, in KV tokens; 0: it weighs none."""
    return policy.prompt_weight if isinstance(policy, RequestRouter) else 0.0


_NOTHING = Decision()
_DUE = Decision(due=True)


def _native_router(settings: RoutingPolicySettings, workers: int) -> _native.Router:
    native = settings.native()
    try:
        return _native.Router(native, workers, UNLIMITED, UNLIMITED)
    except ValueError as error:
        raise PolicyError(str(error)) from error


def _native_capacity(capacity: Capacity) -> tuple[int, int]:
    check_type("a worker's capacity", capacity, Capacity, WorkerError)
    slots, kv_tokens = (
        UNLIMITED if amount is None else whole_number(name, amount, WorkerError, least=0)
        for name, amount in (("slots", capacity.slots), ("kv_tokens", capacity.kv_tokens))
    )
    return min(slots, UNLIMITED), min(kv_tokens, UNLIMITED)


def _check_report(report: WorkerReport) -> None:
    check_type("report", report, WorkerReport, WorkerError)
    for name in ("waiting", "running", "tokens"):
        whole_number(name, getattr(report, name), WorkerError, least=0, most=UNLIMITED)
    if not 0 <= real_number("kv_usage", report.kv_usage, WorkerError) < inf:
        raise WorkerError(f"kv_usage must be at least 0, got {report.kv_usage}")


def _check_hits(hits: Sequence[int] | None, size: int) -> list[int]:
    """Returns the cached tokens by worker, at most the prompt. Raises `RequestError`."""
    if hits is None:
        return []
    if isinstance(hits, str) or not isinstance(hits, Iterable):
        raise RequestError(f"hits must be a sequence of numbers, got {short_text(hits)}")
    return [whole_number("hits", hit, RequestError, least=0, most=size) for hit in hits]


@contextmanager
def _native_errors() -> Iterator[None]:
    try:
        yield
    except _native.WorkerRefused as error:
        raise WorkerError(str(error)) from error
    except _native.RequestRefused as error:
        raise RequestError(str(error)) from error
