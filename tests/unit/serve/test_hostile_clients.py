"""Clients that are mistaken, slow or hostile: each gets a clear answer, and holds nothing up."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress

import pytest
from helpers.fakes.fake_openai_server import Fake
from helpers.harnesses.proxy_setup import CHAT, ProxySetup, chat_request, proxied, run, settings_of
from helpers.tiers import DEEP
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.serve.settings import Limits, Timeouts

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: proxy\r\n"
MALFORMED: Sequence[tuple[object, str]] = (
    (b"", "JSON"),
    (b"{", "JSON"),
    (b"\xff\xfe{}", "JSON"),
    (b"[" * 100_000, "JSON"),
    (b'{"model": "m", "n": ' + b"9" * 5000 + b"}", "JSON"),
    (b"[]", "object"),
    (b"null", "object"),
    ({}, "model"),
    ({"model": 7, "messages": []}, "model"),
    ({"model": "", "messages": []}, "model"),
    (chat_request() | {"model": "m" * 513}, "model"),
    ({"model": "m"}, "messages"),
    ({"model": "m", "messages": []}, "messages"),
    ({"model": "m", "messages": "hello"}, "messages"),
    ({"model": "m", "messages": ["hello"]}, "messages[0]"),
    ({"model": "m", "messages": [{"content": "x"}]}, "role"),
    ({"model": "m", "messages": [{"role": "user", "content": 7}]}, "content"),
    ({"model": "m", "messages": [{"role": "user", "content": [7]}]}, "content"),
    (chat_request(stream="yes"), "stream"),
    (chat_request(stream=1), "stream"),
    (chat_request(n=0), "'n'"),
    (chat_request(n=True), "'n'"),
    (chat_request(max_completion_tokens=-1), "max_completion_tokens"),
    (chat_request(max_tokens="7"), "max_tokens"),
    (chat_request(data_parallel_rank=1.0), "data_parallel_rank"),
    (chat_request(data_parallel_rank=10**30), "data_parallel_rank"),
)
PROMPTS: Sequence[object] = (None, 7, [], [[]], [1, "a"], [1.5], [-1], [True], [[1], "a"], {"a": 1})


def test_proxy_rejects_malformed_body_with_400() -> None:
    async def work() -> None:
        async with proxied(fake := Fake("w0")) as setup:
            for body, word in MALFORMED:
                answer = await setup.post(body)
                assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
                assert word in answer.error["message"]
            for prompt in PROMPTS:
                answer = await setup.post({"model": "m", "prompt": prompt}, "/v1/completions")
                assert (answer.status, "prompt" in answer.error["message"]) == (400, True)
            assert fake.events("begin") == []

    run(work())


def test_proxy_rejects_oversized_body_with_413() -> None:
    async def work() -> None:
        async with proxied(fake := Fake("w0"), limits=Limits(body=2000)) as setup:
            large = chat_request(padding="x" * 3000)
            assert (await setup.post(large)).status == 413

            async def pieces() -> object:
                for _ in range(30):
                    yield b" " * 100

            async with setup.client.post(setup.url + CHAT, data=pieces()) as answer:
                assert answer.status == 413
            assert fake.events("begin") == []
            assert (await setup.post(chat_request())).status == 200

    run(work())


def test_proxy_takes_rest_of_refused_body_for_no_head(caplog: pytest.LogCaptureFixture) -> None:
    """What came after the refusal was counted as a head: 431, a reset, and a traceback."""

    async def work() -> None:
        async with proxied(Fake("w0"), limits=Limits(header=2048)) as setup:
            reader, writer = await asyncio.open_connection("127.0.0.1", setup.proxy.port)
            writer.write(b"POST /nope HTTP/1.1\r\nHost: a\r\nContent-Length: 90000\r\n\r\n{")
            assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 404 ")
            for _ in range(3):
                writer.write(b"x" * 20_000)
                await writer.drain()
                await setup.get("/health")
            writer.write(b"x" * 29_999 + b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
            # The bound of a head holds for what follows a body that was read late.
            writer.write(b"GET /health HTTP/1.1\r\n")
            for _ in range(6):
                writer.write(b"X-A: %s\r\n" % (b"y" * 500))
                await setup.get("/health")
            assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
            writer.close()

    run(work())
    assert [one for one in caplog.records if one.name == "aiohttp.server"] == []


def test_proxy_takes_no_body_for_a_head_within_one_turn_of_the_loop() -> None:
    """As uvloop brings it: pieces of a body before the task of its request has run."""

    async def work() -> None:
        async with proxied(Fake("w0"), limits=Limits(header=2048)) as setup:
            reader, writer = await asyncio.open_connection("127.0.0.1", setup.proxy.port)
            listener = setup.proxy._listener
            assert listener is not None
            await setup.until(lambda: listener.connections)
            [connection] = listener.connections
            body = json.dumps(chat_request(1, padding="x" * 9000)).encode()
            head = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
            for piece in (head + body[:4000], body[4000:8000], body[8000:]):
                connection.data_received(piece)
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
            writer.close()

    run(work())


def test_proxy_bounds_buffered_bodies_and_frees_space() -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), limits=Limits(buffered=5000)) as setup:
            stall = chat_request(1, stream=True, fake={"w0": {"stall": 0}}, padding="x" * 3000)
            stalled_call = asyncio.create_task(setup.post(stall))
            await setup.until(lambda: setup.fakes[0].events("begin"))
            assert (await setup.post(stall)).status == 429
            stalled_call.cancel()
            await asyncio.gather(stalled_call, return_exceptions=True)
            await setup.until(lambda: setup.proxy.dispatcher.requests == ())
            assert (await setup.post(chat_request(padding="x" * 3000))).status == 200

    run(work())


async def _exchange(setup: ProxySetup, *pieces: bytes, close: bool = False) -> bytes:
    """What comes back for so many bytes, until the proxy closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", setup.proxy.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        if close:
            writer.write_eof()
        return await reader.read()
    except OSError:
        return b""
    finally:
        writer.close()


HEADS = (
    b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 5000 + b"\r\n\r\n",
    b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(300)) + b"\r\n",
)


@pytest.mark.parametrize("head", HEADS, ids=["field", "target", "many"])
def test_proxy_rejects_oversized_head_with_431(head: bytes) -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), limits=Limits(header=2048)) as setup:
            received = await _exchange(setup, head)
            assert received.split(b" ")[1] == b"431"
            assert (
                json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"]
                == "header_too_large"
            )

    run(work())


def test_proxy_rejects_endless_head_at_size_limit() -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), limits=Limits(header=2048)) as setup:
            pieces = [b"X-%d: %s\r\n" % (n, b"y" * 500) for n in range(20)]
            received = await _exchange(setup, b"GET /health HTTP/1.1\r\n", *pieces)
            assert received.startswith(b"HTTP/1.1 431 ") or received == b""
            text = (await setup.get("/metrics")).body.decode()
            assert 'requests_total{outcome="too_large"} 1.0' in text

    run(work())


@pytest.mark.slow
def test_proxy_times_out_slow_heads_and_bodies() -> None:
    async def work() -> None:
        timeouts = Timeouts(header=1.0, body=1.0)
        async with proxied(fake := Fake("w0"), timeouts=timeouts) as setup:
            slow = [_exchange(setup, b"GET /heal"), _exchange(setup), _exchange(setup, HEAD)]
            late_body = _exchange(setup, HEAD + b"Content-Length: 50\r\n\r\n", b'{"model"')
            answers = await asyncio.gather(*slow, late_body)
            assert [one.partition(b"\r\n")[0][:12] for one in answers] == [b"HTTP/1.1 408"] * 4
            assert (await setup.post(chat_request())).status == 200
            assert len(fake.events("begin")) == 1

    run(work())


def test_proxy_serves_others_despite_many_slow_clients() -> None:
    async def work() -> None:
        timeouts = Timeouts(header=3600.0)
        async with proxied(Fake("w0"), timeouts=timeouts, limits=Limits(connections=40)) as setup:
            assert (await setup.post(chat_request())).status == 200
            slow = [asyncio.create_task(_exchange(setup, b"GET")) for _ in range(60)]
            # What is above the limit is closed at once; those below it wait for their heads.
            await setup.until(lambda: sum(one.done() for one in slow) >= 20)
            assert (await setup.post(chat_request())).status == 200
            for one in slow:
                one.cancel()
            await asyncio.gather(*slow, return_exceptions=True)

    run(work())


STRANGE = (
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
    (b"hello\r\n\r\n", b"400"),
    (b"GET http://127.0.0.1:1/v1/models HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
    (b"GET @127.0.0.1:1/ HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
    (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", b"404"),
    (b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: x\r\n\r\n", b"404"),
    (HEAD + b"Content-Length: -1\r\n\r\n", b"400"),
    (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", b"400"),
    (
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"400",
    ),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n", b"400"),
    (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b", b"415"),
    (HEAD + b"Expect: tea\r\nContent-Length: 2\r\n\r\n{}", b"417"),
    (HEAD + b"X-Bad: a\x00b\r\nContent-Length: 2\r\n\r\n{}", b"400"),
)


@pytest.mark.parametrize(("bytes_", "status"), STRANGE)
def test_proxy_rejects_bytes_that_are_no_request(bytes_: bytes, status: bytes) -> None:
    async def work() -> None:
        async with proxied(fake := Fake("w0"), timeouts=Timeouts(idle=0.5)) as setup:
            received = await _exchange(setup, bytes_)
            assert received.split(b" ")[1] == status
            assert fake.events("begin") == []
            assert (await setup.post(chat_request())).status == 200

    run(work())


def test_proxy_answers_expect_100_continue() -> None:
    async def work() -> None:
        async with proxied(Fake("w0")) as setup:
            body = json.dumps(chat_request(1)).encode()
            head = HEAD + b"Connection: close\r\nExpect: 100-continue\r\n"
            received = await _exchange(
                setup, head + b"Content-Length: %d\r\n\r\n" % len(body), body
            )
            assert received.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")

    run(work())


@pytest.mark.slow
def test_proxy_drops_client_that_does_not_read_stream() -> None:
    async def work() -> None:
        fake = Fake("w0")
        async with proxied(fake, timeouts=Timeouts(token=3.0)) as setup:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", setup.proxy.port, limit=1 << 10
            )
            raw = [f"data: {'x' * 60_000}\n\n"] * 400
            body = json.dumps(chat_request(stream=True, fake={"w0": {"raw": raw}})).encode()
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await setup.until(lambda: fake.events("begin"))
            await setup.until(lambda: setup.proxy.dispatcher.requests == ())
            text = (await setup.get("/metrics")).body.decode()
            assert 'requests_total{outcome="client_stalled"} 1.0' in text
            writer.close()
            del reader

    run(work())


@pytest.mark.slow
def test_proxy_drops_client_that_does_not_read_response() -> None:
    size = 32 << 20

    async def large(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request_head = await reader.readuntil(b"\r\n\r\n")
        body = b"x" * size if request_head.startswith(b"POST") else b""
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(large, "127.0.0.1", 0)
        workers = settings_of([Fake("w0", port=server.sockets[0].getsockname()[1])]).workers
        async with server, proxied(workers=workers, timeouts=Timeouts(token=3.0)) as setup:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", setup.proxy.port, limit=1024
            )
            body = json.dumps(chat_request()).encode()
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await reader.readuntil(b"\r\n\r\n")
            listener = setup.proxy._listener
            assert listener is not None
            await setup.until(lambda: not listener.connections)
            byte_count = 0
            with suppress(ConnectionError):
                while piece := await reader.read(1 << 20):
                    byte_count += len(piece)
            assert byte_count < size
            writer.close()

    run(work())


@pytest.mark.slow
@given(data=st.lists(st.lists(st.binary(min_size=1, max_size=200), max_size=4), max_size=30))
@settings(max_examples=300 if DEEP else 6)
def test_proxy_survives_arbitrary_bytes(data: list[list[bytes]]) -> None:
    async def work() -> None:
        timeouts = Timeouts(header=1.0, body=1.0, idle=0.2)
        async with proxied(Fake("w0"), timeouts=timeouts) as setup:
            exchanges = [_exchange(setup, *pieces) for pieces in data]
            behind = [_exchange(setup, HEAD, *pieces, close=True) for pieces in data]
            await asyncio.gather(*exchanges, *behind)
            assert (await setup.post(chat_request(1))).status == 200

    run(work())
