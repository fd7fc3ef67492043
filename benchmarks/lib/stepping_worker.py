"""A server of the OpenAI API whose streams advance together, a token a step, as an engine's do.

    python stepping_worker.py SECONDS

Started by `proxy.py`; says its port on standard output. Written on bare sockets, so that it costs
little beside what is measured.
"""

import asyncio
import json
import sys

CHOICE = {"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}
FIELDS = {"id": "cmpl-0123456789", "object": "chat.completion.chunk", "created": 1700000000}
EVENT = b"data: %s\n\n" % json.dumps({**FIELDS, "model": "m", "choices": [CHOICE]}).encode()
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Steps:
    """Wakes every stream once a step."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._seconds)
            done, self._next = self._next, loop.create_future()
            done.set_result(None)

    async def next(self) -> None:
        """Until the step that is under way is over."""
        await asyncio.shield(self._next)


async def serve(steps: Steps, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, for as long as it lasts."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                writer.write(EMPTY)
                continue
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            tokens = json.loads(await reader.readexactly(length))["max_tokens"]
            writer.write(HEAD)
            for _ in range(tokens):
                await steps.next()
                writer.write(CHUNK)
            writer.write(DONE)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main() -> None:
    """Serve until killed."""
    steps = Steps(float(sys.argv[1]))
    server = await asyncio.start_server(lambda r, w: serve(steps, r, w), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.gather(server.serve_forever(), steps.run())


if __name__ == "__main__":
    asyncio.run(main())
