"""Reports of workers: what a server tells is what the policy hears, and failures stop nothing."""

import asyncio
from dataclasses import replace

import pytest
from helpers.fakes.fake_openai_server import Fake
from helpers.harnesses.proxy_setup import chat_request, proxied, run, settings_of

from equipoise.balancer.requests.dispatcher import DispatchedRequest, RequestDispatcher
from equipoise.balancer.requests.policy import WorkerReport, WorkerState
from equipoise.balancer.requests.policy_factory import routing_policy_factory
from equipoise.serve.proxy_request import skip_failed_event
from equipoise.serve.settings import RANK_HEADER, ReportSettings, WorkerSettings
from equipoise.serve.worker_reports import InvalidMetrics, Sample, worker_report

ASKED = ReportSettings(waiting="w", running="r", tokens="t", interval=0.02)
WORKER = WorkerSettings(url="http://a:1", name="a", kv_tokens=1000)
PAGE = "w 3\nr 5\nt 700\nk 0.7\n"
REPORT = WorkerReport(waiting=3, running=5, tokens=700, kv_usage=0.7)


def samples(**values: float) -> list[Sample]:
    return [Sample(name, {}, value) for name, value in values.items()]


def test_report_derives_tokens_and_usage_from_kv_capacity() -> None:
    by_tokens = worker_report(samples(w=3, r=5, t=700), WORKER, ASKED)
    by_usage = replace(ASKED, tokens=None, kv_usage="k")
    assert by_tokens == REPORT
    assert worker_report(samples(w=3, r=5, k=0.7), WORKER, by_usage) == REPORT


def test_report_selects_rank_label_or_sums_server() -> None:
    settings = replace(ASKED, rank_label="rank")
    rows = [
        Sample(name, {"rank": str(rank)}, float(10 * rank + value))
        for rank in (0, 1)
        for name, value in (("w", 1), ("r", 2), ("t", 3))
    ]
    second = replace(WORKER, headers={RANK_HEADER: "1"})
    assert worker_report(rows, second, settings).waiting == 11
    assert worker_report(rows, WORKER, settings).tokens == 3 + 13
    with pytest.raises(InvalidMetrics, match="w is not there"):
        worker_report(rows, replace(WORKER, headers={RANK_HEADER: "2"}), settings)


def test_report_rejects_missing_or_huge_samples() -> None:
    with pytest.raises(InvalidMetrics, match="t is not there"):
        worker_report(samples(w=1, r=1), WORKER, ASKED)
    with pytest.raises(InvalidMetrics, match="more than there can be"):
        worker_report(samples(w=1e300, r=1, t=1), WORKER, ASKED)


def test_worker_reports_reach_policy() -> None:
    async def work() -> None:
        fakes = Fake("w0", metrics=PAGE), Fake("w1", metrics="w 0\nr 1\nt 2\n")
        settings = settings_of(list(fakes), reports=ASKED)
        async with proxied(*fakes, reports=settings.reports) as setup:
            await setup.until(lambda: len({worker for worker, _ in setup.policy.reports}) == 2)
            assert (0, replace(REPORT, kv_usage=0.0)) in setup.policy.reports
            assert (await setup.post(chat_request())).status == 200

    run(work())


@pytest.mark.parametrize("metrics", [None, "", "w nan\nr 1\nt 1\n", "w 1\nr 1\n"])
def test_report_failures_are_counted_while_worker_serves(metrics: str | None) -> None:
    async def work() -> None:
        worker = Fake("w0", metrics=metrics)
        async with proxied(worker, reports=replace(ASKED, timeout=0.05)) as setup:
            [view] = setup.proxy.dispatcher.workers
            await setup.until(lambda: view.report_failures >= 2)
            assert (await setup.post(chat_request())).status == 200
            text = (await setup.get("/metrics")).body.decode()
            assert 'equipoise_route_worker_report_failures_total{worker="w0"}' in text
            assert setup.policy.reports == []
            worker.metrics = PAGE
            await setup.until(lambda: setup.policy.reports)
            assert view.state is WorkerState.SERVING

    run(work())


def test_reports_are_off_by_default_and_ignored_when_lost() -> None:
    async def work() -> None:
        async with proxied(Fake("w0", metrics=PAGE)) as setup:
            await setup.post(chat_request())
            assert setup.policy.reports == []
            setup.proxy.dispatcher.set_health(0, WorkerState.LOST)
            setup.proxy.dispatcher.report_worker(0, REPORT)
            assert setup.policy.reports == []

    run(work())


def test_jsq_with_two_front_ends_counts_reported_requests() -> None:
    async def work() -> None:
        factory = routing_policy_factory("jsq", {"front_ends": 2})
        loop = asyncio.get_running_loop()
        policy = factory([4, 4], [None, None])
        dispatcher = RequestDispatcher(policy, 2, loop, skip_failed_event)
        dispatcher.report_worker(0, replace(REPORT, waiting=0, running=3, tokens=900))
        dispatcher.report_worker(1, replace(REPORT, waiting=0, running=0, tokens=0))
        for number in range(5):
            dispatcher.submit(DispatchedRequest(number, 100))
        assert [len(one.requests) for one in dispatcher.workers] == [1, 4]
        assert dispatcher.policy_errors == 0

    run(work())
