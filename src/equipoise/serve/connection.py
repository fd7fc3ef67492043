"""Connections of clients: how many there are, how long a request's head takes, and how long it is.

aiohttp bounds a line of a head, and the wait for the next request. A head that comes a byte at a
time, or that never ends, is bounded here.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from equipoise.serve.outcomes import Fault, Outcome
from equipoise.serve.settings import Limits, Patience

LOG = logging.getLogger("equipoise.route")
LINGER = 2.0
"""Seconds for which a body that nobody wants is read, so that the client reads why."""
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Told = Callable[[Outcome], None]

TOO_LONG = Fault(431, Outcome.TOO_LARGE, "the head of the request is too long", "header_too_large")
TOO_LATE = Fault(408, Outcome.TIMED_OUT, "the head of the request came too slowly", "timeout")
NOT_HTTP = Fault(400, Outcome.BAD_REQUEST, "this is not a request of HTTP/1.1", "invalid_request")
BROKEN = Fault(500, Outcome.FAILED, "the proxy failed", "internal_error")


class Listener(web.Server):
    """Makes a `Connection` for each client.

    Args:
        handler: answers a request.
        limits: see `Limits`.
        patience: see `Patience`.
        told: of requests that did not come as far as the handler.
    """

    def __init__(self, handler: Handler, limits: Limits, patience: Patience, told: Told) -> None:
        super().__init__(
            handler,
            request_factory=_begun,
            # A client that goes takes its request with it.
            handler_cancellation=True,
        )
        self.limits, self.patience, self.told = limits, patience, told

    def __call__(self) -> "Connection":
        """For a client that has connected."""
        return Connection(self, asyncio.get_running_loop())


class Connection(web.RequestHandler):
    """Of one client."""

    __slots__ = ("_heading", "_listener", "_pending", "_timer")

    def __init__(self, listener: Listener, loop: asyncio.AbstractEventLoop) -> None:
        longest = listener.limits.header
        super().__init__(
            listener,
            loop=loop,
            keepalive_timeout=listener.patience.idle,
            access_log=None,  # type: ignore[arg-type]  # it is how aiohttp is told to write none
            max_line_size=longest,
            max_field_size=longest,
            lingering_time=LINGER,
            auto_decompress=False,
        )
        self._listener = listener
        self._pending = 0
        self._heading = True
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        super().connection_made(transport)
        if len(self._listener.connections) > self._listener.limits.connections:
            self._listener.told(Outcome.OVERLOADED)
            self.force_close()
            return
        self._expect()

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio."""
        self._rest()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self._heading:
            # What is counted has not made a whole head: a body may follow it in the same piece.
            if self._pending > self._listener.limits.header:
                self._dismiss(TOO_LONG)
                return
            self._pending += len(data)
            if self._timer is None:
                self._expect()
        super().data_received(data)

    def begun(self) -> None:
        """The head of a request has come."""
        self._heading, self._pending = False, 0
        self._rest()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """See aiohttp; who does not take a whole answer in time is left."""
        try:
            async with asyncio.timeout(self._listener.patience.token):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            if self.transport is not None:
                self.transport.abort()
            raise ConnectionError("the client did not take what was sent to it") from None
        finally:
            self._heading = True

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP, and what the handler let through."""
        if status >= 500:
            LOG.error("a request failed", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        fault = BROKEN if status >= 500 else NOT_HTTP
        if isinstance(exc, LineTooLong) or "headers" in (message or "").lower():
            fault = TOO_LONG
        self._listener.told(fault.outcome)
        response = web.Response(
            status=fault.status, body=fault.body(), content_type="application/json"
        )
        response.force_close()
        return response

    def _expect(self) -> None:
        self._timer = self._loop.call_later(self._listener.patience.header, self._late)

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._heading:
            self._dismiss(TOO_LATE)

    def _dismiss(self, fault: Fault) -> None:
        """Say so, without a request to answer, and close."""
        self._rest()
        self._listener.told(fault.outcome)
        body = fault.body()
        head = (
            f"HTTP/1.1 {fault.status} \r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        if self.transport is not None:
            self.transport.write(head.encode() + body)
        self.force_close()


def _begun(
    message: Any, payload: Any, protocol: Any, writer: Any, task: "asyncio.Task[None]"
) -> web.BaseRequest:
    assert isinstance(protocol, Connection)
    protocol.begun()
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop)
