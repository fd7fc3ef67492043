"""Figures of a log: by worker they are parts of the whole, and what is not known is said so."""

import json

import pytest
from helpers.strategies.proxy_request_logs import LOGS, logged_request
from hypothesis import given

from equipoise.report.proxy_log.figures import proxy_log_figures
from equipoise.report.proxy_log.requests import ProxyLog
from equipoise.report.proxy_log.table import render
from equipoise.report.terminal import ColourMode


@given(routed=LOGS)
def test_route_figures_of_workers_sum_to_total(routed: ProxyLog) -> None:
    figures = proxy_log_figures(routed)
    loose = [one for one in routed.requests if one.worker is None]
    parts = figures.workers.values()
    assert sum(one.requests for one in parts) + len(loose) == figures.total.requests
    assert sum(one.output for one in parts) == figures.total.output
    assert sum(figures.outcomes.values()) == len(routed.requests)
    json.dumps(figures.to_json(), allow_nan=False)
    assert "nan" not in render(figures, "log", ColourMode.PLAIN)


def test_route_figures_compute_wait_ttft_and_tpot() -> None:
    figures = proxy_log_figures(
        ProxyLog("log", (logged_request(), logged_request(streamed=False, first_answer_at=5.9)))
    )
    total = figures.total
    assert total.wait.mean == pytest.approx(1.0)
    assert total.ttft.mean == pytest.approx(2.0)  # only of the stream
    assert total.tpot.p99 == pytest.approx(1.0)
    assert figures.seconds == pytest.approx(6.0)


def test_interrupted_request_has_no_time_per_token() -> None:
    assert logged_request(outcome="worker_lost").tpot is None
    assert logged_request(output=1).tpot is None


def test_unknown_route_figures_are_dashes_and_null() -> None:
    figures = proxy_log_figures(
        ProxyLog(
            "log", (logged_request(worker=None, bound_at=None, first_answer_at=None, output=0),), 2
        )
    )
    text = render(figures, "log", ColourMode.PLAIN)
    assert figures.to_json()["imbalance"] is None
    assert "\u2013" in text
    assert "2 lines of the log cut off and left out" in text
    assert "imbalance" not in text


def test_route_table_strips_escape_codes_of_worker_names() -> None:
    figures = proxy_log_figures(ProxyLog("log", (logged_request(worker="a\x1b[31m"),)))
    assert "\x1b" not in render(figures, "l\x1bog", ColourMode.PLAIN)
