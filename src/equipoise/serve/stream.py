"""Passes one stream on from a worker to a client, event by event."""

import asyncio
from collections.abc import Callable

import aiohttp
from aiohttp import web

from equipoise.serve.desk import Desk
from equipoise.serve.errand import Errand
from equipoise.serve.events import EventReader, Usage
from equipoise.serve.outgoing import Outgoing
from equipoise.serve.scope import Reason, Scope
from equipoise.serve.ticket import Bound
from equipoise.serve.upstream import FAILURES, AttemptFailed, is_framed

MOST_PRELUDE = 1 << 16
"""Bytes that are kept back until the first token, because until then all can be tried again."""

CLOSING = 1.0
"""Seconds that a worker may take to close behind `[DONE]`; its connection is used again then."""


class Stream:
    """Of one attempt.

    Args:
        desk: told of tokens.
        errand: the request.
        bound: the binding by which it was sent.
        scope: what runs here runs within it.
        outgoing: towards the client.
        patience: seconds from one token to the next, and for the client to take one.
    """

    def __init__(
        self,
        desk: Desk,
        errand: Errand,
        bound: Bound,
        scope: Scope,
        outgoing: Outgoing,
        patience: float,
    ) -> None:
        self._desk, self._errand, self._bound = desk, errand, bound
        self._scope, self._outgoing, self._patience = scope, outgoing, patience
        self._reader = EventReader()
        self._prelude = b""
        self._loop = asyncio.get_running_loop()

    async def pass_on(
        self,
        answer: aiohttp.ClientResponse,
        completed: Callable[[Errand, Bound, Usage], None],
    ) -> web.StreamResponse:
        """All of it; `completed` is called when it has come.

        Raises: AttemptFailed where it must not be passed on any more; aiohttp's errors where the
        worker breaks off; ClientLeft.
        """
        while chunk := await self._next(answer):
            await self._pass(answer, self._reader.feed(chunk), self._loop.time())
        if not is_framed(answer) and not self._reader.ended:
            raise aiohttp.ServerDisconnectedError("the stream has no end")
        rest = self._prelude + self._reader.rest()
        if self._outgoing.response is None:
            self._check_beginning()
            await self._begin(answer)
        self._errand.call.output = self._reader.made
        completed(self._errand, self._bound, self._reader.usage)
        self._scope.within(self._patience, Reason.STALLED)
        if rest:
            await self._outgoing.write(rest)
        return await self._outgoing.end()

    def _check_beginning(self) -> None:
        """An answer with nothing in it, or with an error of the worker's, is none."""
        if self._reader.failed:
            raise AttemptFailed("its stream began with an error")
        if not self._reader.made and not self._reader.ended:
            raise AttemptFailed("its stream is empty")

    async def _next(self, answer: aiohttp.ClientResponse) -> bytes:
        """What comes next; nothing behind `[DONE]`, however the worker closes then, or does not."""
        ended = self._reader.ended
        try:
            async with asyncio.timeout(CLOSING if ended else None):
                return await answer.content.readany()
        except (*FAILURES, TimeoutError):
            if ended:
                return b""
            raise

    async def _pass(self, answer: aiohttp.ClientResponse, whole: bytes, came: float) -> None:
        """Pass whole events on, once there is a token among those that have come."""
        if self._outgoing.response is None:
            self._prelude += whole
            if not self._reader.made and len(self._prelude) < MOST_PRELUDE:
                return
            whole, self._prelude = self._prelude, b""
            await self._begin(answer)
        call = self._errand.call
        call.output = self._reader.made
        self._desk.made(self._errand.ticket, self._reader.made)
        self._scope.within(self._patience, Reason.STALLED)
        if whole:
            await self._outgoing.write(whole)
        self._scope.within(self._patience, Reason.TOKEN)
        if call.first is None:
            call.first = self._loop.time()
            call.passing = call.first - came

    async def _begin(self, answer: aiohttp.ClientResponse) -> None:
        if not self._desk.begin(self._errand.ticket, self._bound):
            raise AttemptFailed(Reason.UNBOUND.value)
        await self._outgoing.begin(answer)
