"""The page of a log: self-contained, escaped, and there whatever the log holds."""

import re
from xml.etree import ElementTree

import pytest
from helpers.harnesses.html_pages import assert_every_text_is_escaped
from helpers.strategies.proxy_request_logs import LOGS, logged_request
from hypothesis import given, settings

from equipoise.report.proxy_log.figures import proxy_log_figures
from equipoise.report.proxy_log.html import render_html
from equipoise.report.proxy_log.plots import CLASSES, prompt_classes, wait_by_prompt
from equipoise.report.proxy_log.requests import ProxyLog

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.slow


def page(routed: ProxyLog) -> str:
    return render_html(
        routed, proxy_log_figures(routed), {"command": "equipoise route-report <log>"}
    )


@settings(max_examples=8)
@given(routed=LOGS)
def test_route_page_is_self_contained_for_any_log(routed: ProxyLog) -> None:
    text = page(routed)
    assert not re.search(r'(?:src|href)="(?!#|data:)', text)
    assert "<script" not in text
    assert ("Requests, worker by worker" in text) == bool(routed.bound_requests)
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


def test_route_page_escapes_names_of_log() -> None:
    text = page(
        ProxyLog(
            "<log>",
            (
                logged_request(worker="<b>$x$"),
                logged_request(worker=None, bound_at=None, first_answer_at=None),
            ),
        )
    )
    assert "<b>$x$" not in text
    assert "&lt;b&gt;" in text
    assert "&lt;log&gt;" in text


def test_route_page_is_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1800000000")
    routed = ProxyLog(
        "log", tuple(logged_request(prompt=k, ended_at=6.0 + k) for k in range(1, 40))
    )
    assert page(routed) == page(routed)
    assert "Who waits" in page(routed)
    assert "2027-01-15 08:00 UTC" in page(routed)


def test_route_page_escapes_every_text() -> None:
    routed = ProxyLog(
        "log", tuple(logged_request(prompt=k, ended_at=6.0 + k) for k in range(1, 40))
    )
    assert_every_text_is_escaped("equipoise.report.proxy_log.html", lambda: page(routed))


def test_prompt_classes_keep_equal_lengths_together() -> None:
    alike = ProxyLog("log", tuple(logged_request(prompt=7, bound_at=1.0 + k) for k in range(50)))
    assert [len(one) for one in prompt_classes(alike)] == [50]
    assert wait_by_prompt(alike) is None
    distinct_lengths = ProxyLog("log", tuple(logged_request(prompt=k) for k in range(1, 101)))
    assert [len(one) for one in prompt_classes(distinct_lengths)] == [10] * CLASSES
