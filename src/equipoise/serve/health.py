"""Health checks of the servers, and the state that the dispatcher learns of each worker.

A state changes after several answers of a kind, not after one.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique
from itertools import count

import aiohttp

from equipoise.balancer.requests.dispatcher import RequestDispatcher
from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.settings import HealthSettings


@unique
class HealthCheckResult(Enum):
    """Result of one health check."""

    HEALTHY = "well"
    UNHEALTHY = "unwell"
    """It answered, and not well."""
    BUSY = "busy"
    """No answer in time, but it goes on with what it has."""
    SILENT = "silent"
    """No answer in time, and nothing else either."""
    NO_CONNECTION = "no connection"
    PROXY_LATE = "the proxy was late"
    """No answer in time, of which the proxy itself was stalled for too long: nothing is known."""


@dataclass(frozen=True)
class WorkerHealth:
    """What is believed of a worker, and what speaks against it.

    Attributes:
        state: as it would be if there were no other server.
        successes: good answers in a row.
        failures: questions without a good answer in a row.
        unanswered: questions without any answer in a row.
        late: questions in a row that were not answered in time.
    """

    state: WorkerState
    successes: int = 0
    failures: int = 0
    unanswered: int = 0
    late: int = 0

    def after(self, seen: HealthCheckResult, settings: HealthSettings) -> "WorkerHealth":
        """What is believed after another question."""
        match seen:
            case HealthCheckResult.PROXY_LATE:
                return self
            case HealthCheckResult.HEALTHY:
                # To be late is weak evidence: one answer in time outweighs it.
                was_late = self.state is WorkerState.DRAINING and self.only_late
                state = WorkerState.SERVING if was_late else self.state
                health = WorkerHealth(state, successes=self.successes + 1)
            case HealthCheckResult.UNHEALTHY:
                health = WorkerHealth(self.state, failures=self.failures + 1)
            case HealthCheckResult.BUSY:
                health = WorkerHealth(self.state, failures=self.failures + 1, late=self.late + 1)
            case HealthCheckResult.SILENT | HealthCheckResult.NO_CONNECTION:
                health = WorkerHealth(
                    self.state,
                    failures=self.failures + 1,
                    unanswered=self.unanswered + 1,
                    late=self.late + 1 if seen is HealthCheckResult.SILENT else 0,
                )
        return replace(health, state=_state(health, settings))

    @property
    def uncertain(self) -> bool:
        """Whether what is seen and what is believed differ: it is asked again soon."""
        if self.state is WorkerState.SERVING:
            return self.failures > 0
        return self.successes > 0 or (self.state is WorkerState.DRAINING and self.unanswered > 0)

    @property
    def only_late(self) -> bool:
        """Whether nothing speaks against it but answers that did not come in time."""
        return self.failures > 0 and self.late == self.failures


UNKNOWN_HEALTH = WorkerHealth(WorkerState.LOST)
"""What is believed before anybody has asked."""


def initial_health(seen: HealthCheckResult) -> WorkerHealth:
    """The first answer is believed at once: there is nothing to hold on to."""
    if seen is HealthCheckResult.HEALTHY:
        return WorkerHealth(WorkerState.SERVING, successes=1)
    # It has nothing that it could drain.
    return UNKNOWN_HEALTH.after(seen, HealthSettings())


def _state(health: WorkerHealth, settings: HealthSettings) -> WorkerState:
    if health.unanswered >= settings.lost_after:
        return WorkerState.LOST
    if health.failures >= settings.draining_after and health.state is WorkerState.SERVING:
        return WorkerState.DRAINING
    if health.successes >= settings.serving_after:
        return WorkerState.SERVING
    return health.state


def effective_states(beliefs: Sequence[WorkerHealth]) -> list[WorkerState]:
    """What the policy gets of each server.

    Where most of those that are not lost are late, the cause is common to them (the network, a
    machine that is full, the proxy), and to drain them all would refuse what they can still serve.
    So none is drained for that; who says that it is unwell, or is lost, is believed.
    """
    known = [one for one in beliefs if one.state is not WorkerState.LOST]
    most_late = 2 * sum(one.late > 0 for one in known) > len(known)
    return [
        WorkerState.SERVING
        if most_late and one.state is WorkerState.DRAINING and one.only_late
        else one.state
        for one in beliefs
    ]


STALL_TICK = 0.1
"""Seconds from one look at the clock to the next."""


class LoopStalls:
    """Measures for how long the event loop was late: then no answer could be read.

    Its own work, or other processes on the same cores, may be what holds it up.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._total = 0.0
        self._due = self._loop.time() + STALL_TICK

    @property
    def seconds(self) -> float:
        """In all, the stall that has just ended included."""
        return self._total + max(0.0, self._loop.time() - self._due)

    async def run(self) -> None:
        """Measure for ever."""
        self._due = self._loop.time() + STALL_TICK
        while True:
            await asyncio.sleep(max(0.0, self._due - self._loop.time()))
            now = self._loop.time()
            self._total += max(0.0, now - self._due)
            self._due = now + STALL_TICK


LOG = logging.getLogger("equipoise.route")
HEALTH_PATH = "/health"
RECHECK_FRACTION = 0.1
"""Part of the interval from one question to the next, while it is not clear how a worker is."""
MIN_INTERVAL = 0.02
"""Seconds: a short interval must not become a busy loop while a worker is in doubt."""
MAX_STALLED_FRACTION = 0.25
"""Part of the time for an answer; if the loop was late for more of it, a missing answer says
nothing of the server."""


class HealthBoard:
    """What is believed of all servers; the dispatcher is told what follows from it.

    Args:
        dispatcher: every change is reported to it.

    Attributes:
        beliefs: of each server that was asked, by its number.
    """

    def __init__(self, dispatcher: RequestDispatcher) -> None:
        self._dispatcher = dispatcher
        self._names = count()
        self._workers: dict[int, Sequence[int]] = {}
        self.beliefs: dict[int, WorkerHealth] = {}
        self._states: dict[int, WorkerState] = {}

    def add(self, workers: Sequence[int]) -> int:
        """A server that these workers share; returns its number."""
        server = next(self._names)
        self._workers[server] = workers
        return server

    def set_workers(self, server: int, workers: Sequence[int]) -> None:
        """These share it from now on: those that are new get the state that it has."""
        self._workers[server] = workers
        state = self._states.get(server)
        if state is not None:
            for worker in workers:
                self._dispatcher.set_health(worker, state)

    def remove(self, server: int) -> None:
        """It is asked no more; its workers keep the state that they have."""
        for known in (self._workers, self.beliefs, self._states):
            known.pop(server, None)

    def update(self, server: int, health: WorkerHealth) -> None:
        """It was asked; what is made of others may change with it."""
        self.beliefs[server] = health
        states = effective_states(list(self.beliefs.values()))
        before, self._states = self._states, dict(zip(self.beliefs, states, strict=True))
        for one, state in self._states.items():
            if state is not before.get(one):
                for worker in self._workers[one]:
                    self._dispatcher.set_health(worker, state)

    def state(self, server: int) -> WorkerState:
        """What the dispatcher was told of it last."""
        return self._states.get(server, UNKNOWN_HEALTH.state)


class HealthMonitor:
    """Asks one server, for all workers that it serves as.

    Args:
        client: to ask with.
        url: of the server.
        workers: numbers of the workers that have this url.
        dispatcher: knows when something of an answer came last.
        board: gets the results.
        stalls: of the loop that asks.
        settings: how often, and what is concluded.
    """

    def __init__(
        self,
        client: aiohttp.ClientSession,
        url: str,
        workers: Sequence[int],
        dispatcher: RequestDispatcher,
        board: HealthBoard,
        stalls: LoopStalls,
        settings: HealthSettings,
    ) -> None:
        self._client, self._url, self._workers = client, url, workers
        self._dispatcher, self._settings, self._stalls = dispatcher, settings, stalls
        self._board, self._number = board, board.add(workers)
        self._doubt = asyncio.Event()
        self.health = UNKNOWN_HEALTH

    def check_soon(self) -> None:
        """A request came to nothing there: ask at once."""
        self._doubt.set()

    def set_workers(self, workers: Sequence[int]) -> None:
        """It serves as these from now on; what is known of it stays, and holds for all of them."""
        self._workers = workers
        self._board.set_workers(self._number, workers)

    def close(self) -> None:
        """Have nothing that was found count any more."""
        self._board.remove(self._number)

    async def run(self) -> None:
        """Ask for ever."""
        first_health = initial_health(await self._ask())
        LOG.warning("%s: found %s", self._url, first_health.state.value)
        self._conclude(first_health)
        while True:
            await self._pause()
            self._doubt.clear()
            before = self._board.state(self._number)
            self._conclude(self.health.after(await self._ask(), self._settings))
            now = self._board.state(self._number)
            if now is not before:
                LOG.warning("%s: %s, was %s", self._url, now.value, before.value)

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
        began, stalled = asyncio.get_running_loop().time(), self._stalls.seconds
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
        except TimeoutError:
            stalled = self._stalls.seconds - stalled
            if stalled > MAX_STALLED_FRACTION * self._settings.timeout:
                LOG.warning("%s: not asked in time, this process stood still", self._url)
                return HealthCheckResult.PROXY_LATE
            # A server that is busy may answer late, and be well: tokens are an answer too.
            last_answer = max(self._dispatcher.workers[one].last_answer_at for one in self._workers)
            return HealthCheckResult.BUSY if last_answer > began else HealthCheckResult.SILENT
        except (aiohttp.ClientError, OSError):
            return HealthCheckResult.NO_CONNECTION

    def _conclude(self, health: WorkerHealth) -> None:
        self.health = health
        self._board.update(self._number, health)
