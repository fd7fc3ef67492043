"""Bounded waits: a part of a task that a timeout or another task ends, and the first of events."""

import asyncio
from enum import Enum, unique
from types import TracebackType


@unique
class CancelReason(Enum):
    """Why a part of a task was ended."""

    NO_FREE_SLOT = "no worker had a free slot in time"
    FIRST_TOKEN = "the worker made no first token in time"
    TOKEN = "the worker made no further token in time"
    TOTAL = "the request took too long altogether"
    BODY = "the body of the request did not arrive in time"
    CLIENT_STALLED = "the client did not take what was sent to it"
    LOST_BEFORE_FIRST_TOKEN = "the worker was lost before the first token"
    WORKER_LOST = "the worker was lost"
    SHUTTING_DOWN = "the proxy is shutting down"


async def wait_for_any(*events: asyncio.Event, timeout: float | None = None) -> None:
    """Wait until one of them is set, or `timeout` seconds are over."""
    waits = [asyncio.create_task(one.wait()) for one in events]
    try:
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waits:
            one.cancel()


class ScopeCancelled(Exception):
    """Raised where a scope is left."""

    def __init__(self, reason: CancelReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class CancelScope:
    """Ends what runs within it, by a deadline that can be moved at next to no cost, or at once.

    To be called by the event loop's own thread.

    Args:
        end: time of the loop by which all has to be over; None: nothing has.

    Raises: ScopeCancelled, where it is left.
    """

    def __init__(self, end: float | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._end = float("inf") if end is None else end
        self._due, self._late = self._end, CancelReason.TOTAL
        self._timer: asyncio.TimerHandle | None = None
        self._reason: CancelReason | None = None
        self._over = False

    async def __aenter__(self) -> "CancelScope":
        await self._timeout.__aenter__()
        self._arm()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Before the timeout is left: a `cancel` that comes later must not reschedule it.
        self._over = True
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            if self._reason is None:
                raise  # not this scope's timeout: one of the code within
            raise ScopeCancelled(self._reason) from None

    def set_timeout(self, seconds: float, late: CancelReason) -> None:
        """From now on it ends after so many seconds, unless this is called again before."""
        self._due, self._late = self._loop.time() + seconds, late
        if self._due >= self._end:
            self._due, self._late = self._end, CancelReason.TOTAL
        # A timer that is early looks again when it rings: the usual case is that it never does.
        if self._timer is None or self._due < self._timer.when():
            self._arm()

    def cancel(self, reason: CancelReason) -> None:
        """End it at once; the first reason counts, and none once it has been left."""
        if self._reason is None and not self._over:
            self._reason = reason
            self._timeout.reschedule(self._loop.time())

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._due != float("inf"):
            self._timer = self._loop.call_at(self._due, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._loop.time() < self._due:
            self._arm()
        else:
            self.cancel(self._late)
