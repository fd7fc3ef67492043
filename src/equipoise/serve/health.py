"""Whether a worker is well: by what it answers when it is asked, with hysteresis.

Asks the servers how they are, and tells the desk.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique

import aiohttp

from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.dispatcher import Desk
from equipoise.serve.settings import HealthSettings


@unique
class Seen(Enum):
    """What came of asking a worker once."""

    WELL = "well"
    UNWELL = "unwell"
    """It answered, and not well; or it did not, but goes on with what it has."""
    SILENT = "silent"
    """No answer, or nobody there."""


@dataclass(frozen=True)
class Health:
    """What is believed of a worker, and what speaks against it.

    Attributes:
        state: what the policy is told.
        well: good answers in a row.
        bad: questions without a good answer in a row.
        silent: questions without any answer in a row.
    """

    state: WorkerState
    well: int = 0
    bad: int = 0
    silent: int = 0

    def after(self, seen: Seen, settings: HealthSettings) -> "Health":
        """What is believed after another question."""
        match seen:
            case Seen.WELL:
                found = Health(self.state, well=self.well + 1)
            case Seen.UNWELL:
                found = Health(self.state, bad=self.bad + 1)
            case Seen.SILENT:
                found = Health(self.state, bad=self.bad + 1, silent=self.silent + 1)
        return replace(found, state=_state(found, settings))

    @property
    def doubtful(self) -> bool:
        """Whether what is seen and what is believed differ: it is asked again soon."""
        if self.state is WorkerState.SERVING:
            return self.bad > 0
        return self.well > 0 or (self.state is WorkerState.DRAINING and self.silent > 0)


UNKNOWN = Health(WorkerState.LOST)
"""What is believed before anybody has asked."""


def first(seen: Seen) -> Health:
    """The first answer is believed at once: there is nothing to hold on to."""
    match seen:
        case Seen.WELL:
            return Health(WorkerState.SERVING, well=1)
        case Seen.UNWELL:
            return Health(WorkerState.LOST, bad=1)  # it has nothing that it could drain
        case Seen.SILENT:
            return Health(WorkerState.LOST, bad=1, silent=1)


def _state(found: Health, settings: HealthSettings) -> WorkerState:
    if found.silent >= settings.lost_after:
        return WorkerState.LOST
    if found.bad >= settings.draining_after and found.state is WorkerState.SERVING:
        return WorkerState.DRAINING
    if found.well >= settings.serving_after:
        return WorkerState.SERVING
    return found.state


LOG = logging.getLogger("equipoise.route")
PATH = "/health"
IN_DOUBT = 0.1
"""Part of the interval from one question to the next, while it is not clear how a worker is."""
SHORTEST = 0.02


class Monitor:
    """Asks one server, for all workers that it serves as.

    Args:
        client: to ask with.
        url: of the server.
        workers: numbers of the workers that have this url.
        desk: told of every change.
        settings: how often, and what is concluded.
    """

    def __init__(
        self,
        client: aiohttp.ClientSession,
        url: str,
        workers: Sequence[int],
        desk: Desk,
        settings: HealthSettings,
    ) -> None:
        self._client, self._url, self._workers = client, url, workers
        self._desk, self._settings = desk, settings
        self._doubt = asyncio.Event()
        self.health = UNKNOWN

    def doubt(self) -> None:
        """A request came to nothing there: ask at once."""
        self._doubt.set()

    async def watch(self) -> None:
        """Ask for ever."""
        found = first(await self._ask())
        LOG.warning("%s: found %s", self._url, found.state.value)
        self._conclude(found)
        while True:
            await self._pause()
            self._doubt.clear()
            before = self.health.state
            self._conclude(self.health.after(await self._ask(), self._settings))
            if self.health.state is not before:
                LOG.warning("%s: %s, was %s", self._url, self.health.state.value, before.value)

    async def _pause(self) -> None:
        seconds = self._settings.interval
        if self.health.doubtful:
            await asyncio.sleep(max(SHORTEST, seconds * IN_DOUBT))
            return
        try:
            async with asyncio.timeout(seconds):
                await self._doubt.wait()
        except TimeoutError:
            return

    async def _ask(self) -> Seen:
        began = asyncio.get_running_loop().time()
        try:
            async with (
                asyncio.timeout(self._settings.timeout),
                self._client.get(self._url + PATH, allow_redirects=False) as answer,
            ):
                return Seen.WELL if answer.status < 300 else Seen.UNWELL
        except (TimeoutError, aiohttp.ClientError, OSError):
            # A server that is busy may answer late, and be well: tokens are an answer too.
            heard = max(self._desk.workers[one].heard for one in self._workers)
            return Seen.UNWELL if heard > began else Seen.SILENT

    def _conclude(self, health: Health) -> None:
        before, self.health = self.health, health
        if health.state is before.state:
            return
        for worker in self._workers:
            self._desk.change(worker, health.state)
