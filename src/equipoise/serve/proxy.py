"""The proxy: dispatches paths, keeps background tasks, starts, drains and shuts down."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from enum import Enum, unique
from typing import Any

from aiohttp import ClientSession, web

from equipoise.balancer.requests.dispatcher import RequestDispatcher
from equipoise.balancer.requests.policy import Capacity, RoutingPolicy, WorkerState
from equipoise.serve.admin import PREFIX, WORKERS, Admin
from equipoise.serve.auth import check_key, tls_context
from equipoise.serve.body_parser import BodyParser
from equipoise.serve.cancel_scope import CancelReason, CancelScope, ScopeCancelled, wait_for_any
from equipoise.serve.client_connection import (
    ERROR_EVENT_TIMEOUT,
    PROXY_FAILED,
    SERVER_NAME,
    BodyReader,
    ClientDisconnected,
    ClientListener,
)
from equipoise.serve.cors import cors_headers, is_preflight, preflight_headers
from equipoise.serve.forwarded_paths import TOKENIZER_PATHS, Forwarder, is_forwarded
from equipoise.serve.headers import REQUEST_ID, request_id
from equipoise.serve.health import HealthBoard, HealthMonitor, LoopStalls
from equipoise.serve.metrics import CONTENT_TYPE, StatLogger
from equipoise.serve.openai_protocol import BOUND_PATHS, ParsedRequest, error_body
from equipoise.serve.outcomes import (
    RETRY_AFTER,
    ErrorResponse,
    RequestOutcome,
    RequestRefused,
    bad_request,
    overloaded,
)
from equipoise.serve.proxy_request import ProxyRequest, skip_failed_event
from equipoise.serve.relay import Relay
from equipoise.serve.request_log import RequestStats
from equipoise.serve.settings import ClientRank, RouteSettings, WorkerSettings
from equipoise.serve.upstream import open_client
from equipoise.serve.worker_reports import MetricsScraper

LOG = logging.getLogger("equipoise.route")
CANCEL_TIMEOUT = 5.0
"""Seconds for background tasks to end once cancelled; one that hangs must not hang the exit."""


class BackgroundTasks:
    """Starts background tasks, notices their failures, and cancels them.

    Attributes:
        failed: done as soon as one of them ends by itself, which none should.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed = asyncio.Event()

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until `cancel_all`."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def cancel_all(self) -> None:
        """End all of them; bounded."""
        # Emptied first: `_ended` takes a task that is still listed for one that failed.
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None or task in self._tasks:
            LOG.error("%s ended by itself", task.get_name(), exc_info=error)
            self.failed.set()


SHUTTING_DOWN = ErrorResponse(
    503,
    RequestOutcome.SHUTTING_DOWN,
    CancelReason.SHUTTING_DOWN.value,
    "shutting_down",
    RETRY_AFTER,
)
READ, WRITE = ("GET", "HEAD"), ("POST",)
OWN_PATHS = ("/health", "/ready", "/metrics", WORKERS)
STATUS_CLIENT_GONE = 499
"""Status of a response to a client that has disconnected; it is not sent."""
RECANCEL_INTERVAL = 0.05
"""Seconds after which requests that did not end are cancelled again: a request that was between
two scopes when it was cancelled has nothing to cancel."""
BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted: bursts come while the loop is busy."""


@unique
class ProxyPhase(Enum):
    """Whether requests are taken."""

    SERVING = "serving"
    DRAINING = "draining"


class Proxy:
    """Serves from `start` to `stop`, within one event loop.

    Args:
        settings: see `RouteSettings`.
        policy: over as many workers; not called by anything else.

    Raises: UsageError for a log, or for TLS files, that cannot be opened.
    """

    def __init__(self, settings: RouteSettings, policy: RoutingPolicy) -> None:
        self._settings = settings
        self._tls = tls_context(settings.access)
        self._stats = StatLogger(settings)
        workers, limits = settings.workers, settings.limits
        self._loop = asyncio.get_running_loop()
        self.dispatcher = RequestDispatcher(
            policy,
            len(workers),
            self._loop,
            skip_failed_event,
            limits.queued,
            settings.timeouts.queue,
            self._stats.metrics.observe_decision,
        )
        for view, worker in zip(self.dispatcher.workers, workers, strict=True):
            view.name = worker.key
            view.capacity = Capacity(slots=worker.slots, kv_tokens=worker.kv_tokens)
        self.health = HealthBoard(self.dispatcher)
        self._stalls = LoopStalls()
        self._stats.watch(self.dispatcher, self._stalls)
        self._admin = Admin(settings, self.dispatcher)
        self._bodies = BodyReader(limits, settings.timeouts)
        self._parser = BodyParser()
        self._phase = ProxyPhase.SERVING
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._drain_skipped = asyncio.Event()
        self._scopes: set[CancelScope] = set()
        self._server: asyncio.Server | None = None
        self._listener: ClientListener | None = None
        self._stack = AsyncExitStack()
        self.tasks = BackgroundTasks()
        self.port = 0

    async def start(self) -> None:
        """Ask the workers how they are, and listen. Raises OSError where that cannot be."""
        client = await self._stack.enter_async_context(open_client(self._settings.timeouts))
        for number in range(len(self._settings.workers)):
            self.dispatcher.set_health(number, WorkerState.LOST)  # until it has answered
        monitors = self._monitors(client)
        self._relay = Relay(
            self._settings, self.dispatcher, client, lambda worker: monitors[worker].check_soon()
        )
        self._forward = Forwarder(self._settings, self.dispatcher, client)
        access, limits, timeouts = (
            self._settings.access,
            self._settings.limits,
            self._settings.timeouts,
        )
        self._listener = ClientListener(self._handle, limits, timeouts, self._stats.request_refused)
        self._server = await self._loop.create_server(
            self._listener, access.host, access.port, ssl=self._tls, backlog=BACKLOG
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self.tasks.start("stalls", self._stalls.run())
        self.tasks.start("metrics", self._stats.run())
        for monitor in set(monitors):
            self.tasks.start("monitor", monitor.run())
        for reporter in self._reporters(client):
            self.tasks.start("reports", reporter.run())

    def _reporters(self, client: ClientSession) -> list[MetricsScraper]:
        """One a server, where workers are asked what they have to do."""
        reports, key = self._settings.reports, self._settings.access.worker_key
        if reports is None:
            return []
        by_url: dict[str, dict[int, WorkerSettings]] = {}
        for number, worker in enumerate(self._settings.workers):
            by_url.setdefault(worker.url, {})[number] = worker
        return [
            MetricsScraper(client, workers, self.dispatcher, reports, key)
            for workers in by_url.values()
        ]

    def _monitors(self, client: ClientSession) -> list[HealthMonitor]:
        """One a server; of each worker, that of its server."""
        monitors: dict[str, HealthMonitor] = {}
        urls = [one.url for one in self._settings.workers]
        for url in urls:
            numbers = [number for number, one in enumerate(urls) if one == url]
            monitors[url] = HealthMonitor(
                client,
                url,
                numbers,
                self.dispatcher,
                self.health,
                self._stalls,
                self._settings.health,
            )
        return [monitors[url] for url in urls]

    async def stop(self) -> int:
        """Take no more, let what is under way end, end what does not; returns how many those were.

        Until then it listens: a refused connection says less to a load balancer than a 503
        with `Retry-After`, and metrics are wanted most while it drains. Bounded by
        `Timeouts.drain` and some seconds.
        """
        # From here on new requests get 503; connections are closed last, so that others can end.
        self._phase = ProxyPhase.DRAINING
        await self._wait_drained()
        cut_off = self._in_flight
        end = self._loop.time() + ERROR_EVENT_TIMEOUT
        while self._in_flight and self._loop.time() < end:
            for one in self.dispatcher.requests:
                assert isinstance(one, ProxyRequest)
                one.cancel(CancelReason.SHUTTING_DOWN)
            for scope in self._scopes:
                scope.cancel(CancelReason.SHUTTING_DOWN)
            await self._wait_idle(RECANCEL_INTERVAL)
        if self._server is not None:
            self._server.close()
        if self._listener is not None:
            self._listener.pre_shutdown()
            await self._listener.shutdown(1.0)
        await self.tasks.cancel_all()
        await self._parser.close()
        await self._stack.aclose()
        self._stats.close()
        return cut_off

    def skip_drain(self) -> None:
        """End the drain now; requests that are left are cancelled."""
        self._drain_skipped.set()

    async def _wait_drained(self) -> None:
        """Wait until the proxy is empty, the drain timeout is over, or the drain is skipped."""
        timeout = self._settings.timeouts.drain
        await wait_for_any(self._idle, self._drain_skipped, timeout=timeout)

    async def _wait_idle(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            LOG.debug("%d requests are under way still", self._in_flight)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer anything at all."""
        response = await self._answer(request)
        if not response.prepared and is_api_path(request.path):
            origins = self._settings.access.allowed_origins
            response.headers.update(cors_headers(origins, request.headers))
        # A head that is out has promised to keep the connection: a client that uses it again is
        # answered by 503, where a client with a closed connection would learn nothing.
        if self._phase is ProxyPhase.DRAINING and not response.prepared:
            response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        name = request_id(request.headers)
        try:
            if is_preflight(request) and is_api_path(request.path):
                allowed = preflight_headers(allowed_methods(request.path), request.headers)
                return web.Response(status=204, headers=allowed)
            _check_method(request)
            if request.path in OWN_PATHS or request.path.startswith(PREFIX):
                return self._answer_locally(request)
        except RequestRefused as refusal:
            return _refusal(request.path, refusal.error_response, name)
        # Only these are waited for at the end: requests for metrics must not prolong the drain.
        self._in_flight += 1
        self._idle.clear()
        try:
            return await self._forward_request(request, name)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _forward_request(self, request: web.BaseRequest, name: str) -> web.StreamResponse:
        """What a worker answers."""
        if request.path in BOUND_PATHS:
            return await self._answer_generation(
                request, RequestStats(name, request.path, self._loop.time())
            )
        try:
            self._admit(request)
            async with self._cut_off_after_drain():
                if request.method not in WRITE:
                    return await self._forward.answer(request, name)
                body = await self._bodies.read(request)
                try:
                    return await self._forward.answer(request, name, body)
                finally:
                    self._bodies.release(len(body))
        except RequestRefused as refusal:
            return _refusal(request.path, refusal.error_response, name)
        except ConnectionError:
            return web.Response(status=STATUS_CLIENT_GONE)

    @asynccontextmanager
    async def _cut_off_after_drain(self) -> AsyncIterator[None]:
        """For what the dispatcher does not have: it knows its own requests, and ends them itself.

        Raises: RequestRefused (503) where the drain ends first.
        """
        try:
            async with CancelScope() as scope:
                self._scopes.add(scope)
                try:
                    yield
                finally:
                    self._scopes.discard(scope)
        except ScopeCancelled as cancellation:
            raise RequestRefused(SHUTTING_DOWN) from cancellation

    def _admit(self, request: web.BaseRequest) -> None:
        """Raises RequestRefused: 503 while it drains, 401 without a key, 429 beyond its limit."""
        if self._phase is ProxyPhase.DRAINING:
            raise RequestRefused(SHUTTING_DOWN)
        check_key(self._settings.access, request.headers)
        most = self._settings.limits.concurrency
        if self._in_flight > most:
            raise overloaded(f"{most} requests are under way already")

    def _answer_locally(self, request: web.BaseRequest) -> web.Response:
        """What the proxy answers itself."""
        match request.path:
            case "/health":
                return _json({"status": "ok"})
            case "/ready":
                return self._ready()
            case "/metrics":
                text = self._stats.metrics.exposition()
                return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})
        return self._admin.answer(request)

    def _ready(self) -> web.Response:
        serving = sum(one.state is WorkerState.SERVING for one in self.dispatcher.workers)
        ready = serving > 0 and self._phase is ProxyPhase.SERVING
        status = self._phase.value if serving or self._phase is ProxyPhase.DRAINING else "no_worker"
        about = {"status": status, "serving_workers": serving}
        return _json(about, 200 if ready else 503)

    async def _answer_generation(
        self, request: web.BaseRequest, stats: RequestStats
    ) -> web.StreamResponse:
        try:
            return await self._tokens(request, stats)
        except RequestRefused as refusal:
            stats.outcome = refusal.error_response.outcome
            return _refusal(request.path, refusal.error_response, stats.id)
        except (ClientDisconnected, ConnectionError, asyncio.CancelledError) as error:
            stats.outcome = stats.outcome or RequestOutcome.CLIENT_DISCONNECTED
            if isinstance(error, asyncio.CancelledError):
                raise
            return web.Response(status=STATUS_CLIENT_GONE)
        except Exception:
            LOG.exception("request %s failed", stats.id)
            return _refusal(request.path, PROXY_FAILED, stats.id)
        finally:
            self._stats.request_ended(stats)

    async def _tokens(self, request: web.BaseRequest, stats: RequestStats) -> web.StreamResponse:
        """Checks go from cheap to dear; the policy sees what has passed all of them."""
        self._admit(request)
        async with self._cut_off_after_drain():
            body = await self._bodies.read(request)
        try:
            async with self._cut_off_after_drain():
                parsed = await self._parser.parse(request.path, body, request.headers)
            stats.model, stats.streamed = parsed.model, parsed.streamed
            stats.ready_at = self._loop.time()
            return await self._relay.answer(request, parsed, stats, self._required_worker(parsed))
        finally:
            self._bodies.release(len(body))

    def _required_worker(self, parsed: ParsedRequest) -> int | None:
        if parsed.data_parallel_rank is None:
            return None
        if self._settings.client_rank is ClientRank.FORBID:
            raise bad_request(
                "a data-parallel rank cannot be chosen here: the proxy has client_rank: forbid"
            )
        return worker_of_rank(parsed.data_parallel_rank, self._settings.workers)


def worker_of_rank(rank: int, workers: tuple[WorkerSettings, ...]) -> int:
    """The worker that a client means by a rank: by its headers, or else by its place.

    Raises: RequestRefused (400) where there is none.
    """
    ranks = [one.rank for one in workers]
    if None in ranks or len(set(ranks)) < len(ranks):
        ranks = list(range(len(workers)))
    if rank not in ranks:
        raise bad_request(f"there is no data-parallel rank {rank}")
    return ranks.index(rank)


def is_api_path(path: str) -> bool:
    """Whether a worker answers there, and not the proxy."""
    return path in BOUND_PATHS or path in TOKENIZER_PATHS or is_forwarded(path)


def allowed_methods(path: str) -> tuple[str, ...]:
    """What can be asked of `path`; nothing where it is not served."""
    if path in BOUND_PATHS or path in TOKENIZER_PATHS or path.startswith(PREFIX):
        return WRITE
    return READ if path in OWN_PATHS or is_forwarded(path) else ()


def _check_method(request: web.BaseRequest) -> None:
    """Raises RequestRefused: 404 for an unknown path, 405 for a method that it does not have."""
    methods = allowed_methods(request.path)
    if not methods:
        raise bad_request(f"{request.method} {request.path} is not served", 404, "not_found")
    if request.method not in methods:
        message = f"{request.path} takes {' or '.join(methods)}, not {request.method}"
        headers = {"Allow": ", ".join(methods)}
        raise RequestRefused(
            ErrorResponse(
                405, RequestOutcome.BAD_REQUEST, message, "method_not_allowed", headers=headers
            )
        )


def _refusal(path: str, error_response: ErrorResponse, name: str) -> web.Response:
    headers = {"Content-Type": "application/json", "Server": SERVER_NAME, REQUEST_ID: name}
    return web.Response(
        status=error_response.status,
        body=error_body(path, error_response),
        headers={**headers, **error_response.headers},
    )


def _json(about: object, status: int = 200) -> web.Response:
    headers = {"Content-Type": "application/json", "Server": SERVER_NAME}
    return web.Response(status=status, body=json.dumps(about).encode(), headers=headers)
