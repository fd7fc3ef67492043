"""Workers that refuse, hang up, fall silent or go: nothing is lost, and nothing comes twice."""

import asyncio
import json

import pytest
from helpers.fakes.fake_openai_server import Fake, start
from helpers.harnesses.proxy_setup import (
    QUICK,
    Answer,
    ProxySetup,
    chat_request,
    error_of,
    proxied,
    run,
    settings_of,
    tokens_of,
)

from equipoise.balancer.requests.dispatcher import Running
from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.settings import HealthSettings, Limits, Timeouts

STUBBORN = HealthSettings(interval=3600, timeout=30)
"""Nothing is learnt of a worker but by its requests."""


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("options", [{"status": 500}, {"status": 503}, {"hang_up": 0}])
def test_proxy_retries_failed_request_before_first_token(
    streamed: bool, options: dict[str, int]
) -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), Fake("w1"), health=STUBBORN) as setup:
            answer = await setup.post(chat_request(2, stream=streamed, fake={"w0": options}))
            assert answer.status == 200
            assert b"w1:1 " in answer.body
            assert b"w0:" not in answer.body
            assert [len(fake.events("begin")) for fake in setup.fakes] == [1, 1]
            assert await setup.metric("retries_total") == 1

    run(work())


def test_proxy_bounds_attempts_and_returns_last_error() -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), Fake("w1"), limits=Limits(attempts=4)) as setup:
            options = {name: {"status": 500} for name in ("w0", "w1")}
            answer = await setup.post(chat_request(fake=options))
            assert (answer.status, answer.error["type"]) == (500, "fake")
            assert sum(len(fake.events("begin")) for fake in setup.fakes) == 4
            text = (await setup.get("/metrics")).body.decode()
            assert 'requests_total{outcome="workers_failed"} 1.0' in text

    run(work())


@pytest.mark.parametrize("status", [400, 404, 422, 429])
def test_proxy_passes_on_client_errors_without_retry(status: int) -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), Fake("w1")) as setup:
            answer = await setup.post(chat_request(fake={"w0": {"status": status}}, stream=True))
            assert (answer.status, answer.error["message"]) == (status, "as told")
            assert len(setup.fakes[1].events("begin")) == 0
            assert setup.proxy.dispatcher.requests == ()

    run(work())


def test_proxy_reports_hang_up_after_token_in_stream() -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), Fake("w1"), health=STUBBORN) as setup:
            answer = await setup.post(chat_request(5, stream=True, fake={"w0": {"hang_up": 2}}))
            assert answer.status == 200
            assert tokens_of(answer.body) == ["w0:0 ", "w0:1 "]
            error = error_of(answer.body)
            assert error is not None
            assert (error["code"], error["type"]) == ("worker_lost", "server_error")
            assert b"[DONE]" not in answer.body
            assert len(setup.fakes[1].events("begin")) == 0

    run(work())


def test_proxy_moves_tokenless_requests_of_lost_worker() -> None:
    async def work() -> None:
        lost_worker = Fake("w0", slots=3)
        async with proxied(lost_worker, Fake("w1", slots=3), health=QUICK) as setup:
            options = {"w0": {"silent": True}}
            calls = [setup.post(chat_request(2, stream=True, fake=options)) for _ in range(9)]
            answers_task = asyncio.gather(*calls)
            await setup.until(lambda: len(lost_worker.events("begin")) == 3)
            setup.proxy.dispatcher.set_health(0, WorkerState.LOST)
            answers = await answers_task
            assert [tokens_of(one.body) for one in answers] == [["w1:0 ", "w1:1 "]] * 9
            assert lost_worker.events("token") == []
            await setup.until(lambda: len(lost_worker.events("abort")) == 3)

    run(work())


def test_proxy_fails_started_stream_of_lost_worker() -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), Fake("w1")) as setup:
            call = asyncio.create_task(
                setup.post(chat_request(9, stream=True, fake={"w0": {"stall": 1}}))
            )
            dispatcher = setup.proxy.dispatcher
            await setup.until(
                lambda: any(isinstance(t.status, Running) for t in dispatcher.requests)
            )
            setup.proxy.dispatcher.set_health(0, WorkerState.LOST)
            answer = await call
            assert tokens_of(answer.body) == ["w0:0 "]
            error = error_of(answer.body)
            assert error is not None
            assert error["code"] == "worker_lost"
            assert setup.fakes[1].events("begin") == []

    run(work())


def test_proxy_stops_and_resumes_routing_by_worker_health() -> None:
    async def work() -> None:
        fake = Fake("w0")
        async with proxied(fake, Fake("w1")) as setup:
            states = setup.proxy.dispatcher.workers
            fake.health = 503
            await setup.until(lambda: states[0].state is WorkerState.DRAINING)
            assert [(await setup.post(chat_request(1))).text for _ in range(3)] == ["w1:0 "] * 3
            fake.health = 200
            await setup.until(lambda: states[0].state is WorkerState.SERVING)
            assert (await setup.post(chat_request(1))).text == "w0:0 "

    run(work())


@pytest.mark.slow
def test_silent_worker_is_not_lost_while_tokens_arrive() -> None:
    async def work() -> None:
        fake = Fake("w0", pace=0.02)
        health = HealthSettings(interval=0.1, timeout=0.3, lost_after=6)
        # With two others: where most servers are late none is drained for it.
        async with proxied(fake, Fake("w1"), Fake("w2"), health=health) as setup:
            call = asyncio.create_task(setup.post(chat_request(100_000, stream=True)))
            await setup.until(lambda: len(fake.events("token")) > 3)
            fake.health = 0
            view = setup.proxy.dispatcher.workers[0]
            await setup.until(lambda: view.state is WorkerState.DRAINING)
            token_count = len(fake.events("token"))
            await setup.until(lambda: len(fake.events("token")) > token_count + 100)
            state = view.state
            assert state is WorkerState.DRAINING
            await _cancel([call])
            await setup.until(lambda: view.state is WorkerState.LOST)

    run(work())


def test_proxy_holds_request_until_worker_serves() -> None:
    async def work() -> None:
        fake = Fake("w0")
        async with proxied(fake) as setup:
            setup.proxy.dispatcher.set_health(0, WorkerState.LOST)
            call = asyncio.create_task(setup.post(chat_request(1)))
            await setup.until(lambda: setup.proxy.dispatcher.queued == 1)
            assert fake.events("begin") == []
            setup.proxy.dispatcher.set_health(0, WorkerState.SERVING)
            assert (await call).status == 200

    run(work())


def test_proxy_rejects_queued_request_after_queue_timeout() -> None:
    async def work() -> None:
        timeouts = Timeouts(queue=0.3)
        async with proxied(Fake("w0"), Fake("w1"), timeouts=timeouts, health=STUBBORN) as setup:
            for number in (0, 1):
                setup.proxy.dispatcher.set_health(number, WorkerState.LOST)
            answer = await setup.post(chat_request())
            assert (answer.status, answer.error["code"]) == (503, "no_worker")
            # Not that slots are lacking: an operator would add capacity.
            assert answer.error["message"] == "no worker serves: all are lost or draining"
            ready = await setup.get("/ready")
            assert ready.status == 503
            assert json.loads(ready.body) == {"status": "no_worker", "serving_workers": 0}
            assert (await setup.get("/v1/models")).status == 503
            assert setup.proxy.dispatcher.queued == 0

    run(work())


def test_proxy_queues_requests_up_to_limit_when_workers_are_full() -> None:
    async def work() -> None:
        fake = Fake("w0", slots=2)
        async with proxied(fake, limits=Limits(queued=3)) as setup:
            options = {"w0": {"stall": 0}}
            first = [asyncio.create_task(setup.post(chat_request(1, stream=True, fake=options)))
                     for _ in range(2)]  # fmt: skip
            await setup.until(lambda: len(fake.events("begin")) == 2)
            more = [asyncio.create_task(setup.post(chat_request(1))) for _ in range(3)]
            await setup.until(lambda: setup.proxy.dispatcher.queued == 3)
            answer = await setup.post(chat_request())
            assert (answer.status, answer.error["type"]) == (429, "rate_limit_error")
            assert answer.headers["Retry-After"] == "1"
            assert await setup.metric("queued_requests") == 3
            await _cancel(first)
            assert [(await one).status for one in more] == [200] * 3
            assert len(fake.events("begin")) == 5

    run(work())


def test_proxy_rejects_requests_above_concurrency_limit() -> None:
    async def work() -> None:
        async with proxied(fake := Fake("w0"), limits=Limits(concurrency=1)) as setup:
            call = asyncio.create_task(
                setup.post(chat_request(1, stream=True, fake={"w0": {"stall": 0}}))
            )
            await setup.until(lambda: fake.events("begin"))
            assert (await setup.post(chat_request())).status == 429
            await _cancel([call])

    run(work())


async def _cancel(calls: list[asyncio.Task[Answer]]) -> None:
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("streamed", [False, True])
def test_disconnected_client_aborts_request_at_worker(streamed: bool) -> None:
    async def work() -> None:
        fake = Fake("w0", slots=1, pace=0.05)
        async with proxied(fake) as setup:
            call = asyncio.create_task(setup.post(chat_request(10_000, stream=streamed)))
            queued_call = asyncio.create_task(setup.post(chat_request(1)))
            await setup.until(lambda: fake.events("begin") and setup.proxy.dispatcher.queued == 1)
            await _cancel([call])
            await setup.until(lambda: fake.events("abort"))
            assert (await queued_call).status == 200
            assert setup.proxy.dispatcher.requests == ()
            await _wait_for_disconnects(setup, 1)

    run(work())


def test_disconnected_client_removes_queued_request() -> None:
    async def work() -> None:
        async with proxied(fake := Fake("w0", slots=1)) as setup:
            stall = chat_request(1, stream=True, fake={"w0": {"stall": 0}})
            calls = [asyncio.create_task(setup.post(stall)) for _ in range(3)]
            await setup.until(lambda: setup.proxy.dispatcher.queued == 2)
            await _cancel(calls[1:])
            await setup.until(lambda: setup.proxy.dispatcher.queued == 0)
            assert len(fake.events("begin")) == 1
            await _cancel(calls)
            await _wait_for_disconnects(setup, 3)

    run(work())


async def _wait_for_disconnects(setup: ProxySetup, count: int) -> None:
    async with asyncio.timeout(60):
        metric_line = f'requests_total{{outcome="client_disconnected"}} {count}.0'
        while metric_line not in (await setup.get("/metrics")).body.decode():
            await asyncio.sleep(0.02)
    assert setup.proxy.dispatcher.requests == ()


TIMEOUTS = [
    ({"silent": True}, Timeouts(first_token=0.2), "timeout", 504),
    ({"stall": 0}, Timeouts(first_token=0.2), "timeout", 504),
    ({"stall": 0}, Timeouts(total=0.3), "timeout", 504),
    ({"stall": 1}, Timeouts(token=0.2), "timeout", 200),
    ({"stall": 1}, Timeouts(total=2.0), "timeout", 200),
]


@pytest.mark.parametrize(("options", "timeouts", "code", "status"), TIMEOUTS)
def test_proxy_bounds_every_wait_of_a_stream(
    options: dict[str, object], timeouts: Timeouts, code: str, status: int
) -> None:
    async def work() -> None:
        async with proxied(Fake("w0"), Fake("w1"), timeouts=timeouts) as setup:
            answer = await setup.post(chat_request(5, stream=True, fake={"w0": options}))
            assert answer.status == status
            error = error_of(answer.body) if status == 200 else answer.error
            assert error is not None
            assert error["code"] == code
            assert setup.fakes[1].events("begin") == []
            await setup.until(lambda: setup.fakes[0].events("abort"))

    run(work())


@pytest.mark.slow
def test_proxy_applies_only_total_timeout_without_streaming() -> None:
    async def work() -> None:
        timeouts = Timeouts(first_token=0.1, token=0.1, total=2.5)
        async with proxied(Fake("w0", pace=0.05), timeouts=timeouts) as setup:
            assert (await setup.post(chat_request(6))).status == 200
            assert (await setup.post(chat_request(80))).status == 504

    run(work())


def test_failed_connection_marks_worker_lost_and_retries() -> None:
    async def work() -> None:
        stopped_worker = Fake("w0")
        runner = await start(stopped_worker)
        async with proxied(Fake("w1")) as helper:
            both = settings_of([stopped_worker, helper.fakes[0]]).workers
            async with proxied(workers=both, health=HealthSettings(interval=3.0)) as setup:
                await runner.cleanup()
                answer = await setup.post(chat_request(1))
                assert answer.text == "w1:0 "
                lost_state = WorkerState.LOST
                await setup.until(lambda: setup.proxy.dispatcher.workers[0].state is lost_state)

    run(work())
