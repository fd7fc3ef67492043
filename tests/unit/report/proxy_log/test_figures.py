"""Figures of a log: by worker they are parts of the whole, and what is not known is said so."""

import json

import pytest
from helpers.strategies.proxy_request_logs import LOGS, logged_request
from hypothesis import given

from equipoise.report.proxy_log.figures import proxy_log_figures
from equipoise.report.proxy_log.requests import LoggedRequest, ProxyLog
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


def test_wait_leaves_out_requests_that_were_sent_again() -> None:
    """Their log has the last binding only: the time on a worker that was lost is no wait."""
    again = logged_request(bound_at=600.0, first_answer_at=601.0, ended_at=602.0, attempts=2)
    figures = proxy_log_figures(ProxyLog("log", (logged_request(), again)))
    assert figures.total.wait.p99 == pytest.approx(1.0)
    assert figures.total.retry_delay.mean == pytest.approx(600.0)
    assert "the time until then, P99 600.000 s, is in no wait" in render(
        figures, "log", ColourMode.PLAIN
    )


def test_pauses_do_not_change_figures_of_load() -> None:
    """A night without requests is no time of even load, and takes no moments from the day."""

    def at(begin: float, worker: str) -> LoggedRequest:
        return logged_request(worker=worker, arrived_at=begin, bound_at=begin,
                              first_answer_at=begin + 1, ended_at=begin + 6)  # fmt: skip

    day = tuple(at(k / 7, f"w{k % 3}") for k in range(40))
    night = 80_000.0
    next_day = tuple(at(night + k / 7, f"w{k % 3}") for k in range(40))
    alone, both = (proxy_log_figures(ProxyLog("log", r)) for r in (day, (*day, *next_day)))
    assert both.pauses == 1
    assert both.active_seconds == pytest.approx(2 * alone.active_seconds)
    assert both.seconds > night
    assert both.total.load == pytest.approx(alone.total.load, rel=0.3)
    text = render(both, "log", ColourMode.PLAIN)
    assert "2027-01-15 08:00:00 to 2027-01-16 06:13:31 UTC" in text
    assert "1 pause without requests left out, 22 h 13 min" in text


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
