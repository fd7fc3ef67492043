"""The page of `equipoise report`: pictures, the map of experts, escaping."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers.harnesses.html_pages import assert_every_text_is_escaped, outline
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balancer.experts import plan
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.balancer.formats.statistics import ExpertStatistics
from equipoise.report.placement.comparison import Comparison, compare
from equipoise.report.placement.html import HOTTEST, expert_data, render_html

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.slow

WINDOWS, LAYERS, EXPERTS, RANKS, SLOTS = 5, (3, 5, 9), 8, 4, 12
LARGEST = 2_000_000


def statistics() -> ExpertStatistics:
    draw = np.random.default_rng(5)
    rows = draw.poisson(20.0 * np.arange(EXPERTS), (WINDOWS, len(LAYERS), EXPERTS))
    return ExpertStatistics(rows.astype(np.int64), LAYERS, first_iteration=100)


def comparison(windows: ExpertStatistics | None = None) -> Comparison:
    known = windows or statistics()
    planned = plan(known.counts, slots=SLOTS, ranks=RANKS)
    placement = ExpertPlacement(planned.placement, planned.shares, RANKS, known.layers)
    return compare(known, placement, RANKS)


def page(compared: Comparison) -> str:
    return render_html(compared, {"command": "equipoise report <b>", "statistics": "<i>"})


def test_report_page_shows_windows_layers_ranks_and_experts() -> None:
    text = page(comparison())
    heads = ["<h1>Load of ranks and experts", "Imbalance by layer and window"]
    heads += ["Imbalance by layer<", "Rows by layer and destination rank"]
    heads += ["Rows by layer and expert", "Hottest experts", "Window by window", "P90", "<script"]
    places = [text.index(head) for head in heads]
    assert places == sorted(places)
    assert text.count("<svg") == 3
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


def test_report_page_escapes_every_text() -> None:
    assert_every_text_is_escaped("equipoise.report.placement.html", lambda: page(comparison()))


def test_report_page_is_self_contained() -> None:
    text = page(comparison())
    assert all(load.startswith(("data:", "#")) for load in outline(text).loads)
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)


def test_expert_data_names_ranks_that_hold_each_expert() -> None:
    compared = comparison()
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page(compared))[0])
    assert data == json.loads(json.dumps(expert_data(compared)))
    assert data["rows"] == statistics().counts.sum(axis=0).tolist()
    for row, placement in enumerate(data["placement"]):
        for expert in range(EXPERTS):
            slots = [slot for slot, held in enumerate(placement) if held == expert]
            assert slots
            assert sum(data["shares"][row][slot] for slot in slots) == pytest.approx(100, abs=2)
            assert all(slot // data["slotsPerRank"] < RANKS for slot in slots)


def test_hottest_experts_come_first_with_their_copies() -> None:
    compared = comparison()
    row = r"<tr><td>(\d+)</td><td>(\d+)</td><td>([\d,]+)</td>.*?<td>([\d, ]+)</td></tr>"
    rows = re.findall(row, page(compared))
    counts = statistics().counts.sum(axis=0)
    means = [counts[LAYERS.index(int(layer)), int(expert)] / counts[LAYERS.index(int(layer))].mean()
             for layer, expert, *_ in rows]  # fmt: skip
    assert len(rows) == HOTTEST
    assert means == sorted(means, reverse=True)
    for layer, expert, _, ranks in rows:
        slots = compared.placement.placement[LAYERS.index(int(layer))].reshape(RANKS, -1)
        held = {rank for rank in range(RANKS) if int(expert) in slots[rank]}
        assert set(map(int, ranks.split(", "))) == held


def test_report_page_of_one_window_and_layers_without_rows() -> None:
    counts = np.zeros((1, 2, EXPERTS), dtype=np.int64)
    counts[0, 1, 2] = 9
    text = page(compare(ExpertStatistics(counts), None, 2))
    assert "The one window." in text
    assert "nan" not in text.split("<script")[0].lower().replace("nance", "")


def test_report_page_of_large_model_is_small(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    counts = draw.poisson(draw.gamma(0.6, 60.0, (1, 58, 256)), (40, 58, 256)).astype(np.int64)
    known = ExpertStatistics(counts, tuple(range(3, 61)))
    planned = plan(counts, slots=288, ranks=32)
    placement = ExpertPlacement(planned.placement, planned.shares, 32, known.layers)
    assert len(page(compare(known, placement, 32)).encode()) < LARGEST


@settings(max_examples=30)
@given(rows=st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=6))
def test_window_imbalance_has_layers_and_windows(rows: list[list[int]]) -> None:
    counts = np.array(rows, dtype=np.int64)[:, None, :]
    (layout,) = compare(ExpertStatistics(counts), None, 2).layouts
    assert layout.window_imbalance.shape == (1, len(rows))
    for value, row in zip(layout.window_imbalance[0], rows, strict=True):
        ranks = sum(row[:2]), sum(row[2:])
        assert np.isnan(value) if not sum(ranks) else value == max(ranks) * 2 / sum(ranks) - 1
    known = layout.window_imbalance[~np.isnan(layout.window_imbalance)]
    if known.size:
        assert layout.quantile_over_windows(1.0)[0] == known.max()
