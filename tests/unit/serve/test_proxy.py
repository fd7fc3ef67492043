"""Requests through a proxy over real sockets: what comes back, and what is sent on."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import aiohttp
import pytest
from helpers.fakes.fake_openai_server import Fake
from helpers.harnesses.proxy_setup import (
    CHAT,
    Answer,
    ProxySetup,
    chat_request,
    error_of,
    proxied,
    run,
    settings_of,
    tokens_of,
)
from yarl import URL

from equipoise.serve.body_parser import LARGE_BODY
from equipoise.serve.outcomes import RequestRefused
from equipoise.serve.proxy import worker_of_rank
from equipoise.serve.settings import RANK_HEADER, AccessSettings, ClientRank, Limits, WorkerSettings


def test_proxy_returns_whole_response_or_event_stream() -> None:
    async def work() -> None:
        async with proxied(Fake("w0")) as setup:
            response = await setup.post(chat_request(3))
            assert (response.status, response.text) == (200, "w0:0 w0:1 w0:2 ")
            stream = await setup.post(chat_request(3, stream=True))
            assert tokens_of(stream.body) == ["w0:0 ", "w0:1 ", "w0:2 "]
            assert stream.body.endswith(b"data: [DONE]\n\n")
            assert stream.headers["Content-Type"] == "text/event-stream; charset=utf-8"

    run(work())


def test_proxy_passes_stream_on_byte_for_byte() -> None:
    pieces = [
        ": hello\n\nda",
        'ta: {"choices": [{"text": "é',
        '"}]}\r\n\r\n',
        "id: 7\n",
        "data: x\n\n",
    ]

    async def work() -> None:
        async with proxied(Fake("w0", pace=0.01)) as setup:
            answer = await setup.post(chat_request(stream=True, fake={"w0": {"raw": pieces}}))
            assert answer.body == "".join(pieces).encode()

    run(work())


def test_proxy_passes_tokens_on_before_stream_ends() -> None:
    async def work() -> None:
        async with proxied(Fake("w0")) as setup:
            stall = chat_request(9, stream=True, fake={"w0": {"stall": 2}})
            async with setup.client.post(setup.url + CHAT, json=stall) as answer:
                body = b""
                while len(tokens_of(body)) < 2:
                    body += await answer.content.readany()
                # The worker will never end: what it has made is here all the same.
                assert tokens_of(body) == ["w0:0 ", "w0:1 "]

    run(work())


def test_proxy_serves_completions_with_token_lists() -> None:
    async def work() -> None:
        async with proxied(Fake("w0")) as setup:
            request = {"model": "fake", "prompt": [5, 6, 7], "max_tokens": 2}
            assert (await setup.post(request, "/v1/completions")).status == 200
            text = {"model": "fake", "prompt": "four score", "max_tokens": 2, "stream": True}
            answer = await setup.post(text, "/v1/completions")
            assert len(tokens_of(answer.body)) == 2

    run(work())


def test_proxy_keeps_or_creates_request_id() -> None:
    async def work() -> None:
        async with proxied(fake := Fake("w0")) as setup:
            first_answer = await setup.post(chat_request(), X_Request_Id="mine-1")
            second_answer = await setup.post(chat_request(), X_Request_Id="not fit: \u00e9")
            assert first_answer.headers["X-Request-Id"] == "mine-1"
            assert len(second_answer.headers["X-Request-Id"]) == 32
            ids = [one["id"] for one in fake.events("begin")]
            assert ids == ["mine-1", second_answer.headers["X-Request-Id"]]

    run(work())


def test_proxy_drops_hop_by_hop_headers() -> None:
    async def work() -> None:
        async with proxied(fake := Fake("w0")) as setup:
            await setup.post(
                chat_request(), TE="trailers", X_Own="1", X_Kept="2", Connection="X-Own"
            )
            [begin_event] = fake.events("begin")
            assert begin_event["headers"]["x-kept"] == "2"
            assert not {"te", "x-own"} & set(begin_event["headers"])
            assert begin_event["headers"]["accept-encoding"] == "identity"

    run(work())


def test_proxy_forwards_get_requests_to_a_worker() -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), Fake("w1")) as setup:
            models = await setup.get("/v1/models")
            assert json.loads(models.body)["data"] == [{"id": "fake"}]
            other = await setup.get("/version?of=it", Cookie="a=b")
            assert json.loads(other.body)["path"] == "/version?of=it"
            assert other.headers["Server"] == "equipoise"

    run(work())


def test_proxy_unknown_path_is_404_in_api_format() -> None:
    async def work() -> None:
        async with proxied(Fake("w0")) as setup:
            for path in ("/v1/files", "/", "/healthy", "/abort_request", "/v1/load_lora_adapter"):
                answer = await setup.post(chat_request(), path)
                assert (answer.status, answer.error["code"]) == (404, "not_found")

    run(work())


@pytest.mark.parametrize(
    "path",
    [
        "/flush_cache", "/release_memory_occupation", "/start_profile", "/server_info",
        "//flush_cache", "//v1/models", "/v1/models/", "/v1/models/../../flush_cache",
        "/v1/models/%2e%2e/%2E./flush_cache", "/v1/models/a/./b", "/v1/models/a//b",
    ],
)  # fmt: skip
def test_proxy_does_not_forward_engine_commands_sent_by_get(path: str) -> None:
    async def work() -> None:
        access = AccessSettings(keys=("one",), worker_key="theirs")
        async with proxied(fake := Fake("w0"), access=access) as setup:
            url = URL(setup.url + path, encoded=True)
            async with setup.client.get(url, headers={"Authorization": "Bearer one"}) as answer:
                assert answer.status == 404
                assert (await answer.json())["error"]["code"] == "not_found"
            assert fake.events("echo") == []

    run(work())


def test_proxy_forwards_one_model_by_name_with_slash() -> None:
    async def work() -> None:
        access = AccessSettings(worker_key="theirs")
        async with proxied(fake := Fake("w0"), access=access) as setup:
            assert (await setup.get("/v1/models/org/name")).status == 200
            [echo] = fake.events("echo")
            assert echo["path"] == "/v1/models/org/name"
            assert echo["headers"]["Authorization"] == "Bearer theirs"

    run(work())


@pytest.mark.parametrize(
    ("method", "path", "allowed_methods"),
    [
        ("GET", CHAT, "POST"), ("DELETE", "/workers", "GET, HEAD"), ("POST", "/ready", "GET, HEAD"),
        ("GET", "/workers/w0/drain", "POST"), ("PUT", "/v1/models", "GET, HEAD"),
    ],
)  # fmt: skip
def test_proxy_wrong_method_is_405_with_allow(method: str, path: str, allowed_methods: str) -> None:
    async def work() -> None:
        async with (
            proxied(Fake("w0")) as setup,
            setup.client.request(method, setup.url + path) as answer,
        ):
            assert (answer.status, answer.headers["Allow"]) == (405, allowed_methods)
            assert (await answer.json())["error"]["code"] == "method_not_allowed"

    run(work())


def test_proxy_serves_health_ready_and_metrics() -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), Fake("w1")) as setup:
            assert json.loads((await setup.get("/health")).body) == {"status": "ok"}
            ready = await setup.get("/ready")
            assert json.loads(ready.body) == {"status": "serving", "serving_workers": 2}
            await setup.post(chat_request(5))
            text = (await setup.get("/metrics")).body.decode()
            assert 'equipoise_route_requests_total{outcome="completed"} 1.0' in text
            assert "equipoise_route_output_tokens_total 5.0" in text
            assert 'equipoise_route_worker_state{state="serving",worker="w1"} 1.0' in text
            for name in ("proxy_latency", "queue_wait", "decision", "first_answer"):
                assert f"equipoise_route_{name}_seconds_count" in text
            assert await setup.metric("idle_ratio") == 0
            assert await setup.metric("prompt_weight") == 0
            for name in ("policy_errors", "log_dropped_records", "worker_report_failures"):
                assert f"# TYPE equipoise_route_{name}_total counter" in text

    run(work())


def test_proxy_requires_api_key() -> None:
    async def work() -> None:
        access = AccessSettings(keys=("one", "two"), worker_key="theirs")
        async with proxied(fake := Fake("w0"), access=access) as setup:
            assert (await setup.post(chat_request())).status == 401
            assert (await setup.get("/v1/models")).status == 401
            for header in ("Bearer on", "Basic one", "one", "Bearer", "Bearer two2", "Bearer \xff"):
                answer = await setup.post(chat_request(), Authorization=header)
                assert (answer.status, answer.error["type"]) == (401, "authentication_error")
                assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert (await setup.post(chat_request(), Authorization="Bearer two")).status == 200
            assert (await setup.get("/health")).status == 200
            [begin_event] = fake.events("begin")
            assert begin_event["headers"]["authorization"] == "Bearer theirs"

    run(work())


def test_proxy_forwards_client_authorization_without_own_key() -> None:
    async def work() -> None:
        async with proxied(fake := Fake("w0")) as setup:
            await setup.post(chat_request(), Authorization="Bearer clients")
            [begin_event] = fake.events("begin")
            assert begin_event["headers"]["authorization"] == "Bearer clients"

    run(work())


def test_proxy_routes_data_parallel_ranks_as_workers() -> None:
    async def work() -> None:
        fake = Fake("w0")
        async with proxied(fake) as first:
            [one] = settings_of([fake]).workers
            ranks = tuple(
                WorkerSettings(url=one.url, name=f"rank {n}", headers={RANK_HEADER: str(n)})
                for n in (3, 1)
            )
            async with proxied(workers=ranks, client_rank=ClientRank.HONOUR) as setup:
                await _ask_for_ranks(setup, fake)
            assert (await first.get("/health")).status == 200

    run(work())


async def _ask_for_ranks(setup: ProxySetup, fake: Fake) -> None:
    assert (await setup.post(chat_request(), X_data_parallel_rank="1")).status == 200
    assert (await setup.post(chat_request(data_parallel_rank=3))).status == 200
    assert [one["headers"]["x-data-parallel-rank"] for one in fake.events("begin")] == ["1", "3"]
    for bad in (0, -1, "1"):
        assert (await setup.post(chat_request(data_parallel_rank=bad))).status == 400
    assert (await setup.post(chat_request(), X_data_parallel_rank="one")).status == 400


def test_worker_of_rank_is_index_without_rank_headers() -> None:
    plain = tuple(WorkerSettings(url="http://w", name=str(n)) for n in range(3))
    assert worker_of_rank(2, plain) == 2
    with pytest.raises(RequestRefused, match="no data-parallel rank 3"):
        worker_of_rank(3, plain)


def test_client_rank_does_not_jump_the_queue_unless_it_is_honoured() -> None:
    async def work() -> None:
        async with proxied(fake := Fake("w0")) as setup:
            answer = await setup.post(chat_request(), X_data_parallel_rank="0")
            assert (answer.status, "client_rank" in answer.error["message"]) == (400, True)
            assert (await setup.post(chat_request(data_parallel_rank=0))).status == 400
            assert (await setup.post(chat_request())).status == 200
            assert len(fake.events("begin")) == 1

    run(work())


def test_proxy_counts_output_tokens_of_stream_with_usage() -> None:
    """One event that brings several tokens; how many they are comes later."""

    def event(**fields: object) -> str:
        return f"data: {json.dumps(fields)}\n\n"

    usage = {"prompt_tokens": 4000, "completion_tokens": 5}
    raw = [
        event(choices=[{"index": 0, "delta": {"content": "five tokens at once"}}]),
        event(choices=[], usage=usage),
        "data: [DONE]\n\n",
    ]

    async def work() -> None:
        async with proxied(Fake("w0", pace=0.05)) as setup:
            answer = await setup.post(chat_request(5, stream=True, fake={"w0": {"raw": raw}}))
            assert error_of(answer.body) is None
            assert await setup.metric("output_tokens_total") == 5

    run(work())


def test_proxy_rejects_oversized_worker_response() -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), limits=Limits(answer=100)) as setup:
            answer = await setup.post(chat_request(500))
            assert (answer.status, answer.error["code"]) == (502, "worker_failed")

    run(work())


def test_draining_proxy_answers_503_until_streams_end() -> None:
    async def work() -> None:
        async with proxied(Fake("w0", pace=0.02)) as setup:
            stream_task = asyncio.create_task(setup.post(chat_request(40, stream=True)))
            await setup.until(lambda: setup.fakes[0].events("token"))
            stop_task = asyncio.create_task(setup.proxy.stop())
            await asyncio.sleep(0)
            for answer in (await setup.post(chat_request()), await setup.get("/v1/models")):
                assert (answer.status, answer.error["code"]) == (503, "shutting_down")
                assert (answer.headers["Retry-After"], answer.headers["Connection"]) == (
                    "1", "close",
                )  # fmt: skip
            ready = await setup.get("/ready")
            assert (ready.status, json.loads(ready.body)["status"]) == (503, "draining")
            assert await setup.metric("in_flight_requests") == 1
            assert (await setup.get("/health")).status == 200
            assert not stop_task.done()
            assert len(tokens_of((await stream_task).body)) == 40
            assert await stop_task == 0
            with pytest.raises(aiohttp.ClientConnectionError):
                await setup.get("/ready")

    run(work())


def test_draining_proxy_answers_on_connection_of_ended_stream() -> None:
    """Its head went out before the drain began, and promised to keep the connection."""

    async def work() -> None:
        async with proxied(Fake("w0", pace=0.02)) as setup:
            longer = asyncio.create_task(setup.post(chat_request(200, stream=True)))
            reader, writer = await asyncio.open_connection("127.0.0.1", setup.proxy.port)
            writer.write(_post_request(chat_request(5, stream=True)))
            await reader.readuntil(b"w0:0 ")
            stop_task = asyncio.create_task(setup.proxy.stop())
            await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
            writer.write(_post_request(chat_request()))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nConnection: close\r\n" in head
            writer.close()
            setup.proxy.skip_drain()
            await longer
            await stop_task

    run(work())


def _assert_cut_off(answer: Answer) -> None:
    assert (answer.status, answer.error["code"]) == (503, "shutting_down")
    assert (answer.headers["Retry-After"], answer.headers["Connection"]) == ("1", "close")


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_body_that_is_still_coming_gets_503_at_end_of_drain(path: str) -> None:
    async def work() -> None:
        arrived = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield b"{"
            await arrived.wait()

        async with proxied(fake := Fake("w0")) as setup:
            post = setup.client.post(setup.url + path, data=body())
            task = asyncio.create_task(_read(post))
            await _stop_with_one_request(setup)
            _assert_cut_off(await task)
            assert fake.served == []

    run(work())


def test_large_body_that_waits_for_its_parser_gets_503_at_end_of_drain() -> None:
    async def work() -> None:
        async with proxied(fake := Fake("w0")) as setup, setup.proxy._parser._lock:
            task = asyncio.create_task(setup.post(chat_request(text="x" * LARGE_BODY)))
            await _stop_with_one_request(setup)
            _assert_cut_off(await task)
            assert fake.served == []

    run(work())


@pytest.mark.parametrize(("method", "path"), [("GET", "/version"), ("POST", "/tokenize")])
def test_forwarded_request_gets_503_at_end_of_drain(method: str, path: str) -> None:
    async def work() -> None:
        async with proxied(fake := Fake("w0", silent=(path,))) as setup:
            task = asyncio.create_task(_read(setup.client.request(method, setup.url + path)))
            await setup.until(lambda: fake.events("echo"))
            await _stop_with_one_request(setup)
            _assert_cut_off(await task)

    run(work())


async def _stop_with_one_request(setup: ProxySetup) -> None:
    """End the drain while one request is in the proxy, and not in its dispatcher."""
    await setup.until(lambda: setup.proxy._in_flight == 1)
    assert setup.proxy.dispatcher.requests == ()
    setup.proxy.skip_drain()
    assert await setup.proxy.stop() == 1


async def _read(request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> Answer:
    async with request as answer:
        return Answer(answer.status, answer.headers, await answer.read())


def _post_request(body: object) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
