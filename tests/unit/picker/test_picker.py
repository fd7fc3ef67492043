"""The picker behind an Envoy: where requests go, when, and what ends them."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers.fakes.failing_policies import FailingPolicy
from helpers.fakes.fake_envoy import KEY, BodyModes, until_left
from helpers.fakes.fake_openai_server import Fake, start
from helpers.harnesses.picker_setup import picking, prompt, run, worker_of

from equipoise.balancer.requests.policy import RoutingPolicy, WorkerState
from equipoise.serve import body_parser
from equipoise.serve.body_parser import LARGE_BODY, BodyParser
from equipoise.serve.outcomes import overloaded
from equipoise.serve.picker.settings import (
    PickerLimits,
    PickerTimeouts,
    StaticEndpoints,
    TokenSource,
)
from equipoise.serve.settings import HealthSettings, ReportSettings, WorkerSettings

BODIES = "NONE", "STREAMED", "BUFFERED", "FULL_DUPLEX_STREAMED"
ANSWERS = "NONE", "STREAMED", "FULL_DUPLEX_STREAMED"
SLOW = HealthSettings(interval=60.0)


@pytest.mark.parametrize("request_mode", BODIES)
@pytest.mark.parametrize("response_mode", ANSWERS)
def test_request_is_answered_in_every_body_mode(request_mode: str, response_mode: str) -> None:
    async def work() -> None:
        fakes = Fake("w0"), Fake("w1")
        async with picking(*fakes, modes=BodyModes(request_mode, response_mode)) as setup:
            long = prompt(5, prompt="even " * 20_000)
            for body in (prompt(5), long):
                answer = await setup.send(body)
                assert (answer.status, answer.broken) == (200, False)
                assert answer.body.endswith(b"data: [DONE]\n\n")
                assert answer.served == answer.endpoints[0]
            assert [one["tokens"] for fake in fakes for one in fake.events("end")] == [5, 5]

    run(work())


def test_request_waits_until_an_endpoint_has_a_free_slot() -> None:
    async def work() -> None:
        async with picking(Fake("w0", slots=1), Fake("w1", slots=1)) as setup:
            busy = prompt(fake={name: {"stall": 1} for name in ("w0", "w1")})
            held = [setup.send(busy) for _ in range(2)]
            await setup.until(lambda: sum(len(one.events("token")) for one in setup.fakes) == 2)
            late = setup.send()
            await setup.until(lambda: setup.pool.dispatcher.queued == 1)
            await asyncio.sleep(0.1)
            assert not late.done()
            await until_left(held[1])
            answer = await late
            assert answer.status == 200
            assert setup.pool.dispatcher.queued == 0
            await until_left(held[0])

    run(work())


def test_requests_are_spread_and_name_fallbacks() -> None:
    async def work() -> None:
        fakes = [Fake(f"w{n}", pace=0.02) for n in range(4)]
        async with picking(*fakes, limits=PickerLimits(fallbacks=2)) as setup:
            answers = await asyncio.gather(*(setup.send() for _ in range(8)))
            served = [one.served for one in answers]
            assert sorted(served) == sorted(setup.address(one.name) for one in fakes for _ in "ab")
            for one in answers:
                assert len(set(one.endpoints)) == 3

    run(work())


def test_client_header_does_not_choose_endpoint() -> None:
    async def work() -> None:
        async with picking(Fake("w0")) as setup:
            answer = await setup.send(headers={KEY: "10.9.9.9:1"})
            assert answer.endpoints == [setup.address("w0")]

    run(work())


def test_rank_header_of_endpoint_is_set() -> None:
    async def work() -> None:
        def rank(fake: Fake) -> WorkerSettings:
            return worker_of(fake, headers={"x-data-parallel-rank": "3"})

        async with picking(Fake("w0"), workers=rank) as setup:
            answer = await setup.send(headers={"x-data-parallel-rank": "9"})
            assert answer.forwarded["x-data-parallel-rank"] == "3"

    run(work())


def test_request_without_body_goes_anywhere_and_is_not_counted() -> None:
    async def work() -> None:
        async with picking(Fake("w0", slots=1)) as setup:
            held = setup.send(prompt(fake={"w0": {"stall": 1}}))
            await setup.until(lambda: setup.fakes[0].events("token"))
            answer = await setup.envoy.send(path="/v1/models", method="GET")
            assert (answer.status, json.loads(answer.body)["object"]) == (200, "list")
            assert len(setup.pool.dispatcher.requests) == 1
            await until_left(held)

    run(work())


@pytest.mark.parametrize("mode", BODIES)
def test_subset_limits_the_choice(mode: str) -> None:
    async def work() -> None:
        fakes = [Fake(f"w{n}") for n in range(3)]
        async with picking(*fakes, modes=BodyModes(mode)) as setup:
            both = [setup.address("w1"), setup.address("w2")]
            for _ in range(4):
                answer = await setup.send(subset=both)
                assert set(answer.endpoints) <= set(both)
                assert answer.status == 200
            for nobody in ([], ["10.9.9.9:1"]):
                answer = await setup.send(subset=nobody)
                assert (answer.status, answer.immediate) == (503, True)
                assert json.loads(answer.body)["error"]["code"] == "no_endpoint"

    run(work())


def test_subset_that_names_every_endpoint_binds_late() -> None:
    async def work() -> None:
        async with picking(Fake("w0", slots=1), Fake("w1", slots=1)) as setup:
            every = [setup.address("w0"), setup.address("w1")]
            busy = prompt(fake={name: {"stall": 1} for name in ("w0", "w1")})
            held = [setup.send(busy) for _ in range(2)]
            await setup.until(lambda: sum(len(one.events("token")) for one in setup.fakes) == 2)
            late = setup.send(subset=every)
            await setup.until(lambda: setup.pool.dispatcher.queued == 1)
            await until_left(held[0])
            assert (await late).status == 200
            await until_left(held[1])

    run(work())


def test_no_ready_endpoint_is_answered_at_once() -> None:
    async def work() -> None:
        async with picking(Fake("w0")) as setup:
            await setup.runners["w0"].cleanup()
            await setup.until(lambda: setup.state_of("w0") is WorkerState.LOST)
            answer = await setup.send()
            assert (answer.status, answer.immediate) == (503, True)
            assert answer.headers["retry-after"] == "1"
            status, text = await setup.page("/ready")
            about = {"status": "no_endpoint", "serving_endpoints": 0}
            assert (status, json.loads(text)) == (503, about)

    run(work())


def test_request_waits_while_every_endpoint_is_in_doubt() -> None:
    async def work() -> None:
        async with picking(Fake("w0")) as setup:
            setup.fakes[0].health = 503
            await setup.until(lambda: setup.state_of("w0") is WorkerState.DRAINING)
            late = setup.send()
            restricted = setup.send(subset=[setup.address("w0")])
            await setup.until(lambda: setup.pool.dispatcher.queued == 2)
            assert (await setup.send(subset=["10.9.9.9:1"])).status == 503
            assert (await setup.envoy.send(path="/v1/models", method="GET")).status == 200
            setup.fakes[0].health = 200
            assert (await late).status == (await restricted).status == 200

    run(work())


def test_full_queue_is_429_and_long_wait_503() -> None:
    async def work() -> None:
        limits, timeouts = PickerLimits(queued=1), PickerTimeouts(queue=0.3)
        async with picking(Fake("w0", slots=1), limits=limits, timeouts=timeouts) as setup:
            held = setup.send(prompt(fake={"w0": {"stall": 1}}))
            await setup.until(lambda: setup.fakes[0].events("token"))
            late = setup.send()
            await setup.until(lambda: setup.pool.dispatcher.queued == 1)
            refused = await setup.send()
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
            answer = await late
            assert json.loads(answer.body)["error"]["code"] == "queue_timeout"
            assert answer.status == 503
            await until_left(held)
            _, text = await setup.page("/metrics")
            assert 'equipoise_picker_requests_total{outcome="overloaded"} 1.0' in text
            assert 'equipoise_picker_requests_total{outcome="queue_timeout"} 1.0' in text

    run(work())


@pytest.mark.parametrize("header", ["x-gateway-inference-objective", "x-llm-d-inference-objective"])
def test_sheddable_request_is_refused_where_it_would_wait(header: str) -> None:
    async def work() -> None:
        sheddable = frozenset({"batch"})
        async with picking(Fake("w0", slots=1), sheddable=sheddable) as setup:
            assert (await setup.send(headers={header: "batch"})).status == 200
            held = setup.send(prompt(fake={"w0": {"stall": 1}}))
            await setup.until(lambda: setup.pool.running(0) == 1)
            refused = await setup.send(headers={header: "batch"})
            assert (refused.status, refused.immediate) == (429, True)
            late = setup.send(headers={header: "chat"})
            await setup.until(lambda: setup.pool.dispatcher.queued == 1)
            await until_left(held)
            assert (await late).status == 200

    run(work())


def test_more_streams_than_allowed_are_refused() -> None:
    async def work() -> None:
        async with picking(Fake("w0"), limits=PickerLimits(concurrency=1)) as setup:
            held = setup.send(prompt(fake={"w0": {"stall": 1}}))
            await setup.until(lambda: setup.fakes[0].events("token"))
            assert (await setup.send()).status == 429
            await until_left(held)

    run(work())


def test_body_over_the_limit_is_refused_before_a_worker() -> None:
    async def work() -> None:
        modes = BodyModes("FULL_DUPLEX_STREAMED")
        async with picking(Fake("w0"), modes=modes, limits=PickerLimits(body=100)) as setup:
            answer = await setup.send(prompt(prompt="x" * 200))
            assert answer.status == 413
            assert setup.fakes[0].events("begin") == []

    run(work())


@pytest.mark.parametrize(("mode", "kept"), [("BUFFERED", False), ("FULL_DUPLEX_STREAMED", True)])
def test_bodies_of_all_requests_are_bounded_together(mode: str, kept: bool) -> None:
    async def work() -> None:
        body = prompt(prompt="x" * 2_000)
        limits = PickerLimits(buffered=len(body) * 2)
        async with picking(Fake("w0", slots=1), modes=BodyModes(mode), limits=limits) as setup:
            held = setup.send(prompt(fake={"w0": {"stall": 1}}))
            await setup.until(lambda: setup.fakes[0].events("token"))
            late = [setup.send(body) for _ in range(2)]
            await setup.until(lambda: setup.pool.dispatcher.queued == 2)
            # What Envoy keeps itself the picker does not keep.
            assert setup.picker.bodies.buffered_bytes == kept * len(body) * 2
            late.append(setup.send(body))
            if kept:
                refused = await late.pop()
                assert (refused.status, refused.immediate) == (429, True)
                assert "no room for another body" in json.loads(refused.body)["error"]["message"]
            await until_left(held)
            assert {(await one).status for one in late} == {200}
            assert setup.picker.bodies.buffered_bytes == 0

    run(work())


@pytest.mark.parametrize("mode", BODIES)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/tokenize"), ("POST", "/v1/chat/completions/render?a=b"), ("DELETE", "/v1/files/1")],
)
def test_request_that_needs_no_slot_waits_for_none(mode: str, method: str, path: str) -> None:
    async def work() -> None:
        async with picking(Fake("w0", slots=1), modes=BodyModes(mode)) as setup:
            held = setup.send(prompt(fake={"w0": {"stall": 1}}))
            await setup.until(lambda: setup.fakes[0].events("token"))
            answer = await setup.send(prompt(), method=method, path=path)
            assert (answer.endpoints, answer.immediate) == ([setup.address("w0")], False)
            assert len(setup.pool.dispatcher.requests) == 1
            await until_left(held)

    run(work())


def test_large_body_is_read_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*_: object) -> None:
        raise AssertionError("all streams wait for this")

    async def work() -> None:
        async with picking(Fake("w0")) as setup:
            body = prompt(prompt=[1000] * (LARGE_BODY // 4), fake={"w0": {"stall": 1}})
            assert len(body) > LARGE_BODY
            monkeypatch.setattr(body_parser, "parse_request", parse)
            held = setup.send(body)
            await setup.until(lambda: setup.pool.running(0) == 1)
            [request] = setup.pool.dispatcher.requests
            assert request.size == LARGE_BODY // 4
            await until_left(held)

    run(work())


def test_body_that_the_parser_cannot_take_counts_by_its_length(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def parse(*_: object) -> None:
        raise overloaded("too many large bodies")

    async def work() -> None:
        monkeypatch.setattr(BodyParser, "parse", parse)
        async with picking(Fake("w0")) as setup:
            body = prompt(fake={"w0": {"stall": 1}})
            held = setup.send(body)
            await setup.until(lambda: setup.pool.running(0) == 1)
            [request] = setup.pool.dispatcher.requests
            assert request.size == -(-len(body) // 4)
            assert "is not read: too many large bodies" in caplog.text
            await until_left(held)

    run(work())


@pytest.mark.parametrize("mode", BODIES)
def test_client_that_leaves_the_queue_frees_its_place(mode: str) -> None:
    async def work() -> None:
        async with picking(Fake("w0", slots=1), modes=BodyModes(mode)) as setup:
            held = setup.send(prompt(fake={"w0": {"stall": 1}}))
            await setup.until(lambda: setup.fakes[0].events("token"))
            late = setup.send()
            await setup.until(lambda: setup.pool.dispatcher.queued == 1)
            await until_left(late)
            await setup.until(lambda: setup.pool.dispatcher.queued == 0)
            assert len(setup.pool.dispatcher.requests) == 1
            await until_left(held)

    run(work())


@pytest.mark.parametrize("says_served", [True, False])
def test_dead_worker_costs_no_request_without_an_answer(says_served: bool) -> None:
    async def work() -> None:
        fakes = Fake("w0"), Fake("w1")
        async with picking(*fakes, health=SLOW, says_served=says_served) as setup:
            await setup.runners["w0"].cleanup()
            answers = await asyncio.gather(*(setup.send() for _ in range(6)))
            assert [one.status for one in answers] == [200] * 6
            assert {one.served for one in answers} == {setup.address("w1")}
            if says_served:
                # Retries are evidence: nobody waited for the interval of a minute.
                await setup.until(lambda: setup.state_of("w0") is not WorkerState.SERVING)

    run(work())


def test_books_follow_the_endpoint_that_served() -> None:
    async def work() -> None:
        fakes = Fake("w0", slots=2), Fake("w1", slots=2)
        async with picking(*fakes, health=SLOW) as setup:
            fail = prompt(fake={"w0": {"status": 503}, "w1": {"stall": 1}})
            held = [setup.send(fail) for _ in range(2)]
            await setup.until(lambda: len(fakes[1].events("token")) == 2)
            await setup.until(lambda: setup.pool.running(1) == 2)
            assert setup.pool.running(0) == 0
            for one in held:
                await until_left(one)

    run(work())


def test_books_follow_the_rank_that_a_fallback_reached() -> None:
    async def work() -> None:
        fakes = Fake("w0", slots=4), Fake("w1", slots=4)
        runners = [await start(one) for one in fakes]
        name = "x-data-parallel-rank"
        ranks = tuple(
            worker_of(one, name=f"{one.name}-{rank}", headers={name: rank})
            for one in fakes
            for rank in "01"
        )
        async with picking(endpoints=StaticEndpoints(workers=ranks), health=SLOW) as setup:
            fail = prompt(fake={"w0": {"status": 503}, "w1": {"stall": 1}})
            held = [setup.send(fail) for _ in range(4)]
            await setup.until(lambda: len(fakes[1].events("token")) == 4)
            await setup.until(lambda: sum(map(setup.pool.running, range(4))) == 4)
            reached = [one["headers"][name] for one in fakes[1].events("begin")]
            running = [setup.pool.running(one.number) for one in setup.pool.endpoints]
            # Which ranks those are depends on when the first fail.
            assert running == [0, 0, reached.count("0"), reached.count("1")]
            for one in held:
                await until_left(one)
        for runner in runners:
            await runner.cleanup()

    run(work())


def test_every_endpoint_failing_ends_with_envoys_own_answer() -> None:
    async def work() -> None:
        fakes = Fake("w0"), Fake("w1")
        async with picking(*fakes, health=SLOW) as setup:
            for one in fakes:
                await setup.runners[one.name].cleanup()
            answer = await setup.send()
            assert (answer.status, answer.immediate) == (503, False)
            await setup.until(lambda: setup.pool.serving == 0)
            _, text = await setup.page("/metrics")
            assert 'equipoise_picker_requests_total{outcome="workers_failed"} 1.0' in text

    run(work())


def test_refusal_of_the_worker_is_passed_on_and_counted() -> None:
    async def work() -> None:
        async with picking(Fake("w0")) as setup:
            answer = await setup.send(prompt(fake={"w0": {"status": 400}}))
            assert answer.status == 400
            _, text = await setup.page("/metrics")
            assert 'equipoise_picker_requests_total{outcome="rejected_by_worker"} 1.0' in text

    run(work())


def test_body_that_is_not_json_goes_to_a_worker() -> None:
    async def work() -> None:
        async with picking(Fake("w0")) as setup:
            answer = await setup.send(b"{")
            assert answer.status == 500  # the fake's own words for it
            assert setup.fakes[0].events("begin") == []
            assert answer.endpoints == [setup.address("w0")]

    run(work())


def test_endpoint_that_leaves_the_list_keeps_its_requests() -> None:
    async def work() -> None:
        fakes = Fake("w0", pace=0.05), Fake("w1")
        async with picking(*fakes) as setup:
            both = [worker_of(one) for one in fakes]
            setup.pool.set_endpoints(both[:1])
            await setup.until(lambda: setup.state_of("w1") is None)
            held = setup.send(prompt(12))
            await setup.until(lambda: fakes[0].events("token"))
            setup.pool.set_endpoints(both[1:])
            assert setup.state_of("w0") is WorkerState.DRAINING
            await setup.until(lambda: setup.state_of("w1") is WorkerState.SERVING)
            assert (await setup.send()).served == setup.address("w1")
            assert (await held).body.endswith(b"data: [DONE]\n\n")
            await setup.until(lambda: setup.state_of("w0") is None)

    run(work())


@pytest.mark.parametrize("left", [True, False])
def test_restricted_request_moves_where_its_endpoint_serves_no_more(left: bool) -> None:
    async def work() -> None:
        fakes = [Fake(f"w{n}", slots=1) for n in range(3)]
        async with picking(*fakes) as setup:
            busy = prompt(fake={one.name: {"stall": 1} for one in fakes})
            held = [setup.send(busy, subset=[setup.address(one.name)]) for one in fakes]
            await setup.until(lambda: all(one.events("token") for one in fakes))
            late = setup.send(subset=[setup.address("w0"), setup.address("w1")])
            await setup.until(lambda: setup.pool.dispatcher.queued == 1)
            # It waits for the first of those that are equally loaded.
            if left:
                setup.pool.set_endpoints([worker_of(one) for one in fakes[1:]])
            else:
                fakes[0].health = 500
                await setup.until(lambda: setup.state_of("w0") is WorkerState.DRAINING)
            await until_left(held[1])
            assert (await late).served == setup.address("w1")
            for one in held:
                await until_left(one)

    run(work())


def test_waiting_request_takes_an_endpoint_that_was_added() -> None:
    async def work() -> None:
        fakes = Fake("w0", slots=1), Fake("w1", slots=1)
        async with picking(*fakes) as setup:
            setup.pool.set_endpoints([worker_of(fakes[0])])
            await setup.until(lambda: setup.state_of("w1") is None)
            held = setup.send(prompt(fake={"w0": {"stall": 1}}))
            await setup.until(lambda: fakes[0].events("token"))
            late = setup.send()
            await setup.until(lambda: setup.pool.dispatcher.queued == 1)
            setup.pool.set_endpoints([worker_of(one) for one in fakes])
            assert (await late).served == setup.address("w1")
            await until_left(held)

    run(work())


def test_endpoint_with_other_slots_takes_more_requests() -> None:
    async def work() -> None:
        fake = Fake("w0", slots=2)
        async with picking(fake, workers=lambda one: worker_of(one, slots=1)) as setup:
            body = prompt(fake={"w0": {"stall": 1}})
            held = [setup.send(body) for _ in range(2)]
            await setup.until(lambda: setup.pool.dispatcher.queued == 1)
            setup.pool.set_endpoints([replace(worker_of(fake), slots=2)])
            await setup.until(lambda: setup.pool.dispatcher.queued == 0)
            for one in held:
                await until_left(one)

    run(work())


def test_late_health_check_after_a_changed_list_loses_no_worker() -> None:
    async def work() -> None:
        fakes = Fake("w0"), Fake("w1")
        health = HealthSettings(interval=0.05, timeout=0.05, lost_after=1000)
        async with picking(*fakes, health=health) as setup:
            held = setup.send(prompt(fake={name: {"stall": 1} for name in ("w0", "w1")}))
            await setup.until(lambda: setup.pool.dispatcher.requests)
            [request] = setup.pool.dispatcher.requests
            late = fakes[request.worker]
            late.health = 0
            setup.pool.set_endpoints([worker_of(one, slots=5) for one in fakes])
            await setup.until(lambda: setup.state_of(late.name) is not WorkerState.SERVING)
            assert setup.state_of(late.name) is WorkerState.DRAINING
            assert request.worker is not None
            late.health = 200
            await until_left(held)

    run(work())


def test_rank_that_is_added_to_a_server_has_its_health() -> None:
    async def work() -> None:
        fake = Fake("w0")

        def rank(number: int) -> WorkerSettings:
            headers = {"x-data-parallel-rank": str(number)}
            return worker_of(fake, name=f"rank {number}", headers=headers)

        async with picking(fake, health=SLOW, workers=lambda _: rank(0)) as setup:
            setup.pool.set_endpoints([rank(0), rank(1)])
            assert setup.pool.serving == 2
            setup.pool.set_endpoints([rank(1)])
            assert setup.pool.serving == 1

    run(work())


def test_counter_of_tokens_goes_on_across_a_changed_list() -> None:
    async def work() -> None:
        fake = Fake("w0", metrics=page(100))
        reports = ReportSettings(
            waiting="w", running="r", tokens="t", generated="made_total", interval=0.02
        )
        async with picking(fake, reports=reports, tokens=TokenSource.METRICS) as setup:
            held = setup.send(prompt(fake={"w0": {"stall": 1}}))
            await setup.until(lambda: setup.pool.running(0) == 1)
            await asyncio.sleep(0.1)
            [request] = setup.pool.dispatcher.requests
            fake.metrics = page(140)
            setup.pool.set_endpoints([worker_of(fake, slots=5)])
            await setup.until(lambda: request.tokens == 41)
            await until_left(held)

    run(work())


def test_drain_lets_answers_end_and_refuses_what_waits() -> None:
    async def work() -> None:
        timeouts = PickerTimeouts(drain=0.3)
        async with picking(Fake("w0", slots=1, pace=0.05), timeouts=timeouts) as setup:
            held = setup.send(prompt(30))
            await setup.until(lambda: setup.fakes[0].events("token"))
            late = setup.send()
            await setup.until(lambda: setup.pool.dispatcher.queued == 1)
            assert await readiness(setup.picker.ports["health"]) == "SERVING"
            assert (await setup.page("/ready"))[0] == 200
            stopping = asyncio.create_task(setup.picker.stop())
            await asyncio.sleep(0.05)
            assert await readiness(setup.picker.ports["health"]) == "NOT_SERVING"
            status, text = await setup.page("/ready")
            assert (status, json.loads(text)["status"]) == (503, "draining")
            assert await stopping == 1
            answer = await late
            assert json.loads(answer.body)["error"]["code"] == "shutting_down"
            assert answer.status == 503
            await setup.picker.close()
            # The stream was closed without an error: the answer goes on without the picker.
            assert not held.done()
            await until_left(held)

    run(work())


async def readiness(port: int, service: str = "readiness") -> str:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


@pytest.mark.parametrize(
    "service", ["", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"]
)
def test_grpc_health_is_on_both_ports(service: str) -> None:
    async def work() -> None:
        async with picking(Fake("w0")) as setup:
            for port in ("grpc", "health"):
                assert await readiness(setup.picker.ports[port], service) == "SERVING"

    run(work())


def test_endpoints_page_and_metrics_name_every_endpoint() -> None:
    async def work() -> None:
        async with picking(Fake("w0"), Fake("w1")) as setup:
            status, text = await setup.page("/endpoints")
            [first, _] = json.loads(text)["endpoints"]
            assert status == 200
            assert first == {
                "name": "w0",
                "address": setup.address("w0"),
                "state": "serving",
                "leaving": False,
                "requests": 0,
            }
            _, text = await setup.page("/metrics")
            assert 'equipoise_picker_endpoint_state{endpoint="w1",state="serving"} 1.0' in text
            assert "equipoise_picker_serving_endpoints 2.0" in text

    run(work())


def page(generated: int) -> str:
    return f"w 0\nr 1\nt 0\nmade_total {generated}\n"


def test_metrics_have_each_series_once_where_an_endpoint_moves() -> None:
    async def work() -> None:
        fakes = Fake("w0", pace=0.05), Fake("w1", pace=0.05)
        async with picking(*fakes) as setup:
            setup.pool.set_endpoints([worker_of(fakes[0])])
            await setup.until(lambda: setup.state_of("w1") is None)
            held = [setup.send(prompt(12))]
            await setup.until(lambda: setup.pool.running(0) == 1)
            setup.pool.set_endpoints([worker_of(fakes[1], name="w0")])
            await setup.until(lambda: setup.pool.serving == 1)
            held.append(setup.send(prompt(12)))
            await setup.until(lambda: setup.pool.running(1) == 1)
            _, text = await setup.page("/metrics")
            series = [one.rsplit(" ", 1)[0] for one in text.splitlines() if one[0] != "#"]
            assert len(series) == len(set(series))
            assert 'equipoise_picker_endpoint_running_requests{endpoint="w0"} 2.0' in text
            for state in ("draining", "serving"):
                assert f'endpoint_state{{endpoint="w0",state="{state}"}} 1.0' in text
            await asyncio.gather(*held)

    run(work())


def test_tokens_come_from_a_counter_of_the_worker() -> None:
    async def work() -> None:
        fake = Fake("w0", metrics=page(100))
        reports = ReportSettings(
            waiting="w", running="r", tokens="t", generated="made_total", interval=0.02
        )
        async with picking(fake, reports=reports, tokens=TokenSource.METRICS) as setup:
            held = setup.send(prompt(fake={"w0": {"stall": 1}}))
            await setup.until(lambda: setup.pool.running(0) == 1)
            [view] = setup.pool.dispatcher.workers
            [request] = view.requests.values()
            await asyncio.sleep(0.1)
            assert request.tokens == 1
            fake.metrics = page(140)
            await setup.until(lambda: request.tokens == 41)
            assert view.load == request.size + 41
            fake.metrics = "nothing\n"
            await setup.until(lambda: view.report_failures)
            assert request.tokens == 41
            await until_left(held)

    run(work())


@pytest.mark.parametrize("tokens", TokenSource)
def test_chunks_are_counted_only_where_tokens_come_from_them(tokens: TokenSource) -> None:
    async def work() -> None:
        modes = BodyModes(response="FULL_DUPLEX_STREAMED")
        async with picking(Fake("w0"), modes=modes, tokens=tokens) as setup:
            held = setup.send(prompt(9, fake={"w0": {"stall": 6}}))
            await setup.until(lambda: len(setup.fakes[0].events("token")) == 6)
            [view] = setup.pool.dispatcher.workers
            [request] = view.requests.values()
            counted = 6 if tokens is TokenSource.CHUNKS else 1
            await setup.until(lambda: request.tokens == counted)
            await until_left(held)

    run(work())


@pytest.mark.parametrize("mode", ["NONE", "BUFFERED", "FULL_DUPLEX_STREAMED"])
def test_size_is_of_the_prompt_where_its_body_is_sent(mode: str) -> None:
    async def work() -> None:
        async with picking(Fake("w0"), modes=BodyModes(mode)) as setup:
            # A body is most often longer than its prompt: 400 tokens, 2,000 letters.
            body = prompt(prompt=[1000] * 400, fake={"w0": {"stall": 1}})
            held = setup.send(body)
            await setup.until(lambda: setup.pool.running(0) == 1)
            [request] = setup.pool.dispatcher.requests
            assert request.size == (-(-len(body) // 4) if mode == "NONE" else 400)
            await until_left(held)

    run(work())


def test_ratio_of_bytes_to_tokens_is_learned_from_usage() -> None:
    async def work() -> None:
        modes = BodyModes(response="STREAMED")
        async with picking(Fake("w0"), modes=modes) as setup:
            text, usage = "even " * 2_000, {"include_usage": True}
            for _ in range(40):
                body = prompt(1, prompt=text, prompt_tokens=9_000, stream_options=usage)
                assert (await setup.send(body)).status == 200
            held = setup.send(prompt(prompt=text, fake={"w0": {"stall": 1}}))
            await setup.until(lambda: setup.pool.running(0) == 1)
            [request] = setup.pool.dispatcher.requests
            assert request.size > 8_000  # 2,500 at four bytes a token
            await until_left(held)

    run(work())


def failing_policy(slots: Sequence[int], kv_tokens: Sequence[int | None]) -> RoutingPolicy:
    return FailingPolicy(slots, kv_tokens)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_failed_policy_is_500_in_the_words_of_the_path(path: str) -> None:
    async def work() -> None:
        async with picking(Fake("w0"), factory=failing_policy) as setup:
            dispatcher = setup.pool.dispatcher
            assert isinstance(dispatcher.policy, FailingPolicy)
            dispatcher.policy.left = 0  # it raises at the next event
            refused = await setup.send(path=path)
            assert (refused.status, refused.immediate) == (500, True)
            content = json.loads(refused.body)
            assert content["error"]["message"] == "the policy failed at this request"
            assert (content.get("type") == "error") is (path == "/v1/messages")
            assert dispatcher.policy_errors == 1
            dispatcher.policy_errors = 0  # so that the harness finds none

    run(work())
