"""The load client against servers that are made up: what it sends, and what it makes of answers."""

import asyncio
from collections import Counter

import numpy as np
import pytest
from helpers.fakes.fake_openai_server import Fake, start
from helpers.harnesses.proxy_setup import run
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.requests.workload import Workload
from equipoise.report.terminal import ColourMode
from equipoise.serve.load_client import (
    ClosedLoop,
    LoadClient,
    LoadPlan,
    LoadTarget,
    OpenLoop,
    RequestPacing,
    make_prompt,
)
from equipoise.serve.load_result import (
    WIDTH,
    LatencyStats,
    LoadResult,
    SentRequest,
    load_result_of,
    render,
)

SEEDS = st.integers(0, 1 << 32)
BRIEF = 0.05
"""Seconds in which another request would be sent, if one were."""


def plan(count: int, pace: RequestPacing, gap: float = 0.0) -> LoadPlan:
    arrivals = np.arange(count, dtype=np.float64) * gap
    load = Workload("made up", arrivals, np.full(count, 9), np.arange(1, count + 1))
    return LoadPlan(load, pace, seed=3)


def result(fake: Fake, pace: RequestPacing, options: dict[str, object] | None = None) -> LoadResult:
    async def work() -> LoadResult:
        runner = await start(fake)
        fields = () if options is None else (("fake", {fake.name: options}),)
        target = LoadTarget(url=f"http://127.0.0.1:{fake.port}", model="m", fields=fields)
        try:
            return load_result_of(await LoadClient(target).send(plan(6, pace)))
        finally:
            await runner.cleanup()

    return run(work())


@pytest.mark.parametrize("pace", [OpenLoop(), ClosedLoop(2), ClosedLoop(99)])
def test_load_client_sends_each_request_once_and_counts_tokens(pace: RequestPacing) -> None:
    fake = Fake("w0")
    summary = result(fake, pace)
    assert (summary.requests, summary.answered, summary.failures) == (6, 6, {})
    assert (summary.output_tokens, summary.prompt_tokens) == (1 + 2 + 3 + 4 + 5 + 6, 6 * 7)
    assert len(fake.events("begin")) == 6
    assert summary.ttft is not None
    assert summary.latency is not None
    assert 0 < summary.ttft.p50 <= summary.latency.p50 <= summary.latency.most <= summary.seconds


FAILURES: list[tuple[dict[str, object], str]] = [
    ({"status": 429}, "status 429: fake"),
    ({"status": 500}, "status 500: fake"),
    ({"hang_up": 0}, "broken off: ClientPayloadError"),
    ({"shy": True}, "stream without an end"),
    ({"raw": ["data: [DONE]\n\n"]}, "no token"),
    ({"raw": ['data: {"error": {"code": "worker_lost"}}\n\n']}, "error event: worker_lost"),
]


@pytest.mark.parametrize(("options", "kind"), FAILURES)
def test_load_client_counts_failures_by_kind(options: dict[str, object], kind: str) -> None:
    summary = result(Fake("w0"), ClosedLoop(3), options)
    assert summary.failures == {kind: 6}
    assert (summary.answered, summary.ttft, summary.output_tokens) == (0, None, 0)
    assert f"failed: 6 x {kind}" in render(summary, ColourMode.PLAIN)


def test_load_client_counts_timeouts_and_refused_connections() -> None:
    async def work() -> None:
        fake = Fake("w0")
        runner = await start(fake)
        url = f"http://127.0.0.1:{fake.port}"
        silent_target = LoadTarget(
            url=url, model="m", timeout=0.1, fields=(("fake", {"w0": {"silent": 1}}),)
        )
        summary = load_result_of(await LoadClient(silent_target).send(plan(2, OpenLoop())))
        assert summary.failures == {"timed out": 2}
        await runner.cleanup()
        requests = await LoadClient(LoadTarget(url=url, model="m")).send(plan(2, ClosedLoop(2)))
        assert load_result_of(requests).failures == {"no connection": 2}

    run(work())


def test_load_client_closed_loop_bounds_concurrency() -> None:
    """No request is ever answered."""

    async def count_started(pace: RequestPacing, least: int) -> int:
        fake = Fake("w0")
        runner = await start(fake)
        stall_fields = (("fake", {"w0": {"stall": 0}}),)
        target = LoadTarget(url=f"http://127.0.0.1:{fake.port}", model="m", fields=stall_fields)
        sending = asyncio.create_task(LoadClient(target).send(plan(12, pace)))
        try:
            while len(fake.events("begin")) < least:
                await asyncio.sleep(0.01)
            await asyncio.sleep(BRIEF)
            return len(fake.events("begin"))
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await runner.cleanup()

    assert run(count_started(ClosedLoop(3), 3)) == 3
    assert run(count_started(OpenLoop(), 12)) == 12


@given(seed=SEEDS, number=st.integers(0, 1000), tokens=st.integers(1, 300))
def test_load_prompts_have_requested_length_and_repeat(seed: int, number: int, tokens: int) -> None:
    text = make_prompt(seed, number, tokens)
    assert len(text.split(" ")) == tokens
    assert text == make_prompt(seed, number, tokens)


def test_load_plan_prompts_are_distinct() -> None:
    prompts = Counter(request.prompt for request in plan(200, OpenLoop()))
    assert max(prompts.values()) == 1


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=50))
def test_load_spread_percentiles_are_ordered(values: list[float]) -> None:
    spread = LatencyStats.of(values)
    assert spread is not None
    assert spread.p50 <= spread.p90 <= spread.p99 <= spread.most == max(values)


@given(count=st.integers(0, 20), kind=st.sampled_from(["timed out", "a\x1b[31mb", "x" * 200]))
def test_load_table_fits_width_for_any_result(count: int, kind: str) -> None:
    sent_requests = [
        SentRequest(n, 0.0, 1.0, 2.0, 3.0, [0.1], 5, 7, kind if n % 2 else None)
        for n in range(count)
    ]
    text = render(load_result_of(sent_requests), ColourMode.PLAIN)
    assert all(len(line) <= WIDTH and line.isprintable() for line in text.splitlines())
