"""Endpoints by address, over a dispatcher's worker numbers.

Requests reach the dispatcher only here; health checks and load reports call it by themselves.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from urllib.parse import urlsplit

from equipoise.balancer.requests.dispatcher import (
    BoundToWorker,
    CloseReason,
    DispatchedRequest,
    Queued,
    RequestClosed,
    RequestDispatcher,
    Running,
    WorkerView,
)
from equipoise.balancer.requests.policy import (
    Capacity,
    Decision,
    RoutingPolicy,
    WorkerChange,
    WorkerState,
)
from equipoise.balancer.requests.policy_factory import PolicyFactory
from equipoise.hal.errors import UsageError, WorkerError
from equipoise.serve.outcomes import RETRY_AFTER, ErrorResponse, RequestOutcome, RequestRefused
from equipoise.serve.picker.settings import PickerSettings, TokenSource
from equipoise.serve.proxy_request import ProxyRequest, skip_failed_event
from equipoise.serve.settings import WorkerSettings

LOG = logging.getLogger("equipoise.picker")
SETTLE_SECONDS = 0.005
"""Within it the ends of one step reach the picker; they are told to the policy as one event, where
no tokens say when a step is over."""
MAX_FALLBACK_LOOKS = 16
"""Endpoints that are looked at for a fallback: each request pays for them."""


def check_policy(factory: PolicyFactory) -> None:
    """Raises UsageError unless a policy of this factory takes workers after it was made."""
    policy = factory([1], [None])
    change = WorkerChange(worker=1, state=WorkerState.LOST, capacity=Capacity(slots=1))
    try:
        decision = policy.on_worker_change(change)
    except Exception as error:
        # The policy may be the user's own code, which may raise anything.
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"--policy: it takes no new worker: {reason}") from error
    if not isinstance(decision, Decision):
        raise UsageError(f"--policy: it takes no new worker: it returned {decision!r}")


class EndpointDispatcher(RequestDispatcher):
    """A dispatcher whose workers come and go.

    Attributes:
        on_serving: called when a worker began to serve, or serves no more.
        serving: numbers of the workers that serve; kept, because each request asks for it.
        checked: numbers of the workers of which a health check has said anything.
    """

    serving: tuple[int, ...] = ()

    def __init__(
        self,
        policy: RoutingPolicy,
        settings: PickerSettings,
        observe: Callable[[float], None],
    ) -> None:
        self.checked: set[int] = set()
        self.on_serving: Callable[[], None] = lambda: None
        # A policy has one worker at least: this one is lost, and an endpoint takes its number.
        super().__init__(
            policy,
            1,
            asyncio.get_running_loop(),
            skip_failed_event,
            settings.limits.queued,
            settings.timeouts.queue,
            observe,
        )
        self.remove_worker(0)

    def set_health(self, worker: int, state: WorkerState) -> None:
        """See `RequestDispatcher`."""
        self.checked.add(worker)
        super().set_health(worker, state)

    def remove_worker(self, worker: int) -> None:
        """See `RequestDispatcher`."""
        super().remove_worker(worker)
        self.checked.discard(worker)  # the endpoint that gets this number is another one

    def close_queued(self, request: DispatchedRequest) -> None:
        """Take a request that waits from the policy, as if its worker were lost."""
        if isinstance(request.status, Queued):
            self._give_up(request, RequestClosed(CloseReason.WORKER_LOST))

    def _update_worker(self, worker: int) -> None:
        super()._update_worker(worker)
        views = enumerate(self.workers)
        serving = tuple(n for n, view in views if view.state is WorkerState.SERVING)
        if serving != self.serving:
            self.serving = serving
            self.on_serving()


class PickedRequest(ProxyRequest):
    """A request of the pool.

    Attributes:
        subset: addresses of the endpoints that it may go to; None: any, or it is answered already.
        requeued: called when its worker was lost, and the policy has it again.
    """

    subset: frozenset[str] | None = None

    def __init__(
        self, number: int, size: int, required_worker: int | None, blocks: Sequence[int]
    ) -> None:
        super().__init__(number, size, required_worker, blocks)
        self.requeued: Callable[[], object] = lambda: None

    def on_requeued(self) -> None:
        """See `DispatchedRequest`."""
        super().on_requeued()
        self.requeued()


@dataclass(frozen=True)
class Endpoint:
    """An endpoint with its worker number.

    Attributes:
        address: IP:PORT, as the data plane knows it.
        headers: to be sent to it with every request.
    """

    number: int
    settings: WorkerSettings
    address: str
    headers: tuple[tuple[str, str], ...]

    @property
    def key(self) -> str:
        """What makes it the same endpoint in two lists."""
        return self.settings.key


def address_of(settings: WorkerSettings) -> str:
    """IP:PORT of an endpoint."""
    return urlsplit(settings.url).netloc


class EndpointPool:
    """Requests in, endpoints out.

    Args:
        factory: makes the policy.
        settings: limits and timeouts.
        observe: called with the seconds that each decision took.

    Attributes:
        on_change: called when endpoints were added or removed.
        on_doubt: called with the number of a worker that may not be well.
    """

    def __init__(
        self,
        factory: PolicyFactory,
        settings: PickerSettings,
        observe: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._settings = settings
        policy: RoutingPolicy = factory([1], [None])
        self.dispatcher = EndpointDispatcher(policy, settings, observe)
        self._endpoints: dict[int, Endpoint] = {}
        self._leaving: dict[int, asyncio.TimerHandle] = {}
        self._ended: list[tuple[ProxyRequest, int]] = []
        self._settle: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._turn, self._names = 0, count()
        self.dispatcher.on_serving = self._close_stuck
        self.on_change: Callable[[], None] = lambda: None
        self.on_doubt: Callable[[int], None] = lambda number: None

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """All of them, those that are leaving included, by worker number."""
        return tuple(self._endpoints[number] for number in sorted(self._endpoints))

    @property
    def serving(self) -> int:
        """How many get requests."""
        return len(self.dispatcher.serving)

    def view(self, endpoint: Endpoint) -> WorkerView:
        """What the dispatcher knows of it."""
        return self.dispatcher.workers[endpoint.number]

    def is_leaving(self, endpoint: Endpoint) -> bool:
        """Whether it left the list, and has requests still."""
        return endpoint.number in self._leaving

    def set_endpoints(self, listed: Sequence[WorkerSettings]) -> None:
        """The endpoints from now on. Those that are gone keep their requests until these end."""
        wanted = {one.key: one for one in listed}
        known = {one.key: one for one in self._endpoints.values()}
        for key, endpoint in known.items():
            # One before it that leaves may end the last request of one that was leaving.
            is_there = endpoint.number in self._endpoints
            if is_there and key not in wanted and endpoint.number not in self._leaving:
                self._leave(endpoint)
        for key, settings in wanted.items():
            if key in known:
                self._keep(known[key], settings)
            else:
                self._add(settings)
        self.on_change()

    def submit(
        self, size: int, subset: frozenset[str] | None = None, blocks: Sequence[int] = ()
    ) -> ProxyRequest:
        """A request that goes to one of `subset`, or to any endpoint; see `RequestDispatcher`.

        While no endpoint serves and the health of some is in doubt it waits for any: who gets it
        asks `allows`. Raises: RequestRefused: 503 where none of them can serve, 429 where too many
        wait.
        """
        eligible = self._eligible(subset)
        size = self._bounded(size, eligible)
        if not self.serving or len(eligible) == self.serving:
            return self._submit(size, None, blocks)
        # The policy knows "any" and "this one". What may not go everywhere waits for the lightest
        # of those that have room for it.
        roomy = [number for number in eligible if self._bounded(size, [number]) == size]
        return self._submit(size, min(roomy, key=self._weight), blocks, subset)

    def any_endpoint(self, subset: frozenset[str] | None = None) -> Endpoint:
        """For a request that needs no slot, in turns. Raises RequestRefused (503): none is ready.

        While the health of all is in doubt one of these is asked: its answer says more than 503.
        """
        eligible = self._eligible(subset)
        return self._endpoints[eligible[self._turn % len(eligible)]]

    def allows(self, endpoint: Endpoint, subset: frozenset[str] | None) -> bool:
        """Whether a request with this subset may go there."""
        return subset is None or endpoint.address in subset

    def endpoint(self, binding: BoundToWorker) -> Endpoint:
        """The endpoint that a request is bound to."""
        return self._endpoints[binding.worker]

    def addresses(self, endpoint: Endpoint, subset: frozenset[str] | None) -> tuple[str, ...]:
        """The addresses to try: that of the endpoint, then those to fall back to."""
        addresses = [endpoint.address]
        serving, most = self.dispatcher.serving, self._settings.limits.fallbacks
        # In turns: what a lost worker had must not fall upon one other.
        self._turn += 1
        for offset in range(min(len(serving), MAX_FALLBACK_LOOKS)):
            if len(addresses) > most:
                break
            one = self._endpoints[serving[(self._turn + offset) % len(serving)]]
            if (
                one.address not in addresses
                # A fallback gets the same headers: with a rank of its own, another's.
                and one.headers == endpoint.headers
                and self.allows(one, subset)
            ):
                addresses.append(one.address)
        return tuple(addresses)

    def set_answering(
        self, state: ProxyRequest, address: str, headers: tuple[tuple[str, str], ...] = ()
    ) -> ProxyRequest:
        """The endpoint at `address` answers a request that was sent with these headers.

        Returns the request as the dispatcher has it from now on: another one, where another
        endpoint answers than it is bound to.
        """
        bound, number = state.status, self._answering(address, headers)
        if isinstance(bound, BoundToWorker) and bound.worker == number:
            return self._keep_answering(state)
        # The data plane went down the list, or the worker was found lost since: whatever the policy
        # has made of that, the request is where it is answered.
        self.dispatcher.abort(state)
        if number is None or not self._serves(number):
            return state
        try:
            # Where no slot is free there it waits for one in the policy, as it does in the worker.
            state = self._submit(self._bounded(state.size, [number]), number, state.blocks)
            return self._keep_answering(state)
        except Exception as error:
            # The books lack it; the answer itself has to go on.
            LOG.warning("a request is answered by %s and not counted there: %s", address, error)
            return state

    def start_answer(
        self, state: ProxyRequest, address: str, headers: tuple[tuple[str, str], ...] = ()
    ) -> ProxyRequest:
        """As `set_answering`; from now on the policy expects a token of it in every step."""
        state = self.set_answering(state, address, headers)
        self._start(state)
        return state

    def doubt(self, address: str) -> None:
        """An answer from there failed: its health is to be checked at once."""
        for endpoint in self._endpoints.values():
            if endpoint.address == address:
                self.on_doubt(endpoint.number)

    def report_tokens(self, state: ProxyRequest, tokens: int) -> None:
        """So many tokens so far."""
        self._start(state)
        self.dispatcher.report_tokens(state, tokens)

    def share_tokens(self, number: int, tokens: int) -> None:
        """Each request that runs at a worker has made so many more."""
        for state in self.dispatcher.workers[number].requests.values():
            if isinstance(state.status, Running):
                self.dispatcher.report_tokens(state, state.tokens + tokens)

    def running(self, number: int) -> int:
        """Requests of a worker that are being answered."""
        requests = self.dispatcher.workers[number].requests.values()
        return sum(isinstance(one.status, Running) for one in requests)

    def finish(self, state: ProxyRequest, tokens: int) -> None:
        """Its answer ended; `tokens` is 0 where they were not counted."""
        if self._settings.tokens is TokenSource.CHUNKS:
            self._finish(state, tokens)
            return
        self._ended.append((state, tokens))
        if self._settle is None:
            self._settle = self._loop.call_later(SETTLE_SECONDS, self._finish_all)

    def abort(self, state: ProxyRequest) -> None:
        """It ended without an answer, wherever it was."""
        self.dispatcher.abort(state)
        self._release_empty()

    def close(self) -> None:
        """Stop the timers."""
        for timer in (*self._leaving.values(), self._settle):
            if timer is not None:
                timer.cancel()

    def _keep_answering(self, state: ProxyRequest) -> ProxyRequest:
        """If its worker is lost the policy is not to bind it elsewhere: it will not be sent again.

        Matters until it starts: after that the policy gives it up by itself.
        """
        assert isinstance(state, PickedRequest)
        # Later, since it is called amid the dispatcher's books.
        state.requeued = lambda: self._loop.call_soon(self.abort, state)
        return state

    def _start(self, state: ProxyRequest) -> None:
        if isinstance(state.status, BoundToWorker):
            self.dispatcher.start(state, state.status)

    def _finish_all(self) -> None:
        self._settle = None
        ended, self._ended = self._ended, []
        # In one turn of the loop: the dispatcher tells them as one event.
        for state, tokens in ended:
            self._finish(state, tokens)

    def _finish(self, state: ProxyRequest, tokens: int) -> None:
        if tokens:
            self.report_tokens(state, tokens)
        self.dispatcher.finish(state)
        self._release_empty()

    def _answering(self, address: str, headers: tuple[tuple[str, str], ...]) -> int | None:
        """The endpoint at an address that a request with these headers reaches."""
        there = [one for one in self._endpoints.values() if one.address == address]
        # Ranks that share an address are told apart by the headers, also by the worker.
        exact = [one for one in there if one.headers == headers]
        return next((one.number for one in exact or there), None)

    def _close_stuck(self) -> None:
        """Close what waits for an endpoint that does not serve while one of its subset does.

        Its stream submits it again, and so does that of a request whose endpoint left the list. One
        whose endpoint is only in doubt waits for the next health check where it has no other.
        """
        serving = {self._endpoints[number].address for number in self.dispatcher.serving}
        for state in self.dispatcher.requests:
            if not isinstance(state, PickedRequest) or state.subset is None:
                continue
            worker = state.required_worker
            stuck = worker is not None and not self._serves(worker)
            if stuck and (worker in self._leaving or not serving.isdisjoint(state.subset)):
                self.dispatcher.close_queued(state)

    def _submit(
        self,
        size: int,
        worker: int | None,
        blocks: Sequence[int],
        subset: frozenset[str] | None = None,
    ) -> ProxyRequest:
        state = PickedRequest(next(self._names), size, worker, blocks)
        state.subset = subset
        self.dispatcher.submit(state)
        state.check_open()
        return state

    def _bounded(self, size: int, numbers: Sequence[int]) -> int:
        """A size that one of them can hold: it is an estimate, and the worker knows."""
        limits = [self._endpoints[number].settings.kv_tokens for number in numbers]
        known = [limit for limit in limits if limit is not None]
        return max(1, size if len(known) < len(limits) else min(size, max(known)))

    def _eligible(self, subset: frozenset[str] | None) -> list[int]:
        """Those that serve; where none does at all, those whose health is in doubt."""
        # A missed health check may be the picker's own slowness, and then it is all of them at
        # once: requests wait for the next check, and are not refused.
        ready = self.dispatcher.serving or self._in_doubt()
        numbers = [one for one in ready if self.allows(self._endpoints[one], subset)]
        if not numbers:
            of = "no endpoint" if subset is None else "no endpoint of the subset"
            raise RequestRefused(
                ErrorResponse(
                    503, RequestOutcome.WORKERS_FAILED, f"{of} is ready", "no_endpoint", RETRY_AFTER
                )
            )
        return numbers

    def _in_doubt(self) -> tuple[int, ...]:
        """Those not asked yet, and those that drain because of their health."""
        return tuple(
            number
            for number in sorted(self._endpoints)
            if number not in self._leaving
            and (
                self.dispatcher.workers[number].state is WorkerState.DRAINING
                or number not in self.dispatcher.checked
            )
        )

    def _serves(self, number: int) -> bool:
        return self.dispatcher.workers[number].state is WorkerState.SERVING

    def _weight(self, number: int) -> tuple[int, int]:
        view = self.dispatcher.workers[number]
        return len(view.requests), view.load

    def _add(self, settings: WorkerSettings) -> None:
        try:
            number = self.dispatcher.add_worker(_capacity(settings), WorkerState.LOST, settings.key)
        except WorkerError as error:
            # Counted with the policy's errors. The others go on, and it is tried with the next
            # change of the list.
            LOG.error("%s: not added: %s", settings.name, error)
            return
        headers = tuple(settings.headers.items())
        self._endpoints[number] = Endpoint(number, settings, address_of(settings), headers)
        LOG.warning("%s: added", settings.name)

    def _keep(self, endpoint: Endpoint, settings: WorkerSettings) -> None:
        timer = self._leaving.pop(endpoint.number, None)
        if timer is not None:
            timer.cancel()
            self.dispatcher.resume_worker(endpoint.number)
            LOG.warning("%s: back in the list", settings.name)
        if settings == endpoint.settings:
            return
        self.dispatcher.set_capacity(endpoint.number, _capacity(settings))
        self._endpoints[endpoint.number] = Endpoint(
            endpoint.number, settings, endpoint.address, endpoint.headers
        )

    def _leave(self, endpoint: Endpoint) -> None:
        number = endpoint.number
        LOG.warning("%s: left the list", endpoint.settings.name)
        self._leaving[number] = self._loop.call_later(
            self._settings.timeouts.drain, self._remove, number
        )
        self.dispatcher.drain_worker(number)
        self._close_stuck()  # also of one that did not serve before, by which nothing changed
        self._release_empty()

    def _release_empty(self) -> None:
        """Remove what left the list and has no request any more."""
        if not self._leaving:
            return
        empty = [one for one in self._leaving if not self.dispatcher.workers[one].requests]
        for number in empty:
            self._remove(number)

    def _remove(self, number: int) -> None:
        self._leaving.pop(number).cancel()
        endpoint = self._endpoints.pop(number)
        # Its monitor first: it must not say any more how this number is.
        self.on_change()
        self.dispatcher.remove_worker(number)
        LOG.warning("%s: removed", endpoint.settings.name)


def _capacity(settings: WorkerSettings) -> Capacity:
    return Capacity(slots=settings.slots, kv_tokens=settings.kv_tokens)
