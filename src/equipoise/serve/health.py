"""Health checks of the servers, and the state that the dispatcher learns of each worker.

A state changes after several answers of a kind, not after one.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique

import aiohttp

from equipoise.balancer.requests.dispatcher import RequestDispatcher
from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.settings import HealthSettings


@unique
class HealthCheckResult(Enum):
    """Result of one health check."""

    HEALTHY = "well"
    UNHEALTHY = "unwell"
    """It answered, and not well; or it did not, but goes on with what it has."""
    NO_ANSWER = "silent"
    """No answer, or no connection."""


@dataclass(frozen=True)
class WorkerHealth:
    """What is believed of a worker, and what speaks against it.

    Attributes:
        state: as the policy gets it.
        successes: good answers in a row.
        failures: questions without a good answer in a row.
        unanswered: questions without any answer in a row.
    """

    state: WorkerState
    successes: int = 0
    failures: int = 0
    unanswered: int = 0

    def after(self, seen: HealthCheckResult, settings: HealthSettings) -> "WorkerHealth":
        """What is believed after another question."""
        match seen:
            case HealthCheckResult.HEALTHY:
                health = WorkerHealth(self.state, successes=self.successes + 1)
            case HealthCheckResult.UNHEALTHY:
                health = WorkerHealth(self.state, failures=self.failures + 1)
            case HealthCheckResult.NO_ANSWER:
                health = WorkerHealth(
                    self.state, failures=self.failures + 1, unanswered=self.unanswered + 1
                )
        return replace(health, state=_state(health, settings))

    @property
    def uncertain(self) -> bool:
        """Whether what is seen and what is believed differ: it is asked again soon."""
        if self.state is WorkerState.SERVING:
            return self.failures > 0
        return self.successes > 0 or (self.state is WorkerState.DRAINING and self.unanswered > 0)


UNKNOWN_HEALTH = WorkerHealth(WorkerState.LOST)
"""What is believed before anybody has asked."""


def initial_health(seen: HealthCheckResult) -> WorkerHealth:
    """The first answer is believed at once: there is nothing to hold on to."""
    match seen:
        case HealthCheckResult.HEALTHY:
            return WorkerHealth(WorkerState.SERVING, successes=1)
        case HealthCheckResult.UNHEALTHY:
            return WorkerHealth(WorkerState.LOST, failures=1)  # it has nothing that it could drain
        case HealthCheckResult.NO_ANSWER:
            return WorkerHealth(WorkerState.LOST, failures=1, unanswered=1)


def _state(health: WorkerHealth, settings: HealthSettings) -> WorkerState:
    if health.unanswered >= settings.lost_after:
        return WorkerState.LOST
    if health.failures >= settings.draining_after and health.state is WorkerState.SERVING:
        return WorkerState.DRAINING
    if health.successes >= settings.serving_after:
        return WorkerState.SERVING
    return health.state


LOG = logging.getLogger("equipoise.route")
HEALTH_PATH = "/health"
RECHECK_FRACTION = 0.1
"""Part of the interval from one question to the next, while it is not clear how a worker is."""
MIN_INTERVAL = 0.02
"""Seconds: a short interval must not become a busy loop while a worker is in doubt."""


class HealthMonitor:
    """Asks one server, for all workers that it serves as.

    Args:
        client: to ask with.
        url: of the server.
        workers: numbers of the workers that have this url.
        dispatcher: every change is reported to it.
        settings: how often, and what is concluded.
    """

    def __init__(
        self,
        client: aiohttp.ClientSession,
        url: str,
        workers: Sequence[int],
        dispatcher: RequestDispatcher,
        settings: HealthSettings,
    ) -> None:
        self._client, self._url, self._workers = client, url, workers
        self._dispatcher, self._settings = dispatcher, settings
        self._doubt = asyncio.Event()
        self.health = UNKNOWN_HEALTH

    def check_soon(self) -> None:
        """A request came to nothing there: ask at once."""
        self._doubt.set()

    async def run(self) -> None:
        """Ask for ever."""
        first_health = initial_health(await self._ask())
        LOG.warning("%s: found %s", self._url, first_health.state.value)
        self._conclude(first_health)
        while True:
            await self._pause()
            self._doubt.clear()
            before = self.health.state
            self._conclude(self.health.after(await self._ask(), self._settings))
            if self.health.state is not before:
                LOG.warning("%s: %s, was %s", self._url, self.health.state.value, before.value)

    async def _pause(self) -> None:
        seconds = self._settings.interval
        if self.health.uncertain:
            await asyncio.sleep(max(MIN_INTERVAL, seconds * RECHECK_FRACTION))
            return
        try:
            async with asyncio.timeout(seconds):
                await self._doubt.wait()
        except TimeoutError:
            return

    async def _ask(self) -> HealthCheckResult:
        began = asyncio.get_running_loop().time()
        try:
            async with (
                asyncio.timeout(self._settings.timeout),
                self._client.get(self._url + HEALTH_PATH, allow_redirects=False) as answer,
            ):
                return (
                    HealthCheckResult.HEALTHY
                    if answer.status < 300
                    else HealthCheckResult.UNHEALTHY
                )
        except (TimeoutError, aiohttp.ClientError, OSError):
            # A server that is busy may answer late, and be well: tokens are an answer too.
            last_answer = max(self._dispatcher.workers[one].last_answer_at for one in self._workers)
            return (
                HealthCheckResult.UNHEALTHY if last_answer > began else HealthCheckResult.NO_ANSWER
            )

    def _conclude(self, health: WorkerHealth) -> None:
        before, self.health = self.health, health
        if health.state is before.state:
            return
        for worker in self._workers:
            self._dispatcher.set_health(worker, health.state)
