"""Draining by hand: from this machine only, with a key where there are keys, beside health."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from helpers.fakes.fake_openai_server import Fake
from helpers.harnesses.proxy_setup import (
    Answer,
    ProxySetup,
    chat_request,
    proxied,
    run,
    settings_of,
)

from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.admin import FOREIGN_HEADERS, is_local
from equipoise.serve.settings import AccessSettings

SERVING, DRAINING, LOST = WorkerState.SERVING, WorkerState.DRAINING, WorkerState.LOST


async def post(setup: ProxySetup, path: str, **headers: str) -> Answer:
    return await setup.post(b"", path, **headers)


def workers_of(setup: ProxySetup) -> list[str]:
    return [one["worker"] for fake in setup.fakes for one in fake.events("end")]


def test_drained_worker_gets_no_requests_until_served_again() -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), Fake("w1")) as setup:
            answer = await post(setup, "/workers/w0/drain")
            assert (answer.status, b'"state": "draining"' in answer.body) == (200, True)
            for _ in range(4):
                assert (await setup.post(chat_request())).status == 200
            assert workers_of(setup) == ["w1"] * 4
            worker_list = (await setup.get("/workers")).body
            assert worker_list.count(b'"manually_drained": true') == 1
            assert (await post(setup, "/workers/w0/resume")).status == 200
            await post(setup, "/workers/w1/drain")
            await setup.post(chat_request())
            assert workers_of(setup).count("w0") == 1

    run(work())


def test_drained_worker_finishes_stream_and_holds_waiting_request() -> None:
    async def work() -> None:
        async with proxied(Fake("w0", slots=1, pace=0.02)) as setup:
            stream_task = asyncio.create_task(setup.post(chat_request(stream=True)))
            await setup.until(lambda: setup.fakes[0].events("token"))
            await post(setup, "/workers/w0/drain")
            waiting_call = asyncio.create_task(setup.post(chat_request()))
            assert (await stream_task).body.endswith(b"data: [DONE]\n\n")
            await setup.until(lambda: setup.proxy.dispatcher.queued == 1)
            assert (await setup.get("/ready")).status == 503
            await post(setup, "/workers/w0/resume")
            assert (await waiting_call).status == 200

    run(work())


def test_manual_drain_and_health_checks_combine() -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), Fake("w1")) as setup:
            dispatcher, view = setup.proxy.dispatcher, setup.proxy.dispatcher.workers[0]
            dispatcher.drain_worker(0)
            dispatcher.set_health(0, LOST)
            assert view.state is LOST
            dispatcher.set_health(0, SERVING)  # it is back, and has nothing that it could drain
            assert view.state is LOST
            dispatcher.resume_worker(0)
            assert view.state is SERVING
            dispatcher.set_health(0, DRAINING)
            dispatcher.drain_worker(0)
            dispatcher.set_health(0, SERVING)
            assert view.state is DRAINING
            dispatcher.set_health(0, LOST)
            dispatcher.resume_worker(0)
            assert view.state is LOST
            dispatcher.set_health(0, SERVING)
            assert (await setup.post(chat_request())).status == 200

    run(work())


@pytest.mark.parametrize(
    "path", ["/workers/w9/drain", "/workers/w0/stop", "/workers/", "/workers/drain"]
)
def test_admin_unknown_worker_or_action_is_404(path: str) -> None:
    async def work() -> None:
        async with proxied(Fake("w0")) as setup:
            answer = await post(setup, path)
            assert answer.status == 404
            assert "POST /workers/NAME/drain or /resume" in answer.error["message"]
            assert setup.proxy.dispatcher.workers[0].state is SERVING

    run(work())


def test_admin_finds_worker_names_with_slashes_and_blanks() -> None:
    async def work() -> None:
        fake = Fake("w0")
        async with proxied(fake) as first:
            [worker] = settings_of([fake]).workers
            named_workers = (replace(worker, name="a:1/x y"),)
            async with proxied(workers=named_workers) as setup:
                assert (await post(setup, "/workers/a:1/x%20y/drain")).status == 200
                assert setup.proxy.dispatcher.workers[0].state is DRAINING
            assert first.proxy.dispatcher.workers[0].state is SERVING

    run(work())


def test_admin_requires_key_when_proxy_has_keys() -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), access=AccessSettings(keys=("secret",))) as setup:
            assert (await post(setup, "/workers/w0/drain")).status == 401
            assert (await setup.get("/workers")).status == 401
            assert setup.proxy.dispatcher.workers[0].state is SERVING
            answer = await post(setup, "/workers/w0/drain", Authorization="Bearer secret")
            assert answer.status == 200

    run(work())


@pytest.mark.parametrize("header", FOREIGN_HEADERS)
def test_admin_rejects_browser_and_forwarded_requests(header: str) -> None:
    async def work() -> None:
        async with proxied(Fake("w0")) as setup:
            received: dict[str, Any] = {header.replace("-", "_"): "http://elsewhere"}
            answer = await post(setup, "/workers/w0/drain", **received)
            assert (answer.status, answer.error["code"]) == (403, "not_local")
            assert setup.proxy.dispatcher.workers[0].state is SERVING

    run(work())


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False), ("::ffff:10.0.0.1", False), ("fe80::1", False), ("", False),
    ],
)  # fmt: skip
def test_is_local_accepts_only_loopback_addresses(address: str, local: bool) -> None:
    request = make_mocked_request("POST", "/workers/w0/drain")
    assert is_local(request.clone(remote=address)) is local
