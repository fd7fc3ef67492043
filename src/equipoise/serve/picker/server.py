"""Runs an endpoint picker: its ports, gRPC health, start, drain, exit code."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from enum import Enum, unique
from typing import Any

import grpc
from aiohttp import web
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc.aio import EOF
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from equipoise.balancer.requests.policy_factory import PolicyFactory
from equipoise.hal.errors import EquipoiseError, UsageError
from equipoise.input_files import read_input
from equipoise.serve.auth import tls_context
from equipoise.serve.cancel_scope import wait_for_any
from equipoise.serve.metrics import CONTENT_TYPE
from equipoise.serve.outcomes import RequestOutcome, overloaded
from equipoise.serve.picker.endpoint_list import first_endpoints, follow_endpoints
from equipoise.serve.picker.endpoint_pool import EndpointPool, check_policy
from equipoise.serve.picker.endpoint_watch import EndpointWatch
from equipoise.serve.picker.messages import METHOD, SERVICE, refusal_reply, request_head
from equipoise.serve.picker.metrics import PickerMetrics
from equipoise.serve.picker.process_stream import ProcessStream
from equipoise.serve.picker.request_bodies import RequestBodies
from equipoise.serve.picker.settings import PickerPorts, PickerSettings
from equipoise.serve.policy_client import PolicyClient, check_policy_takes_over
from equipoise.serve.server import (
    EXIT_CUT_OFF,
    PrintLine,
    SignalListener,
    drain,
    log_to_stderr,
)
from equipoise.serve.settings import MIB, AccessSettings, Timeouts
from equipoise.serve.upstream import open_client

LOG = logging.getLogger("equipoise.picker")
HEALTH_SERVICES = "", "readiness", SERVICE
"""gRPC health checks that say whether requests are taken; `liveness`: that the process lives."""
CLOSE_SECONDS = 2.0
"""For streams to close when the picker ends."""


@unique
class PickerPhase(Enum):
    """What the picker does with requests."""

    SERVING = "serving"
    DRAINING = "draining"
    """It takes requests, and asks for none."""
    CLOSING = "closing"
    """Streams end without an error."""


class Picker:
    """Serves from `start` to `stop`, within one event loop.

    Args:
        settings: see `PickerSettings`.
        factory: makes the policy.
        tasks: background tasks run in it; one that fails ends the group.
    """

    def __init__(
        self, settings: PickerSettings, factory: PolicyFactory, tasks: asyncio.TaskGroup
    ) -> None:
        self._settings, self._group, self._factory = settings, tasks, factory
        self.metrics = PickerMetrics()
        self.pool = EndpointPool(factory, settings, self.metrics.observe_decision)
        self.metrics.watch(self.pool)
        self.bodies = RequestBodies(settings.limits)
        self._streams: dict[ProcessStream, asyncio.Task[Any]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._drain_skipped = asyncio.Event()
        self._phase = PickerPhase.SERVING
        self._stack = AsyncExitStack()
        self._health = health.aio.HealthServicer()
        self._servers: list[grpc.aio.Server] = []
        self._watch: EndpointWatch | None = None
        self._followers: list[asyncio.Task[None]] = []
        self.ports: dict[str, int] = {}

    @property
    def in_flight(self) -> int:
        """Requests whose streams are open."""
        return len(self._streams)

    async def start(self) -> None:
        """Read the endpoints, and listen. Raises UsageError where that cannot be."""
        source = self._settings.endpoints
        endpoints = await first_endpoints(source)
        client = await self._stack.enter_async_context(open_client(Timeouts()))
        self._watch = EndpointWatch(self.pool, client, self._settings, self._group)
        await self._listen()
        self.pool.set_endpoints(endpoints)
        follower = self._group.create_task(follow_endpoints(source, self.pool), name="endpoints")
        self._followers.append(follower)
        if self._settings.policy_server is not None:
            shared = PolicyClient(
                self.pool.dispatcher,
                self._settings.policy_server,
                lambda: self._factory([1], [None]),
            )
            self._followers.append(self._group.create_task(shared.run(), name="policy client"))
        await self._set_ready(health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> int:
        """Let what is under way end; returns how many requests were refused for that.

        Readiness ends first, and requests that come nevertheless are answered: a data plane learns
        of it with delay. At the end of the drain what waits for an endpoint is refused; `close`
        ends the other streams.
        """
        self._phase = PickerPhase.DRAINING
        await self._set_ready(health_pb2.HealthCheckResponse.NOT_SERVING)
        timeout = self._settings.timeouts.drain
        await wait_for_any(self._idle, self._drain_skipped, timeout=timeout)
        refused = [task for stream, task in self._streams.items() if stream.shut_down()]
        if refused:
            await asyncio.wait(refused, timeout=CLOSE_SECONDS)
        return len(refused)

    async def close(self) -> None:
        """End everything; bounded.

        Streams end without an error, so that answers under way go on without the picker.
        """
        self._phase = PickerPhase.CLOSING
        for task in list(self._streams.values()):
            task.cancel()
        for server in self._servers:
            await server.stop(CLOSE_SECONDS)
        for task in self._followers:
            task.cancel()
        if self._watch is not None:
            self._watch.close()
        self.pool.close()
        await self.bodies.close()
        await self._stack.aclose()

    def skip_drain(self) -> None:
        """End the drain now."""
        self._drain_skipped.set()

    async def _process(self, _requests: object, context: Any) -> None:
        """One stream of Envoy."""
        if len(self._streams) >= self._settings.limits.concurrency:
            most = self._settings.limits.concurrency
            refusal = overloaded(f"{most} requests are under way already")
            self.metrics.request_ended(RequestOutcome.OVERLOADED, None)
            first = await context.read()
            path = "" if first is EOF else request_head(first).path.partition("?")[0]
            await context.write(refusal_reply(refusal.error_response, path))
            return
        stream = ProcessStream(self.pool, self._settings, self.bodies, context)
        task = asyncio.current_task()
        assert task is not None
        self._streams[stream] = task
        self._idle.clear()
        try:
            await stream.run()
        except asyncio.CancelledError:
            # gRPC cancels where Envoy resets the stream. Where this picker ends, the stream ends
            # without an error, and the answer goes on without it.
            if self._phase is not PickerPhase.CLOSING:
                raise
        except Exception:
            stream.outcome = RequestOutcome.FAILED
            LOG.exception("a request failed")
            raise
        finally:
            del self._streams[stream]
            if stream.outcome is not None:
                self.metrics.request_ended(stream.outcome, stream.queue_seconds)
            if not self._streams:
                self._idle.set()

    async def _listen(self) -> None:
        ports = self._settings.ports
        processor = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=pb.ProcessingRequest.FromString,
            # Answers are bytes already: most of them are always the same.
            response_serializer=None,
        )
        main = self._server(self._settings.limits.body + MIB)
        main.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: processor}),)
        )
        plain = self._server(MIB)
        for server in (main, plain):
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self.ports["grpc"] = _bind(main, "--port", ports.host, ports.grpc, _credentials(ports))
        self.ports["health"] = _bind(plain, "--health-port", ports.host, ports.health, None)
        for server in (main, plain):
            await server.start()
            self._servers.append(server)
        await self._listen_http()
        await self._health.set("liveness", health_pb2.HealthCheckResponse.SERVING)

    def _server(self, most: int) -> grpc.aio.Server:
        # Without the second option two pickers could share a port, and halve each other's requests.
        return grpc.aio.server(
            options=(("grpc.max_receive_message_length", most), ("grpc.so_reuseport", 0))
        )

    async def _listen_http(self) -> None:
        ports = self._settings.ports
        app = web.Application()
        app.router.add_get("/metrics", self._answer(self._metrics_page))
        app.router.add_get("/health", self._answer(lambda: _json({"status": "ok"})))
        app.router.add_get("/ready", self._answer(self._ready))
        app.router.add_get("/endpoints", self._answer(self._endpoints))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, ports.host, ports.http).start()
        except OSError as error:
            why = error.strerror or str(error)
            raise UsageError(f"--host {ports.host} --metrics-port {ports.http}: {why}") from error
        self.ports["http"] = runner.addresses[0][1]

    def _answer(
        self, page: Callable[[], web.Response]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(_request: web.Request) -> web.StreamResponse:
            return page()

        return answer

    def _metrics_page(self) -> web.Response:
        return web.Response(body=self.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    def _ready(self) -> web.Response:
        serving = self.pool.serving
        ready = serving > 0 and self._phase is PickerPhase.SERVING
        waits = not serving and self._phase is PickerPhase.SERVING
        status = "no_endpoint" if waits else self._phase.value
        about = {"status": status, "serving_endpoints": serving}
        return _json(about, 200 if ready else 503)

    def _endpoints(self) -> web.Response:
        return _json(
            {
                "endpoints": [
                    {
                        "name": one.settings.name,
                        "address": one.address,
                        "state": self.pool.view(one).state.value,
                        "leaving": self.pool.is_leaving(one),
                        "requests": len(self.pool.view(one).requests),
                    }
                    for one in self.pool.endpoints
                ]
            }
        )

    async def _set_ready(self, status: Any) -> None:
        for name in HEALTH_SERVICES:
            await self._health.set(name, status)


def _bind(
    server: grpc.aio.Server,
    flag: str,
    host: str,
    port: int,
    credentials: grpc.ServerCredentials | None,
) -> int:
    """Returns the port. Raises UsageError where it cannot listen there."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise UsageError(f"--host {host} {flag} {port}: {error}") from error


def _credentials(ports: PickerPorts) -> grpc.ServerCredentials | None:
    """Raises UsageError for files that cannot be taken."""
    if ports.certificate is None:
        return None
    # gRPC says of files that it does not take only that it cannot listen.
    tls_context(AccessSettings(certificate=ports.certificate, private_key=ports.private_key))
    certificate = read_input(ports.certificate)
    key = read_input(ports.private_key or ports.certificate)
    return grpc.ssl_server_credentials([(key, certificate)])


def _json(about: object, status: int = 200) -> web.Response:
    headers = {"Content-Type": "application/json"}
    return web.Response(status=status, body=json.dumps(about).encode(), headers=headers)


def serve_picker(settings: PickerSettings, factory: PolicyFactory, say: PrintLine) -> int:
    """Serve until SIGTERM or SIGINT; a second one ends the drain.

    Returns 0, or 1 if requests that waited for an endpoint were refused.

    Raises: UsageError where it cannot listen there, or for a policy that takes no new worker;
        EquipoiseError where a part of it failed.
    """
    check_policy(factory)
    if settings.policy_server is not None:
        check_policy_takes_over(factory)
    with log_to_stderr("equipoise.picker", "equipoise.route", "equipoise.balancer.requests"):
        try:
            return asyncio.run(_serve(settings, factory, say))
        except ExceptionGroup as group:
            errors = _flat(group)
            for error in errors:
                if isinstance(error, UsageError):
                    raise error from None
            LOG.error("a part of the picker failed", exc_info=group)
            raise EquipoiseError(f"a part of the picker failed: {errors[0]}") from group


async def _serve(settings: PickerSettings, factory: PolicyFactory, say: PrintLine) -> int:
    # Before the start: a signal that comes during it ends it as any other does.
    signals = SignalListener()
    try:
        async with asyncio.TaskGroup() as tasks:
            picker = Picker(settings, factory, tasks)
            try:
                refused = await _pick(picker, signals, say)
            finally:
                await picker.close()
    finally:
        signals.close()
    if refused:
        say(f"{refused} request(s) that waited for an endpoint were refused")
    return EXIT_CUT_OFF if refused else 0


async def _pick(picker: Picker, signals: SignalListener, say: PrintLine) -> int:
    """From the start to the end of the drain; returns how many requests were refused."""
    await picker.start()
    ports = picker.ports
    say(
        f"picking on port {ports['grpc']} for {len(picker.pool.endpoints)} endpoint(s); "
        f"gRPC health on {ports['health']}, metrics on {ports['http']}"
    )
    await signals.wait_or(asyncio.Event())
    say("ending: waiting for the requests under way")
    return await drain(picker, signals)


def _flat(group: ExceptionGroup[Exception]) -> list[Exception]:
    errors: list[Exception] = []
    for error in group.exceptions:
        errors += _flat(error) if isinstance(error, ExceptionGroup) else [error]
    return errors
