"""Workers whose answers are odd HTTP, or none, or do not end as they should."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from helpers.fakes.fake_openai_server import Fake
from helpers.harnesses.proxy_setup import (
    ProxySetup,
    chat_request,
    error_of,
    proxied,
    run,
    settings_of,
    tokens_of,
)

from equipoise.serve.settings import HealthSettings

STUBBORN = HealthSettings(interval=3600, timeout=30)
"""Nothing is learnt of a worker but by its requests."""
EVENT = b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = STREAM + b"Transfer-Encoding: chunked\r\n\r\n"
Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text)


@asynccontextmanager
async def proxied_worker(
    answer: Callable[[Reader, Writer], Awaitable[None]], *others: Fake
) -> AsyncIterator[ProxySetup]:
    """A proxy before a server that is healthy and answers requests so, and others."""

    async def serve(reader: Reader, writer: Writer) -> None:
        if (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
            await answer(reader, writer)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    fake = Fake("w0", port=server.sockets[0].getsockname()[1])
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server)
        if others:
            helper = await stack.enter_async_context(proxied(*others))
            others = tuple(helper.fakes)
        workers = settings_of([fake, *others]).workers
        yield await stack.enter_async_context(proxied(workers=workers, health=STUBBORN))


def answer_with(received: bytes) -> Callable[[Reader, Writer], Awaitable[None]]:
    async def answer(reader: Reader, writer: Writer) -> None:
        writer.write(received)
        await writer.drain()

    return answer


def test_stream_closed_without_done_is_an_error() -> None:
    async def work() -> None:
        head = STREAM.replace(b"1.1", b"1.0") + b"\r\n"
        async with proxied_worker(answer_with(head + EVENT)) as setup:
            answer = await setup.post(chat_request(stream=True))
            assert (answer.status, tokens_of(answer.body)) == (200, ["hi"])
            assert error_of(answer.body) is not None

    run(work())


@pytest.mark.parametrize("sends_done", [False, True])
def test_stream_broken_off_after_done_is_complete(sends_done: bool) -> None:
    async def work() -> None:
        received = EVENT + DONE if sends_done else EVENT
        async with proxied_worker(answer_with(CHUNKED + chunk(received))) as setup:
            answer = await setup.post(chat_request(stream=True))
            assert (answer.status, tokens_of(answer.body)) == (200, ["hi"])
            assert (error_of(answer.body) is None) == sends_done

    run(work())


def test_stream_stalled_after_done_is_complete() -> None:
    disconnect_event = asyncio.Event()

    async def stall(reader: Reader, writer: Writer) -> None:
        writer.write(CHUNKED + chunk(EVENT + DONE))
        await reader.read()  # until the proxy closes
        disconnect_event.set()

    async def work() -> None:
        async with proxied_worker(stall) as setup:
            answer = await setup.post(chat_request(stream=True))
            assert (answer.status, tokens_of(answer.body)) == (200, ["hi"])
            assert error_of(answer.body) is None
            await asyncio.wait_for(disconnect_event.wait(), 10)

    run(work())


@pytest.mark.parametrize(
    "received",
    [
        b"",
        b'data: {"error": {"message": "out of memory", "code": 500}}\n\n' + DONE,
        b'data: {"error": {"message": "out of memory"}}\n\n',
    ],
)
def test_stream_empty_or_starting_with_error_is_retried(received: bytes) -> None:
    async def work() -> None:
        body = chunk(received) + b"0\r\n\r\n" if received else b"0\r\n\r\n"
        async with proxied_worker(answer_with(CHUNKED + body), Fake("w1")) as setup:
            answers = [await setup.post(chat_request(1, stream=True)) for _ in range(2)]
            assert [tokens_of(answer.body) for answer in answers] == [["w1:0 "], ["w1:0 "]]
            assert await setup.metric("retries_total") >= 1

    run(work())


def test_stream_with_client_error_is_passed_on() -> None:
    async def work() -> None:
        received = b'data: {"error": {"message": "too long", "code": 400}}\n\n' + DONE
        async with proxied_worker(answer_with(CHUNKED + chunk(received) + b"0\r\n\r\n")) as setup:
            answer = await setup.post(chat_request(1, stream=True))
            assert (answer.status, answer.body) == (200, received)
            assert await setup.metric("retries_total") == 0

    run(work())


def test_worker_without_http_answers_as_failed() -> None:
    async def work() -> None:
        async with proxied_worker(answer_with(b"\x00\xffhello\r\n\r\n")) as setup:
            answer = await setup.post(chat_request())
            assert (answer.status, answer.error["code"]) == (502, "worker_failed")

    run(work())


def compressed(*pieces: bytes, wbits: int) -> list[bytes]:
    """Each piece flushed, as a server does that compresses a stream."""
    compressor = zlib.compressobj(wbits=wbits)
    parts = [compressor.compress(one) + compressor.flush(zlib.Z_SYNC_FLUSH) for one in pieces]
    return [*parts, compressor.flush()]


@pytest.mark.parametrize(("encoding", "wbits"), [("gzip", 31), ("x-gzip", 31), ("deflate", 15)])
def test_compressed_stream_is_passed_on_decompressed(encoding: str, wbits: int) -> None:
    async def work() -> None:
        parts = compressed(EVENT, EVENT, DONE, wbits=wbits)
        head = CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Encoding: %s\r\n\r\n")
        received = head % encoding.encode() + b"".join(map(chunk, parts)) + b"0\r\n\r\n"
        async with proxied_worker(answer_with(received)) as setup:
            answer = await setup.post(chat_request(stream=True))
            assert (answer.status, answer.body) == (200, EVENT + EVENT + DONE)
            assert "Content-Encoding" not in answer.headers
            assert await setup.metric("output_tokens_total") == 2
            assert await setup.metric("retries_total") == 0

    run(work())


def whole_answer(body: bytes, encoding: bytes = b"gzip") -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: %s\r\nContent-Length: %d\r\n\r\n"
    return head % (encoding, len(body)) + body


def test_compressed_whole_answer_is_passed_on_decompressed() -> None:
    async def work() -> None:
        body = json.dumps({"usage": {"prompt_tokens": 3, "completion_tokens": 9}}).encode()
        async with proxied_worker(answer_with(whole_answer(gzip.compress(body)))) as setup:
            answer = await setup.post(chat_request())
            assert (answer.status, answer.body) == (200, body)
            assert await setup.metric("output_tokens_total") == 9

    run(work())


def test_decompressed_answer_is_bounded() -> None:
    async def work() -> None:
        bomb = gzip.compress(bytes(1 << 27))
        async with proxied_worker(answer_with(whole_answer(bomb))) as setup:
            assert (await setup.post(chat_request())).status == 502

    run(work())


@pytest.mark.parametrize(
    "body", [gzip.compress(b"{}" * 99)[:-9], b"no gzip"], ids=["cut off", "no gzip"]
)
def test_broken_compressed_answer_is_retried(body: bytes) -> None:
    async def work() -> None:
        async with proxied_worker(answer_with(whole_answer(body)), Fake("w1")) as setup:
            answers = [await setup.post(chat_request(1)) for _ in range(2)]
            assert [one.text for one in answers] == ["w1:0 "] * 2

    run(work())


def test_answer_compressed_in_unknown_way_is_generated_once() -> None:
    attempts = []

    async def brotli(reader: Reader, writer: Writer) -> None:
        attempts.append(reader)
        writer.write(whole_answer(b"...", b"br"))
        await writer.drain()

    async def work() -> None:
        async with proxied_worker(brotli) as setup:
            answer = await setup.post(chat_request(1))
            assert (answer.status, answer.error["code"]) == (502, "worker_failed")
            assert "'br'" in answer.error["message"]
            assert len(attempts) == 1

    run(work())
