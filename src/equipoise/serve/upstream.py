"""One HTTP request to one worker, over a new connection or an idle one."""

import io
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import yarl

from equipoise.serve.outcomes import ErrorResponse, RequestOutcome
from equipoise.serve.settings import Limits, Timeouts

LOG = logging.getLogger("equipoise.route")
PIECE = 1 << 16
"""Bytes per read."""
LARGE = 1 << 20
"""Bytes of a body."""
FAILURES = (aiohttp.ClientError, OSError, TimeoutError)
"""What a worker that is gone, or speaks no HTTP, looks like."""


class AttemptFailed(Exception):
    """An attempt came to nothing, and nothing of it has been passed on.

    Attributes:
        answer: the worker's own answer, where it gave one.
    """

    def __init__(self, what: str, answer: "BufferedAnswer | None" = None) -> None:
        super().__init__(what)
        self.answer = answer

    @property
    def error_response(self) -> ErrorResponse:
        """The error response if there is no further attempt."""
        return ErrorResponse(
            502, RequestOutcome.WORKERS_FAILED, f"no worker answered: {self}", "worker_failed"
        )


class BufferedAnswer:
    """An answer that has been read to its end.

    Attributes:
        status: of HTTP.
        headers: as the worker sent them.
        body: all of it.
    """

    def __init__(self, answer: aiohttp.ClientResponse, body: bytes) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self.body = body


def open_client(timeouts: Timeouts) -> aiohttp.ClientSession:
    """One session for all workers; the caller closes it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0),
        # All other waits are bounded by scopes, which know what is waited for.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
        auto_decompress=False,
        read_bufsize=PIECE,
    )


@asynccontextmanager
async def send_request(
    client: aiohttp.ClientSession,
    method: str,
    url: str,
    headers: list[tuple[str, str]],
    body: bytes | None,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer's head has come; its connection is closed unless all of it is read."""
    target = yarl.URL(url, encoded=True)
    # A large one is sent in pieces, between which others have their turn.
    data = io.BytesIO(body) if body is not None and len(body) > LARGE else body
    answer = await client.request(method, target, headers=headers, data=data, allow_redirects=False)
    try:
        yield answer
    finally:
        if answer.content.at_eof():
            answer.release()
        else:
            # A closed connection is how a worker learns that the rest is not wanted.
            answer.close()


async def read_answer(answer: aiohttp.ClientResponse, limits: Limits) -> BufferedAnswer:
    """Raises AttemptFailed where it is longer than it may be."""
    pieces: list[bytes] = []
    size = 0
    while piece := await answer.content.readany():
        pieces.append(piece)
        size += len(piece)
        if size > limits.answer:
            raise AttemptFailed(f"its answer is longer than {limits.answer} bytes")
    return BufferedAnswer(answer, b"".join(pieces))


def is_stream(answer: aiohttp.ClientResponse) -> bool:
    """Whether it is a stream of events."""
    return answer.content_type == "text/event-stream"


def is_framed(answer: aiohttp.ClientResponse) -> bool:
    """Whether its end can be distinguished from the end of its connection."""
    return "Transfer-Encoding" in answer.headers or "Content-Length" in answer.headers


def describe_failure(error: BaseException) -> str:
    """In one line, without addresses of workers: clients must not learn them."""
    match error:
        case aiohttp.ClientConnectorError() | aiohttp.ServerTimeoutError():
            return "it does not take connections"
        case aiohttp.ClientPayloadError() | aiohttp.ServerDisconnectedError() | OSError():
            return "it broke off the connection"
        case _:
            return "what it answered is not HTTP"
