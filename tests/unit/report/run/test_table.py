"""The table at the end of a run."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from equipoise.demo.engine_options import engine_options
from equipoise.demo.run_record import RunRecord
from equipoise.demo.settings import CommitMode, RoutingRule, RunSettings, Shares
from equipoise.report.run.summary import summarise
from equipoise.report.run.table import render
from equipoise.report.terminal import ColourMode
from equipoise.report.text import human_bytes

MakeRecord = Callable[..., RunRecord]


def test_run_table_ends_with_verdict(make_record: MakeRecord) -> None:
    assert (
        render(summarise(make_record()), ColourMode.PLAIN).splitlines()[-1]
        == "outputs identical: yes"
    )
    other = summarise(make_record(reference_outputs="b"))
    assert render(other, ColourMode.PLAIN).splitlines()[-1] == "outputs identical: no"


def test_run_table_verdict_says_not_exercised(make_record: MakeRecord) -> None:
    record = make_record()
    record.variants["exact"] = replace(record.variants["exact"], rebalances=())
    last = render(summarise(record), ColourMode.PLAIN).splitlines()[-1]
    assert last == "outputs identical: yes; not exercised: no slot moved; try more --steps"


def test_run_table_fits_80_columns(make_record: MakeRecord) -> None:
    summary = summarise(make_record(step_tokens=make_record().step_tokens * 10**6))
    assert max(map(len, render(summary, ColourMode.PLAIN).splitlines())) <= 80


def test_run_table_orders_variants_by_balance(make_record: MakeRecord) -> None:
    lines = render(summarise(make_record()), ColourMode.PLAIN).splitlines()
    rows = [line for line in lines if line.endswith("identical") and line[:2] in ("  ", "* ")]
    assert [row[2:].split()[0] for row in rows] == ["unbalanced", "static", "lagged", "exact"]
    assert rows[0].split()[1] == "0.7500"
    assert rows[1].split()[3] == "6.00"
    assert rows[3].startswith("* exact")


def test_run_table_strips_escape_codes_of_file_names(make_record: MakeRecord) -> None:
    hostile = make_record(phases=("\x1b[2J", "code"))
    assert "\x1b" not in render(summarise(hostile), ColourMode.PLAIN)
    assert "\x1b[2J" not in render(summarise(hostile), ColourMode.COLOUR)
    assert "\x1b[1;32m" in render(summarise(make_record()), ColourMode.COLOUR)


def test_run_table_without_balancing_shows_no_nan_or_none(make_record: MakeRecord) -> None:
    record = make_record(shares="none")
    del record.variants["static"], record.variants["lagged"], record.variants["exact"]
    text = render(summarise(record), ColourMode.PLAIN)
    assert "balancing was off: nothing moved" in text
    assert "nan" not in text
    assert "None" not in text


def test_run_table_counts_aborts_by_reason(make_record: MakeRecord) -> None:
    assert "aborted    digest 1" in render(summarise(make_record()), ColourMode.PLAIN)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**50, "1024.0 TiB")]
)
def test_human_bytes_uses_binary_units(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (RunSettings(), "path       staged: 1.2 MiB of staging per rank, messages of 16 slots"),
        (
            RunSettings(commit=CommitMode.IN_PLACE, layer_updates_per_iter=3),
            "path       in place: 3 layer(s) per step",
        ),
        (
            RunSettings(routing_rule=RoutingRule.VLLM_ROW_HASH, shares=Shares.STATIC),
            "rule       vllm: even parts, no shares",
        ),
    ],
)
def test_run_table_describes_migration_path_and_rule(
    make_record: MakeRecord, settings: RunSettings, line: str
) -> None:
    assert (
        line
        in render(
            summarise(make_record(engine_options=engine_options(settings))), ColourMode.PLAIN
        ).splitlines()
    )


def test_run_table_with_largest_settings_fits_80_columns(make_record: MakeRecord) -> None:
    widest = engine_options(RunSettings(slots=4096, staging_bytes=1 << 60, slots_per_message=4096))
    text = render(summarise(make_record(engine_options=widest)), ColourMode.PLAIN)
    assert "messages of 4096 slots" in text
    assert max(map(len, text.splitlines())) <= 80


def test_run_table_of_old_record_omits_engine_settings(make_record: MakeRecord) -> None:
    text = render(summarise(make_record(engine_options={})), ColourMode.PLAIN)
    assert "path " not in text
    assert "rule " not in text


def test_table_says_that_unbalanced_was_not_served(make_record: MakeRecord) -> None:
    record = make_record()
    with_it = render(summarise(record), ColourMode.PLAIN)
    del record.variants["unbalanced"]
    without = render(summarise(record), ColourMode.PLAIN)
    assert "unbalanced was not served" not in with_it
    assert "above the variant's own median step: unbalanced was not served" in without
    assert "unbalanced median" not in without
    assert max(map(len, without.splitlines())) <= 80


@pytest.mark.parametrize(
    ("cores", "backend", "shown"), [("1", "cpu", True), ("64", "cpu", False), ("1", "cuda", False)]
)
def test_table_says_where_ranks_share_cores(
    make_record: MakeRecord, cores: str, backend: str, shown: bool
) -> None:
    record = make_record(machine={"cores": cores}, backend=backend)
    text = render(summarise(record), ColourMode.PLAIN)
    words = (
        "take turns on 1 core(s): tokens/s cannot show what balance gains, nor stalls what it costs"
    )
    assert (words in " ".join(text.split())) == shown
    assert max(map(len, text.splitlines())) <= 80
