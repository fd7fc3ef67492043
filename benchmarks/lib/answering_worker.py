"""A server of the OpenAI API that answers at once: what is left is what stands before it.

Started by `proxy.py`; says its port on standard output. Written on bare sockets, so
that it is as quick as can be.
"""

import asyncio
import json

EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "token"}}]}\n\n'
TOKENS = 16
STREAM = EVENT * TOKENS + b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 8, "completion_tokens": TOKENS, "total_tokens": TOKENS + 8}
RESPONSE = json.dumps({"choices": [{"message": {"content": "token"}}], "usage": USAGE}).encode()


def answer(kind: bytes, body: bytes) -> bytes:
    """A whole answer of HTTP."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, for as long as it lasts."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                writer.write(answer(b"text/plain", b""))
                continue
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(length)
            streamed = b'"stream": true' in body
            kind = b"text/event-stream" if streamed else b"application/json"
            writer.write(answer(kind, STREAM if streamed else RESPONSE))
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main() -> None:
    """Serve until killed."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
