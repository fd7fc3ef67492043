"""Health checks and load reports of endpoints, as they come and go; tokens from a counter."""

import asyncio
import logging
from dataclasses import dataclass

import aiohttp

from equipoise.serve.health import HealthBoard, HealthMonitor, LoopStalls
from equipoise.serve.picker.endpoint_pool import EndpointPool
from equipoise.serve.picker.settings import PickerSettings, TokenSource
from equipoise.serve.settings import WorkerSettings
from equipoise.serve.worker_reports import MetricsScraper

LOG = logging.getLogger("equipoise.picker")
MOST_SHARE = 1 << 20
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
            self._pool.share_tokens(number, min(share, MOST_SHARE))

    def forget(self, number: int) -> None:
        """The number belongs to another worker from now on."""
        self._last.pop(number, None)
        self._rest.pop(number, None)


@dataclass(frozen=True)
class WatchedServer:
    """What watches one server.

    Attributes:
        workers: the endpoints that it has, by worker number.
    """

    workers: dict[int, WorkerSettings]
    monitor: HealthMonitor
    tasks: tuple[asyncio.Task[None], ...]


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
        for url, server in list(self._servers.items()):
            if wanted.get(url) != server.workers:
                self._stop(url)
        for url, workers in wanted.items():
            if url not in self._servers:
                self._servers[url] = self._start(url, workers)

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
        dispatcher, settings = self._pool.dispatcher, self._settings
        monitor = HealthMonitor(
            self._client,
            url,
            list(workers),
            dispatcher,
            self._health,
            self._stalls,
            settings.health,
        )
        tasks = [self._group.create_task(monitor.run(), name=f"health of {url}")]
        if settings.reports is not None:
            scraper = MetricsScraper(
                self._client,
                workers,
                dispatcher,
                settings.reports,
                on_generated=None if self._generated is None else self._generated.observe,
            )
            tasks.append(self._group.create_task(scraper.run(), name=f"reports of {url}"))
        return WatchedServer(workers, monitor, tuple(tasks))

    def _stop(self, url: str) -> None:
        server = self._servers.pop(url)
        server.monitor.close()
        for task in server.tasks:
            task.cancel()
        for number in server.workers:
            if self._generated is not None:
                self._generated.forget(number)
