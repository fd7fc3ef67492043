"""The report as a browser would see it."""

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.demo.run_record import RunRecord
from equipoise.report.page import escape_html
from equipoise.report.run.html import render_html
from equipoise.report.run.plots import pictures
from equipoise.report.run.summary import summarise

pytestmark = pytest.mark.slow

MakeRecord = Callable[..., RunRecord]
EMPTY = {"meta", "link", "br", "hr", "img", "input"}


class Outline(HTMLParser):
    """Checks that every element is closed, and keeps what matters."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name.endswith(("src", "href"))]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.remove(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def outline(record: RunRecord) -> tuple[str, Outline]:
    page = render_html(record, summarise(record), "equipoise run --text '<b>'")
    parsed = Outline()
    parsed.feed(page)
    parsed.close()
    assert parsed.open == []
    return page, parsed


def test_run_page_has_every_section(
    make_record: MakeRecord,
) -> None:
    page, parsed = outline(make_record())
    assert parsed.tags.count("svg") == 4
    assert parsed.tags.count("table") == 1
    assert page.count('<div class="tile">') == 8
    for words in ("outputs identical: yes", "def f():", "a processor", "stall_noise_seconds"):
        assert words in parsed.text
    assert len(page.encode()) < 2_000_000


def test_run_page_tile_says_times_once(make_record: MakeRecord) -> None:
    record = make_record()
    lagged_variant = replace(record.variants["lagged"], name="exact")
    page, _ = outline(replace(record, variants={**record.variants, "exact": lagged_variant}))
    assert re.search(r"<b>[0-9.]+</b><span>times smaller</span>", page)


def test_run_page_is_self_contained(make_record: MakeRecord) -> None:
    page, parsed = outline(make_record())
    assert all(load.startswith(("data:", "#")) for load in parsed.loads)
    assert "@import" not in page
    assert all(link.startswith("#") for link in re.findall(r"url\((.*?)\)", page))
    assert not {"script", "link", "iframe"} & set(parsed.tags)


def test_run_page_escapes_prompts_and_command(make_record: MakeRecord) -> None:
    page, parsed = outline(make_record())
    assert "<script>alert(1)</script> & \ufffd\ufffd" in parsed.text
    assert "<script" not in page
    assert "--text '<b>'" in parsed.text
    assert "\x00" not in page


def test_run_page_pictures_escape_phase_names(make_record: MakeRecord) -> None:
    hostile = ("</svg><script>$x_{$", "\x1b]0;&\ud83d")
    page, parsed = outline(make_record(phases=hostile))
    assert "<script" not in page
    assert parsed.tags.count("svg") == 4


def test_run_page_marks_different_outputs_as_bad(make_record: MakeRecord) -> None:
    page, parsed = outline(make_record(reference_outputs="b"))
    assert 'class="verdict bad"' in page
    assert "outputs identical: no" in parsed.text


def test_run_page_without_balancing(make_record: MakeRecord) -> None:
    record = make_record(shares="none", prompts=(), continuations=())
    for name in ("static", "lagged", "exact"):
        del record.variants[name]
    _, parsed = outline(record)
    assert parsed.tags.count("svg") == 4
    assert "None" not in parsed.text


def test_report_says_that_unbalanced_was_not_served(make_record: MakeRecord) -> None:
    record = make_record()
    for name in ("unbalanced", "static", "lagged"):
        del record.variants[name]
    page, parsed = outline(record)
    assert "The traffic was not served without balancing." in parsed.text
    assert "than without balancing" not in parsed.text
    assert page.count('<div class="tile">') == 6
    assert parsed.tags.count("svg") == 4
    assert "None" not in parsed.text


def test_run_pictures_accept_steps_without_tokens(make_record: MakeRecord) -> None:
    record = make_record()
    for name, variant in record.variants.items():
        rows = variant.rank_rows.copy()
        rows[4] = 0
        record.variants[name] = replace(variant, rank_rows=rows)
    idle = record.expert_rows.copy()
    idle[4] = 0
    assert len(pictures(replace(record, expert_rows=idle))) == 4


def test_run_page_without_any_rows(make_record: MakeRecord) -> None:
    record = make_record()
    for name, variant in record.variants.items():
        record.variants[name] = replace(variant, rank_rows=np.zeros_like(variant.rank_rows))
    _, parsed = outline(replace(record, expert_rows=np.zeros_like(record.expert_rows)))
    assert parsed.tags.count("svg") == 4


def test_run_pictures_are_well_formed_and_reproducible(
    make_record: MakeRecord,
) -> None:
    first, second = pictures(make_record()), pictures(make_record())
    assert first == second
    for picture in first:
        assert ElementTree.fromstring(picture.svg).tag.endswith("svg")
        assert "currentColor" in picture.svg


def test_run_page_picture_ids_are_unique(make_record: MakeRecord) -> None:
    page, _ = outline(make_record())
    names = re.findall(r' id="([^"]+)"', page)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("phase", ["prose", "code"])
def test_run_pictures_name_each_phase(make_record: MakeRecord, phase: str) -> None:
    for picture in pictures(make_record()):
        assert f">{phase}</text>" in picture.svg


@given(st.text())
def test_run_page_text_escapes_markup_and_control_characters(text: str) -> None:
    html_text = escape_html(text)
    assert not set(html_text) & set("<>\"'")
    assert all(letter.isprintable() or letter in "\n\t" for letter in html_text)


def test_run_page_shows_engine_settings_when_recorded(make_record: MakeRecord) -> None:
    _, on_progress = outline(make_record())
    assert "Options of the engine" in on_progress.text
    assert "staging_bytes1.2 MiB" in on_progress.text
    page, still = outline(make_record(engine_options={}))
    assert "Options of the engine" not in still.text
    assert "Options of the engine" not in page
