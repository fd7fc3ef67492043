"""Reads large bodies in a process of its own, so that no stream waits until one is read.

A thread would not do: the JSON decoder holds the interpreter's lock for as long as a body takes.
Over the pipes go a line of JSON that says what follows, and the body as it is.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, BinaryIO

from equipoise.serve.openai_protocol import UNREAD_PATHS, ParsedRequest, parse_request
from equipoise.serve.outcomes import (
    ErrorResponse,
    RequestOutcome,
    RequestRefused,
    bad_request,
    overloaded,
)
from equipoise.serve.settings import RANK_HEADER

LOG = logging.getLogger("equipoise.route")
LARGE_BODY = 1 << 18
"""Bytes from which a body is read elsewhere: up to there the loop stops for a few milliseconds."""
PARSE_TIMEOUT = 30.0
"""Seconds for a large body, those before it included."""
CLOSE_TIMEOUT = 2.0
"""Seconds for the process to end by itself."""
PIECE = 1 << 18
"""Bytes per write, between which the loop does other things."""
NICENESS = 5
"""Where there is one core only, streams go first."""
STARTS = 2
"""Processes that one body gets: one may have died while idle, and a body may kill what reads it."""
PARSER_FAILED = ErrorResponse(
    500, RequestOutcome.FAILED, "the proxy could not read the body", "internal_error"
)


class BodyParser:
    """Parses bodies, the large ones one after the other; to be closed."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._killed: set[asyncio.Task[int]] = set()
        self._lock = asyncio.Lock()

    async def parse(self, path: str, body: bytes, headers: Mapping[str, str]) -> ParsedRequest:
        """Raises RequestRefused: 400 as `parse_request`, 429 where large ones pile up, 500."""
        if len(body) < LARGE_BODY or path in UNREAD_PATHS:
            return parse_request(path, body, headers)
        rank = headers.get(RANK_HEADER)
        head = {"path": path, "headers": {} if rank is None else {RANK_HEADER: rank}}
        try:
            async with asyncio.timeout(PARSE_TIMEOUT), self._lock:
                reply, new_body = await self._ask(head, body)
        except TimeoutError:
            raise overloaded("the proxy has too many large bodies to read") from None
        if "refused" in reply:
            raise bad_request(**reply["refused"])
        fields = reply["parsed"]
        fields["blocks"] = tuple(fields["blocks"])
        return ParsedRequest(**fields, body=new_body or body)

    async def close(self) -> None:
        """End the process; bounded."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()  # which it takes for its end
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await process.wait()
            except TimeoutError:
                self._kill(process)
        if self._killed:
            await asyncio.wait(self._killed, timeout=CLOSE_TIMEOUT)

    async def _ask(self, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        for _ in range(STARTS):
            process = self._process or await self._start()
            # Until the reply is whole the pipes are in use: whoever is cut off leaves no process.
            self._process = None
            try:
                reply = await _exchange(process, head, body)
            except (OSError, EOFError, ValueError) as error:
                LOG.error("the process that reads large bodies failed", exc_info=error)
                self._kill(process)
            except BaseException:
                self._kill(process)
                raise
            else:
                self._process = process
                return reply
        raise RequestRefused(PARSER_FAILED)

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the proxy, which ends this process itself
        )

    def _kill(self, process: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):
            process.kill()
        # Somebody has to wait until it is gone, and a task that is being cancelled cannot.
        task = asyncio.create_task(process.wait())
        self._killed.add(task)
        task.add_done_callback(self._killed.discard)


async def _exchange(
    process: asyncio.subprocess.Process, head: dict[str, Any], body: bytes
) -> tuple[dict[str, Any], bytes]:
    """The reply, and the body that replaces the client's, if any."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None
    stdin.write(json.dumps({**head, "size": len(body)}).encode() + b"\n")
    for start in range(0, len(body), PIECE):
        stdin.write(memoryview(body)[start : start + PIECE])
        await stdin.drain()
    reply = json.loads(await stdout.readline())
    return reply, await stdout.readexactly(reply["size"])


def serve_pipes(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer until the other side closes its end."""
    while line := requests.readline():
        head = json.loads(line)
        reply, body = _parse(head, requests.read(head["size"]))
        replies.write(json.dumps({**reply, "size": len(body)}).encode() + b"\n" + body)
        replies.flush()


def _parse(head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        parsed = parse_request(head["path"], body, head["headers"])
    except RequestRefused as refusal:
        error = refusal.error_response
        what = {"message": error.message, "status": error.status, "code": error.code}
        return {"refused": what}, b""
    fields = asdict(parsed)
    del fields["body"]
    return {"parsed": fields}, b"" if parsed.body is body else parsed.body


if __name__ == "__main__":
    os.nice(NICENESS)
    try:
        serve_pipes(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        sys.exit(1)  # the proxy has ended
