"""Runs a policy server: the process that decides for several proxies or pickers."""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily

from equipoise.balancer.requests.policy import WorkerState
from equipoise.balancer.requests.policy_factory import PolicyFactory
from equipoise.balancer.requests.policy_server import PolicyServer, Stage
from equipoise.balancer.requests.policy_socket import accept
from equipoise.balancer.requests.request_router import RequestRouter, prompt_weight_of
from equipoise.hal.errors import EquipoiseError, UsageError
from equipoise.serve.metrics import CONTENT_TYPE
from equipoise.serve.picker.endpoint_pool import check_policy
from equipoise.serve.policy_client import check_policy_takes_over
from equipoise.serve.server import PrintLine, SignalListener, log_to_stderr, loop_factory

LOG = logging.getLogger("equipoise.policy")
PREFIX = "equipoise_policy_"


@dataclass(frozen=True, kw_only=True)
class PolicyServerSettings:
    """Where a policy server listens; port 0 is a free one."""

    host: str = "127.0.0.1"
    port: int = 9004
    metrics_port: int = 9005


def serve_policy(settings: PolicyServerSettings, factory: PolicyFactory, say: PrintLine) -> int:
    """Serve until SIGTERM or SIGINT; returns 0.

    Raises UsageError where it cannot listen there, or for a policy that takes no new workers, or
    no requests that run; EquipoiseError where the policy failed.
    """
    check_policy(factory)
    check_policy_takes_over(factory)
    with (
        log_to_stderr("equipoise.policy", "equipoise.balancer.requests"),
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        return runner.run(_serve(settings, factory, say))


class PolicyProcess:
    """A policy server and its ports; to be created in an event loop.

    Attributes:
        server: the policy.
        failed: set once the policy has failed.
        ports: where it listens, by name of the option.
    """

    def __init__(self, factory: PolicyFactory) -> None:
        self.failed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        policy = factory([1], [None])
        lockstep = policy.settings.lockstep if isinstance(policy, RequestRouter) else None
        self.server = PolicyServer(
            policy, [None], self._loop, self._on_failure, self._on_front_ends, lockstep
        )
        self.ports: dict[str, int] = {}
        self._front_ends = 0
        self._listener: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_PolicyCollector(self.server))

    async def start(self, settings: PolicyServerSettings) -> None:
        """Listen. Raises UsageError where it cannot."""
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/health", self._health)
        app.router.add_get("/workers", self._workers)
        runner = self._runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        flag, port = "--metrics-port", settings.metrics_port
        try:
            await web.TCPSite(runner, settings.host, port).start()
            flag, port = "--port", settings.port
            self._listener = await self._loop.create_server(
                lambda: accept(self.server), settings.host, port
            )
        except (OSError, UnicodeError) as error:  # the second: no name that a resolver takes
            why = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"--host {settings.host} {flag} {port}: {why}") from error
        self.ports = {
            "port": self._listener.sockets[0].getsockname()[1],
            "metrics_port": runner.addresses[0][1],
        }

    async def stop(self) -> None:
        """Front ends decide alone from now on."""
        if self._listener is not None:
            self._listener.close()
        self.server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _on_failure(self, error: Exception) -> None:
        LOG.error("the policy failed", exc_info=error)
        self.failed.set()

    def _on_front_ends(self, front_ends: int) -> None:
        if front_ends == self._front_ends:  # at the end of a server that none has joined
            return
        self._front_ends = front_ends
        LOG.warning("front ends that have joined: %d", front_ends)

    async def _metrics(self, _request: web.Request) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE}
        return web.Response(body=generate_latest(self._registry), headers=headers)

    async def _ready(self, _request: web.Request) -> web.Response:
        return web.json_response({"front_ends": len(self.server.sessions)})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _workers(self, _request: web.Request) -> web.Response:
        """What is said of each worker, and by how many front ends."""
        requests = Counter(one.worker for s in self.server.sessions for one in s.requests)
        page = [
            {
                "name": worker.name,
                "state": worker.state.value,
                "slots": worker.capacity and worker.capacity.slots,
                "kv_tokens": worker.capacity and worker.capacity.kv_tokens,
                "known_to": sum(one.reported(n) is not None for one in self.server.sessions),
                "used_by": sum(one.uses(n) for one in self.server.sessions),
                "requests": requests[n],
            }
            for n, worker in enumerate(self.server.workers)
            if worker.name is not None
        ]
        answer = {"front_ends": len(self.server.sessions), "workers": page}
        return web.Response(body=json.dumps(answer).encode(), content_type="application/json")


class _PolicyCollector:
    """Gauges, read when they are asked for."""

    def __init__(self, server: PolicyServer) -> None:
        self._server = server

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See prometheus_client."""
        server = self._server
        yield _gauge("front_ends", "front ends for which this policy decides", len(server.sessions))
        stages = GaugeMetricFamily(PREFIX + "requests", "requests by stage", labels=["stage"])
        requests = [one for session in server.sessions for one in session.requests]
        for stage in Stage:
            stages.add_metric([stage.value], sum(one.stage is stage for one in requests))
        yield stages
        states = GaugeMetricFamily(PREFIX + "workers", "workers by state", labels=["state"])
        there = [one.state for one in server.workers if one.name is not None]
        for state in WorkerState:
            states.add_metric([state.value], there.count(state))
        yield states
        yield _gauge(
            "partly_used_workers",
            "workers that serve, and that some front ends do not use or do not know",
            sum(
                one.state is WorkerState.SERVING
                and not all(session.uses(n) for session in server.sessions)
                for n, one in enumerate(server.workers)
            ),
        )
        weight = 0.0 if server.policy is None else prompt_weight_of(server.policy)
        yield _gauge("prompt_weight", "KV tokens read in the time of computing a prompt's", weight)


def _gauge(name: str, description: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, description, value=value)


async def _serve(settings: PolicyServerSettings, factory: PolicyFactory, say: PrintLine) -> int:
    # Before the start: a signal that comes during it ends it as any other does.
    signals = SignalListener()
    try:
        process = PolicyProcess(factory)
        try:
            await process.start(settings)
            ports = process.ports
            say(f"policy on port {ports['port']}, metrics on {ports['metrics_port']}")
            await signals.wait_or(process.failed)
        finally:
            await process.stop()
    finally:
        signals.close()
    if process.failed.is_set():
        raise EquipoiseError("the policy failed: see above")
    return 0
