"""Comments to clients whose streams are silent, so that nothing on the way closes them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from helpers.fakes.fake_openai_server import Fake
from helpers.harnesses.proxy_setup import (
    CHAT,
    ProxySetup,
    chat_request,
    error_of,
    proxied,
    run,
    tokens_of,
)

from equipoise.serve import openai_protocol
from equipoise.serve.client_connection import HEARTBEAT
from equipoise.serve.settings import Timeouts

QUICK = Timeouts(heartbeat=0.05)
STALLED = chat_request(stream=True, fake={"w0": {"stall": 1}, "w1": {"stall": 1}})


@asynccontextmanager
async def waiting_stream(
    setup: ProxySetup, **more: Any
) -> AsyncIterator[tuple[asyncio.Task[Any], aiohttp.ClientResponse]]:
    """A stream that waits behind another one and has got a comment, and that other one."""
    first = asyncio.create_task(setup.post(STALLED))
    await setup.until(lambda: setup.fakes[0].events("token"))
    async with setup.client.post(
        setup.url + CHAT, json=chat_request(stream=True, **more)
    ) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        assert answer.headers["X-Request-Id"]
        assert await answer.content.readexactly(len(HEARTBEAT)) == HEARTBEAT
        yield first, answer


async def end(first: asyncio.Task[Any]) -> None:
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


def without_comments(body: bytes) -> bytes:
    return body.replace(HEARTBEAT, b"")


def test_stream_gets_comments_while_it_waits_for_a_worker() -> None:
    async def work() -> None:
        async with (
            proxied(Fake("w0", slots=1), timeouts=QUICK) as setup,
            waiting_stream(setup) as (first, answer),
        ):
            assert await answer.content.readexactly(len(HEARTBEAT)) == HEARTBEAT
            assert len(setup.fakes[0].events("begin")) == 1
            await end(first)
            body = without_comments(await answer.read())
            assert len(tokens_of(body)) == 4
            assert body.endswith(b"data: [DONE]\n\n")
            assert await setup.metric("retries_total") == 0

    run(work())


def test_stream_with_comments_is_retried_at_another_worker() -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), Fake("w1"), timeouts=QUICK) as setup:
            late = {"w0": {"delay": 0.3, "hang_up": 0}}
            answer = await setup.post(chat_request(2, stream=True, fake=late))
            assert answer.body.startswith(HEARTBEAT)
            assert tokens_of(answer.body) == ["w1:0 ", "w1:1 "]
            assert error_of(answer.body) is None
            assert await setup.metric("retries_total") == 1

    run(work())


def test_stream_with_comments_gets_queue_timeout_as_event() -> None:
    async def work() -> None:
        timeouts = Timeouts(heartbeat=0.05, queue=0.4)
        async with (
            proxied(Fake("w0", slots=1), timeouts=timeouts) as setup,
            waiting_stream(setup) as (first, answer),
        ):
            error = error_of(await answer.read())
            assert error is not None
            assert error["code"] == "no_worker"
            text = (await setup.get("/metrics")).body.decode()
            assert 'requests_total{outcome="queue_timeout"} 1.0' in text
            await end(first)

    run(work())


def test_stream_with_comments_gets_refusal_of_worker_as_event() -> None:
    async def work() -> None:
        async with (
            proxied(Fake("w0", slots=1), timeouts=QUICK) as setup,
            waiting_stream(setup, fake={"w0": {"status": 400}}) as (first, answer),
        ):
            await end(first)
            error = error_of(await answer.read())
            assert error is not None
            assert error["message"] == "as told"
            text = (await setup.get("/metrics")).body.decode()
            assert 'requests_total{outcome="rejected_by_worker"} 1.0' in text

    run(work())


def test_stream_with_comments_gets_last_5xx_of_workers_as_event() -> None:
    async def work() -> None:
        async with (
            proxied(Fake("w0", slots=1), timeouts=QUICK) as setup,
            waiting_stream(setup, fake={"w0": {"status": 500}}) as (first, answer),
        ):
            await end(first)
            assert error_of(await answer.read()) is not None

    run(work())


def test_refusal_keeps_its_status_until_first_comment() -> None:
    async def work() -> None:
        timeouts = Timeouts(heartbeat=60.0, queue=0.2)
        async with proxied(Fake("w0", slots=1), timeouts=timeouts) as setup:
            first = asyncio.create_task(setup.post(STALLED))
            await setup.until(lambda: setup.fakes[0].events("token"))
            answer = await setup.post(chat_request(stream=True))
            assert (answer.status, answer.error["code"]) == (503, "no_worker")
            await end(first)

    run(work())


def test_answer_that_is_no_stream_gets_no_comments() -> None:
    async def work() -> None:
        async with proxied(Fake("w0", pace=0.1), timeouts=QUICK) as setup:
            answer = await setup.post(chat_request(4))
            assert json.loads(answer.body)["usage"]["completion_tokens"] == 4

    run(work())


def test_stream_gets_comments_between_tokens_that_are_late() -> None:
    async def work() -> None:
        async with (
            proxied(Fake("w0"), timeouts=QUICK) as setup,
            setup.client.post(setup.url + CHAT, json=STALLED) as answer,
        ):
            body = b""
            while body.count(HEARTBEAT) < 2:
                body += await answer.content.readany()
            assert tokens_of(body) == ["w0:0 "]

    run(work())


def test_comments_do_not_cut_an_event_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_protocol, "MAX_EVENT_BYTES", 100)
    pieces = [f"data: {'x' * 110}", "y", "z\n\n", "data: end\n\n"]

    async def work() -> None:
        async with proxied(Fake("w0", pace=0.3), timeouts=QUICK) as setup:
            answer = await setup.post(chat_request(stream=True, fake={"w0": {"raw": pieces}}))
            begin, _, rest = answer.body.partition("".join(pieces[:3]).encode())
            assert without_comments(begin) == b""
            assert without_comments(rest) == b"data: end\n\n"
            assert HEARTBEAT in rest

    run(work())


def test_heartbeats_can_be_switched_off() -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), timeouts=Timeouts(heartbeat=0.0)) as setup:
            delayed = chat_request(1, stream=True, fake={"w0": {"delay": 0.3}})
            assert HEARTBEAT not in (await setup.post(delayed)).body

    run(work())
