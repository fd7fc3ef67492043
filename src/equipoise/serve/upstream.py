"""One HTTP request to one worker, over a new connection or an idle one."""

import io
import logging
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import yarl

from equipoise.serve.outcomes import ErrorResponse, RequestOutcome, RequestRefused
from equipoise.serve.settings import Limits, Timeouts

LOG = logging.getLogger("equipoise.route")
PIECE = 1 << 16
"""Bytes per read."""
GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
"""As zlib has it: either of both heads."""
MAX_DECOMPRESSED_BYTES = 1 << 20
"""Bytes at a time: a few that are compressed may stand for very many."""
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


class _Decompressor:
    """Reads an answer that is compressed, piece by piece."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._read = answer.content.readany
        self._zlib = zlib.decompressobj(GZIP_OR_ZLIB)
        self._rest, self._begun = b"", False

    async def read(self) -> bytes:
        """The next bytes; none at its end."""
        while chunk := self._rest or await self._read():
            self._begun = True
            try:
                data = self._zlib.decompress(chunk, MAX_DECOMPRESSED_BYTES)
            except zlib.error as error:
                raise aiohttp.ClientPayloadError("it cannot be decompressed") from error
            self._rest = self._zlib.unconsumed_tail
            if data:
                return data
        if self._begun and not self._zlib.eof:
            raise aiohttp.ClientPayloadError("it ends within what was compressed")
        return b""


def body_reader(answer: aiohttp.ClientResponse) -> Callable[[], Awaitable[bytes]]:
    """Reads the next bytes of an answer, decompressed; none at its end.

    Workers are asked not to compress, and some do all the same, or a proxy before them does.

    Raises: RequestRefused (502) for what cannot be read here: another attempt would be made in
        vain, and each makes the worker generate.
    """
    encoding = answer.headers.get("Content-Encoding", "identity").lower()
    if encoding == "identity":
        return answer.content.readany
    if encoding in ("gzip", "x-gzip", "deflate"):
        return _Decompressor(answer).read
    message = f"the worker compresses its answers by {encoding[:20]!r}, which cannot be read"
    LOG.error("%s", message)
    raise RequestRefused(
        ErrorResponse(502, RequestOutcome.WORKERS_FAILED, message, "worker_failed")
    )


async def read_answer(answer: aiohttp.ClientResponse, limits: Limits) -> BufferedAnswer:
    """Raises AttemptFailed where it is longer than it may be; RequestRefused as `body_reader`."""
    pieces: list[bytes] = []
    size = 0
    read = body_reader(answer)
    while piece := await read():
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
