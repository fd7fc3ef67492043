"""The report as a browser would see it."""

import re
from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers.harnesses.html_pages import Outline, assert_every_text_is_escaped
from helpers.harnesses.html_pages import outline as outline_of

from equipoise.demo.run_record import RunRecord
from equipoise.report.run.html import render_html
from equipoise.report.run.plots import phase_times, pictures
from equipoise.report.run.summary import summarise

pytestmark = pytest.mark.slow

MakeRecord = Callable[..., RunRecord]
MODULE = "equipoise.report.run.html"


def render(record: RunRecord) -> str:
    return render_html(record, summarise(record), "equipoise run --text '<b>'")


def outline(record: RunRecord) -> tuple[str, Outline]:
    page = render(record)
    return page, outline_of(page)


def test_run_page_has_every_section(
    make_record: MakeRecord,
) -> None:
    page, parsed = outline(make_record())
    assert parsed.tags.count("svg") == 4
    assert parsed.tags.count("table") == 2
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


def test_run_page_escapes_every_text(make_record: MakeRecord) -> None:
    record = with_moves(make_record())
    assert_every_text_is_escaped(MODULE, lambda: render(record))


def with_moves(record: RunRecord) -> RunRecord:
    """The first rebalance of the run's own variant with two copies, one from the host."""
    main = record.variants[record.shares]
    first, *others = main.rebalances
    moved = replace(
        first, moves=((1, 3, 0, 1), (1, 2, None, 0)), before=0.5, seconds={"staged": 2.0}
    )
    variant = replace(main, rebalances=(moved, *others))
    return replace(record, variants={**record.variants, record.shares: variant})


def test_run_page_names_expert_and_ranks_of_each_copy(make_record: MakeRecord) -> None:
    _, parsed = outline(with_moves(make_record()))
    assert "Who got copies" in parsed.text
    assert "Rebalance 0, before step 3: 2 experts" in parsed.text
    assert "3 (0\u21921), 2 (host\u21920)" in parsed.text
    assert "0.5000" in parsed.text
    assert "2.00 s" in parsed.text


def test_step_times_are_medians_and_p95_of_each_phase(make_record: MakeRecord) -> None:
    record = make_record()
    millis = np.arange(12.0)
    assert np.allclose(phase_times(record, millis), [(0, 6, 2.5, 4.75), (6, 12, 8.5, 10.75)])
    (picture,) = [one for one in pictures(record) if one.title == "Step time"]
    assert "unbalanced 1,000 ms (P95 1,000), exact 500 ms (P95 500)" in picture.caption


def test_run_page_shows_engine_settings_when_recorded(make_record: MakeRecord) -> None:
    _, on_progress = outline(make_record())
    assert "Options of the engine" in on_progress.text
    assert "staging_bytes1.2 MiB" in on_progress.text
    page, still = outline(make_record(engine_options={}))
    assert "Options of the engine" not in still.text
    assert "Options of the engine" not in page
