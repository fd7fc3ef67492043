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

from equipoise.demo.record import RunRecord
from equipoise.report.html import render_html, visible
from equipoise.report.pictures import pictures
from equipoise.report.summary import summarise

pytestmark = pytest.mark.slow

MakeRecord = Callable[..., RunRecord]
EMPTY = {"meta", "link", "br", "hr", "img", "input"}


class Outline(HTMLParser):
    """Checks that every element is closed, and keeps what matters."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
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


def test_it_has_verdict_tiles_table_pictures_samples_machine_and_figures(
    make_record: MakeRecord,
) -> None:
    page, parsed = outline(make_record())
    assert parsed.seen.count("svg") == 4
    assert parsed.seen.count("table") == 1
    assert page.count('<div class="tile">') == 8
    for words in ("outputs identical: yes", "def f():", "a processor", "stall_noise_seconds"):
        assert words in parsed.text
    assert len(page.encode()) < 2_000_000


def test_it_loads_nothing_from_anywhere(make_record: MakeRecord) -> None:
    page, parsed = outline(make_record())
    assert all(load.startswith(("data:", "#")) for load in parsed.loads)
    assert "@import" not in page
    assert all(link.startswith("#") for link in re.findall(r"url\((.*?)\)", page))
    assert not {"script", "link", "iframe"} & set(parsed.seen)


def test_prompts_and_commands_are_text_and_never_markup(make_record: MakeRecord) -> None:
    page, parsed = outline(make_record())
    assert "<script>alert(1)</script> & \ufffd\ufffd" in parsed.text
    assert "<script" not in page
    assert "--text '<b>'" in parsed.text
    assert "\x00" not in page


def test_a_file_name_cannot_break_a_picture(make_record: MakeRecord) -> None:
    hostile = ("</svg><script>$x_{$", "\x1b]0;&\ud83d")
    page, parsed = outline(make_record(phases=hostile))
    assert "<script" not in page
    assert parsed.seen.count("svg") == 4


def test_a_run_that_failed_its_oracle_is_marked_bad(make_record: MakeRecord) -> None:
    page, parsed = outline(make_record(reference_outputs="b"))
    assert 'class="verdict bad"' in page
    assert "outputs identical: no" in parsed.text


def test_a_run_without_balancing_has_a_report_too(make_record: MakeRecord) -> None:
    record = make_record(shares="none", prompts=(), continuations=())
    for name in ("static", "lagged", "exact"):
        del record.variants[name]
    _, parsed = outline(record)
    assert parsed.seen.count("svg") == 4
    assert "None" not in parsed.text


def test_report_says_that_unbalanced_was_not_served(make_record: MakeRecord) -> None:
    record = make_record()
    for name in ("unbalanced", "static", "lagged"):
        del record.variants[name]
    page, parsed = outline(record)
    assert "The traffic was not served without balancing." in parsed.text
    assert "than without balancing" not in parsed.text
    assert page.count('<div class="tile">') == 6
    assert parsed.seen.count("svg") == 4
    assert "None" not in parsed.text


def test_steps_without_tokens_do_not_break_a_picture(make_record: MakeRecord) -> None:
    record = make_record()
    for name, variant in record.variants.items():
        rows = variant.rank_rows.copy()
        rows[4] = 0
        record.variants[name] = replace(variant, rank_rows=rows)
    idle = record.expert_rows.copy()
    idle[4] = 0
    assert len(pictures(replace(record, expert_rows=idle))) == 4


def test_a_run_without_any_row_still_has_a_report(make_record: MakeRecord) -> None:
    record = make_record()
    for name, variant in record.variants.items():
        record.variants[name] = replace(variant, rank_rows=np.zeros_like(variant.rank_rows))
    _, parsed = outline(replace(record, expert_rows=np.zeros_like(record.expert_rows)))
    assert parsed.seen.count("svg") == 4


def test_pictures_are_well_formed_take_the_ink_of_the_page_and_repeat(
    make_record: MakeRecord,
) -> None:
    first, second = pictures(make_record()), pictures(make_record())
    assert first == second
    for picture in first:
        assert ElementTree.fromstring(picture.svg).tag.endswith("svg")
        assert "currentColor" in picture.svg


def test_pictures_on_one_page_share_no_identifier(make_record: MakeRecord) -> None:
    page, _ = outline(make_record())
    names = re.findall(r' id="([^"]+)"', page)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("phase", ["prose", "code"])
def test_each_phase_is_named_in_every_picture(make_record: MakeRecord, phase: str) -> None:
    for picture in pictures(make_record()):
        assert f">{phase}</text>" in picture.svg


@given(st.text())
def test_visible_text_is_escaped_and_free_of_control_characters(text: str) -> None:
    shown = visible(text)
    assert not set(shown) & set("<>\"'")
    assert all(letter.isprintable() or letter in "\n\t" for letter in shown)


def test_it_says_what_the_engine_was_told_where_there_was_one(make_record: MakeRecord) -> None:
    _, told = outline(make_record())
    assert "What the engine was told" in told.text
    assert "in_flight1.2 MiB" in told.text
    page, still = outline(make_record(engine={}))
    assert "What the engine was told" not in still.text
    assert "What the engine was told" not in page
