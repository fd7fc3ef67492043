"""The page of a log: self-contained, escaped, and there whatever the log holds."""

import re
from xml.etree import ElementTree

import pytest
from helpers.strategies.trips import LOGS, trip
from hypothesis import given, settings

from equipoise.report.routed.curves import CLASSES, classes_of, wait_by_size
from equipoise.report.routed.figures import figures_of
from equipoise.report.routed.html import render_html
from equipoise.report.routed.trips import Routed

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.slow


def page(routed: Routed) -> str:
    return render_html(routed, figures_of(routed), {"command": "equipoise route-report <log>"})


@settings(max_examples=8)
@given(routed=LOGS)
def test_any_log_becomes_a_page_that_needs_nothing_else(routed: Routed) -> None:
    text = page(routed)
    assert not re.search(r'(?:src|href)="(?!#|data:)', text)
    assert "<script" not in text
    assert ("Requests, worker by worker" in text) == bool(routed.bound)
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


def test_names_out_of_a_log_are_escaped_in_pictures_and_tables() -> None:
    text = page(Routed("<log>", (trip(worker="<b>$x$"), trip(worker=None, bound=None, first=None))))
    assert "<b>$x$" not in text
    assert "&lt;b&gt;" in text
    assert "&lt;log&gt;" in text


def test_the_same_log_makes_the_same_page() -> None:
    routed = Routed("log", tuple(trip(prompt=k, end=6.0 + k) for k in range(1, 40)))
    assert page(routed) == page(routed)
    assert "Who waits" in page(routed)


def test_prompts_of_one_length_are_in_one_class_and_not_told_apart_by_their_order() -> None:
    alike = Routed("log", tuple(trip(prompt=7, bound=1.0 + k) for k in range(50)))
    assert [len(one) for one in classes_of(alike)] == [50]
    assert wait_by_size(alike) is None
    apart = Routed("log", tuple(trip(prompt=k) for k in range(1, 101)))
    assert [len(one) for one in classes_of(apart)] == [10] * CLASSES
