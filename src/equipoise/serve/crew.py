"""Tasks that run as long as the proxy does; none of them dies unheard."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

LOG = logging.getLogger("equipoise.route")
DISMISSAL = 5.0


class Crew:
    """Starts tasks, hears of their failures, and ends them.

    Attributes:
        failed: done as soon as one of them ends by itself, which none should.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed = asyncio.Event()

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until the crew is dismissed."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def dismiss(self) -> None:
        """End all of them; bounded."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=DISMISSAL)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None or task in self._tasks:
            LOG.error("%s ended by itself", task.get_name(), exc_info=error)
            self.failed.set()
