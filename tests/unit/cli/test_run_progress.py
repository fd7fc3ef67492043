"""Progress on a terminal and in a log."""

import io
import math

from hypothesis import given
from hypothesis import strategies as st

from equipoise.cli.progress import (
    LINES_PER_VARIANT,
    SILENT,
    NoPartProgress,
    PartProgressBar,
    PartProgressLog,
    RunProgressBars,
    RunProgressLines,
    part_progress_for,
    run_progress_for,
)
from equipoise.demo.progress import NoProgress


@given(steps=st.integers(1, 300))
def test_run_progress_log_is_bounded_and_ends_with_last_step(steps: int) -> None:
    stream = io.StringIO()
    lines = RunProgressLines(stream)
    lines.variant("exact", steps)
    for step in range(1, steps + 1):
        lines.step(step, 0.5, "")
    log_lines = stream.getvalue().splitlines()
    assert 1 <= len(log_lines) <= LINES_PER_VARIANT
    assert log_lines[-1] == f"exact: {steps}/{steps} steps, summed imbalance 0.500"


def test_run_progress_numbers_passes() -> None:
    stream = io.StringIO()
    lines = RunProgressLines(stream, passes=2)
    for name in ("local", "reference"):
        lines.variant(name, 1)
        lines.step(1, 0.5, "")
    assert stream.getvalue().splitlines() == [
        "local (1 of 2): 1/1 steps, summed imbalance 0.500",
        "reference (2 of 2): 1/1 steps, summed imbalance 0.500",
    ]


def test_run_progress_omits_unknown_imbalance() -> None:
    stream = io.StringIO()
    lines = RunProgressLines(stream)
    lines.variant("reference", 1)
    lines.step(1, math.nan, "3 s")
    lines.step(1, math.nan, "")
    assert "nan" not in stream.getvalue()
    assert "reference: 1/1 steps, 3 s" in stream.getvalue()


def test_run_progress_bar_completes_before_next_variant() -> None:
    stream = io.StringIO()
    bars = RunProgressBars(stream)
    for name in ("unbalanced", "exact"):
        bars.variant(name, 2)
        bars.step(2, 0.1, "")
    bars.done()
    bars.done()
    assert stream.getvalue().count("2/2 steps") >= 2


def test_hidden_run_progress_is_silent() -> None:
    assert isinstance(run_progress_for("hidden"), NoProgress)


def test_parts_log_tells_only_of_long_work() -> None:
    stream, times = io.StringIO(), iter([0.0, 1.0, SILENT, SILENT + 1, 2.5 * SILENT])
    log = PartProgressLog("planning", stream, lambda: next(times))
    for ranks in (4, 8, 16, 32):
        log.start_part(f"{ranks} ranks")
    log.close()
    assert stream.getvalue().splitlines() == [
        "planning: 8 ranks, after 10 s", "planning: 32 ranks, after 25 s",
    ]  # fmt: skip


def test_parts_bar_shows_part_and_leaves_nothing() -> None:
    stream = io.StringIO()
    bar = PartProgressBar("planning", stream)
    bar.start_part("4,096 ranks")
    bar.close()
    assert "planning: 4,096 ranks  00:00" in stream.getvalue()
    assert stream.getvalue().split("\r")[-1].strip() == ""


def test_hidden_parts_are_silent() -> None:
    assert isinstance(part_progress_for("hidden", "planning"), NoPartProgress)
