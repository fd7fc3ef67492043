"""A stream towards a client: its head goes out with its first bytes, and not before."""

from aiohttp import ClientResponse, web

from equipoise.serve.headers import towards_client
from equipoise.serve.outcomes import Fault
from equipoise.serve.scope import Interrupted, Reason, Scope

FAREWELL = 5.0
"""Seconds for a client to take the event that says why its stream ends."""
NAME = "equipoise"


class ClientLeft(Exception):
    """Nobody is there any more to pass an answer on to."""


class Outgoing:
    """What one client gets of one answer.

    Args:
        request: the client's.
        name: its id.

    Attributes:
        response: None until something has been passed on.
    """

    def __init__(self, request: web.BaseRequest, name: str) -> None:
        self._request, self._name = request, name
        self.response: web.StreamResponse | None = None

    async def begin(self, answer: ClientResponse) -> None:
        """Send the head."""
        response = web.StreamResponse(
            status=answer.status,
            reason=answer.reason,
            headers=[*towards_client(answer.headers, self._name), ("Server", NAME)],
        )
        self.response = response
        try:
            await response.prepare(self._request)
        except ConnectionError as error:
            raise ClientLeft from error

    async def write(self, data: bytes) -> None:
        """Send so many bytes; waits while the client takes none."""
        assert self.response is not None
        try:
            await self.response.write(data)
        except ConnectionError as error:
            raise ClientLeft from error

    async def end(self) -> web.StreamResponse:
        """It is complete."""
        assert self.response is not None
        try:
            await self.response.write_eof()
        except ConnectionError as error:
            raise ClientLeft from error
        return self.response

    async def break_off(self, fault: Fault) -> web.StreamResponse:
        """Say why it is not complete, and end it."""
        try:
            async with Scope() as scope:
                scope.within(FAREWELL, Reason.STALLED)
                await self.write(fault.event())
                return await self.end()
        except Interrupted:
            raise ClientLeft from None

    def abandon(self) -> None:
        """The client takes nothing: close its connection."""
        if self._request.transport is not None:
            self._request.transport.abort()
