"""A run that was given a placement: its figures, its table, its page."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from equipoise.demo.run_record import RunRecord
from equipoise.report.run.html import render_html
from equipoise.report.run.plots import pictures
from equipoise.report.run.summary import summarise
from equipoise.report.run.table import WIDTH, render
from equipoise.report.terminal import ColourMode

pytestmark = pytest.mark.slow

MakeRecord = Callable[..., RunRecord]
DIGEST = "0123456789abcdef" * 2


@pytest.fixture
def record(make_record: MakeRecord, make_variant: Callable[..., object]) -> RunRecord:
    """Exact's rows, without a rebalance."""
    plain = make_record()
    placement_variant = replace(plain.variants["exact"], name="placement", rebalances=(), aborts={})
    served = {"unbalanced": plain.variants["unbalanced"], "placement": placement_variant}
    return replace(plain, shares="placement", placement=DIGEST, variants=served)


def test_placement_run_is_measured_over_all_steps(record: RunRecord) -> None:
    summary = summarise(record)
    assert summary.measured_from_step == 0
    assert summary.not_exercised is None
    assert summary.exit_code == 0
    # Perfect but for 3 of 12 steps, whose layers have 0.5 and 1.
    assert summary.imbalance_placement == summary.imbalance_balanced == pytest.approx(0.75 * 3 / 12)
    assert (summary.imbalance_static, summary.copies, summary.rebalances) == (None, 0, 0)


def test_placement_run_with_other_outputs_fails(record: RunRecord) -> None:
    other_variant = replace(record.variants["placement"], outputs="b")
    summary = summarise(replace(record, variants=record.variants | {"placement": other_variant}))
    assert (summary.outputs_identical, summary.exit_code) == (False, 1)


def test_placement_run_table_names_digest_and_no_rebalances(record: RunRecord) -> None:
    text = render(summarise(record), ColourMode.PLAIN)
    assert "* placement " in text
    assert f"placement  {DIGEST} served unchanged: nothing moved" in text
    assert "rebalances" not in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_placement_run_page_compares_with_unbalanced(record: RunRecord) -> None:
    page = render_html(record, summarise(record), "equipoise run")
    assert "experts in 6 slots, the given placement." in page
    assert "balanced, the given placement" in page
    assert DIGEST in page
    assert "placement shares" not in page
    assert "rebalances committed" not in page


def test_placement_run_pictures_show_placement(record: RunRecord) -> None:
    svg_by_title = {one.title: one.svg for one in pictures(record)}
    assert "balanced, the given placement" in svg_by_title["Tokens by rank and step"]
    assert ">placement<" in svg_by_title["Imbalance by step"]
    assert ">placement<" in svg_by_title["Step time"]
