"""Health checks and load reports of endpoints, as they come and go; tokens from a counter."""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

import aiohttp

from equipoise.serve.health import HealthBoard, HealthMonitor, LoopStalls
from equipoise.serve.picker.endpoint_pool import EndpointPool
from equipoise.serve.picker.settings import PickerSettings, TokenSource
from equipoise.serve.settings import WorkerSettings
from equipoise.serve.worker_reports import MetricsScraper

LOG = logging.getLogger("equipoise.picker")
MAX_SHARE = 1 << 20
"""Tokens of one request between two reports; more is a counter of something else."""


class GeneratedTokens:
    """Divides what a worker has made since its last report among the requests that it runs.

    They decode in lockstep, so each has made about as many. What is left of a division is kept for
    the next report.
    """

    def __init__(self, pool: EndpointPool) -> None:
        self._pool = pool
        self._last: dict[int, float] = {}
        self._rest: dict[int, int] = {}

    def observe(self, number: int, generated: float, running: int) -> None:
        """A worker has made so many tokens in all, and runs so many requests, also of others."""
        last, self._last[number] = self._last.get(number), generated
        requests = max(self._pool.running(number), running)
        # At a first report nothing is known of when they were made; a counter that fell is a
        # worker that was started again.
        if last is None or generated <= last or not requests:
            return
        tokens = int(generated - last) + self._rest.get(number, 0)
        share, self._rest[number] = divmod(tokens, requests)
        if share:
            self._pool.share_tokens(number, min(share, MAX_SHARE))

    def forget(self, number: int) -> None:
        """The number belongs to another worker from now on."""
        self._last.pop(number, None)
        self._rest.pop(number, None)


@dataclass(frozen=True)
class WatchedServer:
    """What watches one server.

    Attributes:
        workers: the endpoints that it has, by worker number.
        health_task: runs the monitor.
        reports_task: reads reports; None: none are read.
    """

    workers: dict[int, WorkerSettings]
    monitor: HealthMonitor
    health_task: asyncio.Task[None]
    reports_task: asyncio.Task[None] | None


class EndpointWatch:
    """Keeps a health check, and a reader of reports, for each server of a pool.

    Args:
        pool: whose endpoints are watched.
        client: to ask with.
        settings: how often, and what is read.
        tasks: what runs in it; a task that fails ends the group.
    """

    def __init__(
        self,
        pool: EndpointPool,
        client: aiohttp.ClientSession,
        settings: PickerSettings,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._pool, self._client, self._settings, self._group = pool, client, settings, tasks
        self._servers: dict[str, WatchedServer] = {}
        self._health, self._stalls = HealthBoard(pool.dispatcher), LoopStalls()
        self._stalls_task = tasks.create_task(self._stalls.run(), name="stalls")
        counted = settings.tokens is TokenSource.METRICS
        self._generated = GeneratedTokens(pool) if counted else None
        pool.on_change = self.update
        pool.on_doubt = self.check_soon

    def update(self) -> None:
        """Watch the endpoints that the pool has now, and no others."""
        wanted: dict[str, dict[int, WorkerSettings]] = {}
        for endpoint in self._pool.endpoints:
            wanted.setdefault(endpoint.settings.url, {})[endpoint.number] = endpoint.settings
        for url in list(self._servers):
            if url not in wanted:
                self._stop(url)
        for url, workers in wanted.items():
            server = self._servers.get(url)
            if server is None:
                self._servers[url] = self._start(url, workers)
            elif server.workers != workers:
                self._servers[url] = self._change(url, server, workers)

    def check_soon(self, number: int) -> None:
        """A request came to nothing there: ask at once."""
        for server in self._servers.values():
            if number in server.workers:
                server.monitor.check_soon()

    def close(self) -> None:
        """Watch nothing any more."""
        for url in list(self._servers):
            self._stop(url)
        self._stalls_task.cancel()

    def _start(self, url: str, workers: dict[int, WorkerSettings]) -> WatchedServer:
        monitor = HealthMonitor(
            self._client,
            url,
            list(workers),
            self._pool.dispatcher,
            self._health,
            self._stalls,
            self._settings.health,
        )
        health_task = self._group.create_task(monitor.run(), name=f"health of {url}")
        return WatchedServer(workers, monitor, health_task, self._read_reports(url, workers))

    def _change(
        self, url: str, server: WatchedServer, workers: dict[int, WorkerSettings]
    ) -> WatchedServer:
        # The monitor stays: another one would begin with nothing known, and take a server that is
        # late once for one that is lost.
        server.monitor.set_workers(list(workers))
        if server.reports_task is not None:
            server.reports_task.cancel()
        self._forget(server.workers.keys() - workers.keys())
        reports_task = self._read_reports(url, workers)
        return replace(server, workers=workers, reports_task=reports_task)

    def _read_reports(
        self, url: str, workers: dict[int, WorkerSettings]
    ) -> asyncio.Task[None] | None:
        if self._settings.reports is None:
            return None
        scraper = MetricsScraper(
            self._client,
            workers,
            self._pool.dispatcher,
            self._settings.reports,
            on_generated=None if self._generated is None else self._generated.observe,
        )
        return self._group.create_task(scraper.run(), name=f"reports of {url}")

    def _stop(self, url: str) -> None:
        server = self._servers.pop(url)
        server.monitor.close()
        server.health_task.cancel()
        if server.reports_task is not None:
            server.reports_task.cancel()
        self._forget(server.workers.keys())

    def _forget(self, numbers: Iterable[int]) -> None:
        """Another endpoint may get such a number."""
        if self._generated is not None:
            for number in numbers:
                self._generated.forget(number)
