"""Connections from clients: limits on heads and bodies, and the stream of an answer.

aiohttp bounds a line of a head and the wait for the next request. A head that comes a byte at a
time, or never ends, is bounded here. The head of an answer goes out with its first bytes, or with
a comment where a stream has been silent for long.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum, unique
from typing import Any

from aiohttp import ClientResponse, web
from aiohttp.http_exceptions import LineTooLong

from equipoise.serve.cancel_scope import CancelReason, CancelScope, ScopeCancelled
from equipoise.serve.headers import REQUEST_ID, client_response_headers
from equipoise.serve.outcomes import (
    ErrorResponse,
    RequestOutcome,
    RequestRefused,
    bad_request,
    overloaded,
)
from equipoise.serve.settings import Limits, Timeouts

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
BODY_TIMEOUT = ErrorResponse(408, RequestOutcome.TIMED_OUT, CancelReason.BODY.value, "timeout")


class BodyReader:
    """Bounds what the bodies of all requests take together.

    Attributes:
        buffered_bytes: kept now.
    """

    def __init__(self, limits: Limits, timeouts: Timeouts) -> None:
        self._limits, self._timeouts = limits, timeouts
        self.buffered_bytes = 0

    async def read(self, request: web.BaseRequest) -> bytes:
        """All of it; to be released by `release`.

        Raises: RequestRefused: 413 too long, 408 too slow, 415 compressed, 429 no room, 400 broken.
        """
        self._check_head(request)
        body = bytearray()
        try:
            async with CancelScope() as scope:
                scope.set_timeout(self._timeouts.body, CancelReason.BODY)
                while piece := await request.content.readany():
                    body += piece
                    # Counted as they come: Content-Length may lie, and many slow bodies add up.
                    self.buffered_bytes += len(piece)
                    self._check(len(body))
        except BaseException as error:
            self.release(len(body))
            raise _refusal(error) from None
        return bytes(body)

    def release(self, size: int) -> None:
        """So many bytes are not kept any more."""
        self.buffered_bytes -= size

    def _check(self, size: int) -> None:
        if size > self._limits.body:
            raise _too_large(self._limits.body)
        if self.buffered_bytes > self._limits.buffered:
            raise overloaded("the proxy has no room for another body")

    def _check_head(self, request: web.BaseRequest) -> None:
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise bad_request("the body has to come as it is", 415, "unsupported_encoding")
        if (request.content_length or 0) > self._limits.body:
            raise _too_large(self._limits.body)
        expected = request.headers.get("Expect")
        if expected is None:
            return
        if expected.lower() != "100-continue":
            raise bad_request("only 100-continue can be expected", 417, "expectation_failed")
        if request.transport is not None:
            request.transport.write(CONTINUE)


def _too_large(most: int) -> RequestRefused:
    message = f"the body is longer than {most} bytes"
    return RequestRefused(ErrorResponse(413, RequestOutcome.TOO_LARGE, message, "body_too_large"))


def _refusal(error: BaseException) -> BaseException:
    if isinstance(error, ScopeCancelled):
        return RequestRefused(BODY_TIMEOUT)
    if isinstance(error, web.RequestPayloadError):
        return bad_request("the body is not framed as HTTP/1.1 frames it")
    return error


LOG = logging.getLogger("equipoise.route")
LINGER = 2.0
"""Seconds for which an unwanted body is read, so that the client gets to read the error."""
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
OnOutcome = Callable[[RequestOutcome], None]

HEAD_TOO_LARGE = ErrorResponse(
    431, RequestOutcome.TOO_LARGE, "the head of the request is too long", "header_too_large"
)
HEAD_TIMEOUT = ErrorResponse(
    408, RequestOutcome.TIMED_OUT, "the head of the request came too slowly", "timeout"
)
NOT_HTTP = ErrorResponse(
    400, RequestOutcome.BAD_REQUEST, "this is not a request of HTTP/1.1", "invalid_request"
)
PROXY_FAILED = ErrorResponse(500, RequestOutcome.FAILED, "the proxy failed", "internal_error")


class ClientListener(web.Server):
    """Makes a `ClientConnection` for each client.

    Args:
        handler: answers a request.
        limits: see `Limits`.
        timeouts: see `Timeouts`.
        on_outcome: of requests that did not come as far as the handler.
    """

    def __init__(
        self, handler: Handler, limits: Limits, timeouts: Timeouts, on_outcome: OnOutcome
    ) -> None:
        super().__init__(
            handler,
            request_factory=_make_request,
            # A client that goes takes its request with it.
            handler_cancellation=True,
        )
        self.limits, self.timeouts, self.on_outcome = limits, timeouts, on_outcome

    def __call__(self) -> "ClientConnection":
        """For a client that has connected."""
        return ClientConnection(self, asyncio.get_running_loop())


class ClientConnection(web.RequestHandler):
    """Of one client."""

    __slots__ = ("_heading", "_listener", "_pending", "_timer")

    def __init__(self, listener: ClientListener, loop: asyncio.AbstractEventLoop) -> None:
        longest = listener.limits.header
        super().__init__(
            listener,
            loop=loop,
            keepalive_timeout=listener.timeouts.idle,
            access_log=None,  # type: ignore[arg-type]  # None is how aiohttp writes none
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
            self._listener.on_outcome(RequestOutcome.OVERLOADED)
            self.force_close()
            return
        self._start_head_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio."""
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self._heading:
            # What is counted has not made a whole head: a body may follow it in the same piece.
            if self._pending > self._listener.limits.header:
                self._refuse(HEAD_TOO_LARGE)
                return
            self._pending += len(data)
            if self._timer is None:
                self._start_head_timer()
        super().data_received(data)
        # Now, not when its task runs: uvloop brings more of a body in the same turn of the loop.
        if self._heading and self._messages:
            self.head_received()

    def head_received(self) -> None:
        """The head of a request has come."""
        self._heading, self._pending = False, 0
        self._stop_head_timer()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """See aiohttp; drops a client that does not read the whole response in time."""
        try:
            async with asyncio.timeout(self._listener.timeouts.token):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            if self.transport is not None:
                self.transport.abort()
            raise ConnectionError("the client did not take what was sent to it") from None
        finally:
            # A head follows the body, not the answer: of a request that was refused early the
            # body still comes, and is no head that is too long.
            request.content.on_eof(self._expect_head)

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
        error_response = PROXY_FAILED if status >= 500 else NOT_HTTP
        if isinstance(exc, LineTooLong) or "headers" in (message or "").lower():
            error_response = HEAD_TOO_LARGE
        self._listener.on_outcome(error_response.outcome)
        response = web.Response(
            status=error_response.status,
            body=error_response.body(),
            content_type="application/json",
        )
        response.force_close()
        return response

    def _expect_head(self) -> None:
        """What comes from now on is the head of the next request."""
        self._heading = True

    def _start_head_timer(self) -> None:
        self._timer = self._loop.call_later(self._listener.timeouts.header, self._head_timed_out)

    def _stop_head_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_timed_out(self) -> None:
        self._timer = None
        if self._heading:
            self._refuse(HEAD_TIMEOUT)

    def _refuse(self, error_response: ErrorResponse) -> None:
        """Say so, without a request to answer, and close."""
        self._stop_head_timer()
        self._listener.on_outcome(error_response.outcome)
        body = error_response.body()
        head = (
            f"HTTP/1.1 {error_response.status} \r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        if self.transport is not None:
            self.transport.write(head.encode() + body)
        self.force_close()


def _make_request(
    message: Any, payload: Any, protocol: Any, writer: Any, task: "asyncio.Task[None]"
) -> web.BaseRequest:
    assert isinstance(protocol, ClientConnection)
    protocol.head_received()
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop)


ERROR_EVENT_TIMEOUT = 5.0
"""Seconds for a client to take the event that says why its stream ends."""
SERVER_NAME = "equipoise"


class ClientDisconnected(Exception):
    """Nobody is there any more to pass an answer on to."""


HEARTBEAT = b": waiting\n\n"
"""A comment of server-sent events, which clients skip."""
EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
EARLY_HEADERS = (
    ("Content-Type", "text/event-stream; charset=utf-8"),
    ("Cache-Control", "no-cache"),
)


@unique
class StreamPhase(Enum):
    """What a client has got of its answer."""

    NOTHING_SENT = "nothing"
    """A status can still be chosen, and another worker."""
    HELD_OPEN = "a head and comments"
    """Its status is 200, and errors are events; another worker can still be chosen."""
    ANSWERING = "a part of one worker's answer"
    """No other answer can follow it."""


NOTHING_SENT, HELD_OPEN, ANSWERING = StreamPhase


class ClientStream:
    """What one client gets of one answer.

    Args:
        request: the client's.
        name: its id.
        own_headers: of the proxy, beside the worker's.

    Attributes:
        phase: see `StreamPhase`.
    """

    def __init__(self, request: web.BaseRequest, name: str, own_headers: Mapping[str, str]) -> None:
        self._request, self._name, self._own_headers = request, name, own_headers
        self._loop = asyncio.get_running_loop()
        self._response: web.StreamResponse | None = None
        self._interval = 0.0
        self._last, self._written_at = b"\n\n", self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None
        self.phase = NOTHING_SENT

    def hold_open(self, interval: float) -> None:
        """Send a comment whenever nothing was sent for so many seconds, until it is closed.

        The first one brings the head, with status 200: what waits between the client and the proxy
        closes connections that are silent, and whoever waits for a worker would begin anew. What
        is refused sooner than that keeps its status.
        """
        self._interval = interval
        self._timer = self._loop.call_later(interval, self._tick)

    def close(self) -> None:
        """Send no more comments."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._interval = 0.0

    async def begin(self, answer: ClientResponse) -> None:
        """Send the head, if it has not gone out already; from now on it is this answer's."""
        await self._settle()
        before, self.phase = self.phase, ANSWERING
        if before is NOTHING_SENT:
            headers = client_response_headers(answer.headers, self._name)
            await self._send_head(answer.status, answer.reason, headers)

    async def write(self, data: bytes) -> None:
        """Send so many bytes; waits while the client takes none."""
        assert self._response is not None
        self._last, self._written_at = data, self._loop.time()
        try:
            await self._response.write(data)
        except ConnectionError as error:
            raise ClientDisconnected from error

    async def finish(self) -> web.StreamResponse:
        """It is complete."""
        self.close()
        assert self._response is not None
        try:
            await self._response.write_eof()
        except ConnectionError as error:
            raise ClientDisconnected from error
        return self._response

    async def end_with(self, events: bytes) -> web.StreamResponse:
        """End it by these events, such as one that says why it is not complete."""
        try:
            async with CancelScope() as scope:
                scope.set_timeout(ERROR_EVENT_TIMEOUT, CancelReason.CLIENT_STALLED)
                await self._settle()
                await self.write(events)
                return await self.finish()
        except ScopeCancelled:
            raise ClientDisconnected from None

    def abort(self) -> None:
        """The client takes nothing: close its connection."""
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _send_head(
        self, status: int, reason: str | None, headers: Sequence[tuple[str, str]]
    ) -> None:
        self._response = web.StreamResponse(
            status=status, reason=reason, headers=[*headers, ("Server", SERVER_NAME)]
        )
        self._response.headers.update(self._own_headers)
        try:
            await self._response.prepare(self._request)
        except ConnectionError as error:
            raise ClientDisconnected from error

    async def _settle(self) -> None:
        """Wait for a comment that is being sent: a head must be whole before what follows it."""
        if self._beat is not None:
            await self._beat

    def _tick(self) -> None:
        self._timer = None
        silent = self._loop.time() - self._written_at
        if silent >= self._interval and self._last.endswith(EVENT_ENDS):
            self._beat = asyncio.create_task(self._send_comment())
            self._beat.add_done_callback(self._beat_sent)
        else:
            # Not amid an event, of which a very long one is passed on in pieces.
            self._rearm(max(self._interval - silent, self._interval / 8))

    async def _send_comment(self) -> None:
        if not self._interval:
            return  # closed in the turn of the loop in which this began
        try:
            if self.phase is NOTHING_SENT:
                self.phase = HELD_OPEN
                await self._send_head(200, None, [*EARLY_HEADERS, (REQUEST_ID, self._name)])
            await self.write(HEARTBEAT)
        except ClientDisconnected:
            LOG.debug("%s: its client has gone, which ends its task", self._name)

    def _beat_sent(self, task: "asyncio.Task[None]") -> None:
        self._beat = None
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error("%s: no comment could be sent", self._name, exc_info=error)
        self._rearm(self._interval)

    def _rearm(self, seconds: float) -> None:
        if self._interval:
            self._timer = self._loop.call_later(seconds, self._tick)
