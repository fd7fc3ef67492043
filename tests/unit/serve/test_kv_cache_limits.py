"""Prompts longer than the KV cache of any worker: refused at once, or left to the worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
from helpers.fakes.fake_openai_server import Fake, start
from helpers.fakes.late_binding_policy import LateBinding
from helpers.harnesses.proxy_setup import ProxySetup, run, settings_of

from equipoise.balancer.requests.policy import WorkerState
from equipoise.balancer.requests.policy_factory import routing_policy_factory
from equipoise.serve.proxy import Proxy
from equipoise.serve.settings import ClientRank, Timeouts

ROOMS = (100, 200)
PATH = "/v1/completions"


@asynccontextmanager
async def _site(*rooms: int | None) -> AsyncIterator[ProxySetup]:
    """A proxy with the policy that ships, in front of workers with so much room."""
    fakes = [Fake(f"w{number}") for number in range(len(rooms))]
    runners = [await start(fake) for fake in fakes]
    workers = settings_of(fakes).workers
    workers = tuple(replace(one, kv_tokens=room) for one, room in zip(workers, rooms, strict=True))
    settings = settings_of(
        fakes, workers=workers, timeouts=Timeouts(queue=5), client_rank=ClientRank.HONOUR
    )
    policy = routing_policy_factory("fit", {})([one.slots for one in workers], rooms)
    proxy = Proxy(settings, policy)
    await proxy.start()
    async with aiohttp.ClientSession() as client:
        setup = ProxySetup(proxy, LateBinding([]), fakes, client, f"http://127.0.0.1:{proxy.port}")
        views = proxy.dispatcher.workers
        await setup.until(lambda: all(one.state is WorkerState.SERVING for one in views))
        yield setup
        assert (proxy.dispatcher.policy_errors, proxy.dispatcher.requests) == (0, ())
    await proxy.stop()
    for runner in runners:
        await runner.cleanup()


def _prompt(tokens: int, **more: object) -> dict[str, object]:
    return {"model": "m", "prompt": list(range(tokens)), "max_tokens": 2, **more}


def test_proxy_rejects_prompt_longer_than_any_kv_cache() -> None:
    async def work() -> None:
        async with _site(*ROOMS) as setup:
            answer = await setup.post(_prompt(201), PATH)
            assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
            assert "201 tokens" in answer.error["message"]
            assert (await setup.post(_prompt(200), PATH)).status == 200
            assert (await setup.post(_prompt(101, data_parallel_rank=0), PATH)).status == 400
            assert (await setup.post(_prompt(101, data_parallel_rank=1), PATH)).status == 200
            assert [len(one.events("begin")) for one in setup.fakes] == [0, 2]

    run(work())


def test_proxy_sends_text_that_may_exceed_kv_cache_to_worker() -> None:
    async def work() -> None:
        async with _site(*ROOMS) as setup:
            answer = await setup.post({"model": "m", "prompt": "x" * 4000, "max_tokens": 2}, PATH)
            assert answer.status == 200
            assert [len(one.events("begin")) for one in setup.fakes] == [0, 1]

    run(work())


def test_proxy_sends_text_to_the_largest_worker_that_serves() -> None:
    async def work() -> None:
        async with _site(*ROOMS) as setup:
            setup.proxy.dispatcher.drain_worker(1)
            answer = await setup.post({"model": "m", "prompt": "x" * 4000, "max_tokens": 2}, PATH)
            assert answer.status == 200
            assert [len(one.events("begin")) for one in setup.fakes] == [1, 0]

    run(work())


def test_prompt_of_known_length_waits_for_the_worker_with_room() -> None:
    async def work() -> None:
        async with _site(*ROOMS) as setup:
            setup.proxy.dispatcher.drain_worker(1)
            late = asyncio.create_task(setup.post(_prompt(150), PATH))
            await setup.until(lambda: setup.proxy.dispatcher.queued == 1)
            setup.proxy.dispatcher.resume_worker(1)
            assert (await late).status == 200
            assert [len(one.events("begin")) for one in setup.fakes] == [0, 1]

    run(work())


def test_proxy_sends_long_prompt_to_worker_without_limit() -> None:
    async def work() -> None:
        async with _site(100, None) as setup:
            assert (await setup.post(_prompt(5000), PATH)).status == 200
            assert [len(one.events("begin")) for one in setup.fakes] == [0, 1]

    run(work())


def test_proxy_retries_on_worker_with_enough_kv_cache() -> None:
    async def work() -> None:
        async with _site(100, 200, 200) as setup:
            fails = {"fake": {"w1": {"status": 500}}}
            assert (await setup.post(_prompt(150, **fails), PATH)).status == 200
            assert [len(one.events("end")) for one in setup.fakes] == [0, 0, 1]

    run(work())
