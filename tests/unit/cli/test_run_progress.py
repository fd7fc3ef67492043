"""Progress on a terminal and in a log."""

import io
import math

from hypothesis import given
from hypothesis import strategies as st

from equipoise.cli.progress import LINES_PER_VARIANT, Bars, Lines, progress_for
from equipoise.demo.progress import Silence


@given(steps=st.integers(1, 300))
def test_run_progress_log_is_bounded_and_ends_with_last_step(steps: int) -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    lines.variant("exact", steps)
    for done in range(1, steps + 1):
        lines.step(done, 0.5, "")
    written = stream.getvalue().splitlines()
    assert 1 <= len(written) <= LINES_PER_VARIANT
    assert written[-1] == f"exact: {steps}/{steps} steps, imbalance 0.500"


def test_run_progress_omits_unknown_imbalance() -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    lines.variant("reference", 1)
    lines.step(1, math.nan, "3 s")
    lines.step(1, math.nan, "")
    assert "nan" not in stream.getvalue()
    assert "reference: 1/1 steps, 3 s" in stream.getvalue()


def test_run_progress_bar_completes_before_next_variant() -> None:
    stream = io.StringIO()
    bars = Bars(stream)
    for name in ("unbalanced", "exact"):
        bars.variant(name, 2)
        bars.step(2, 0.1, "")
    bars.done()
    bars.done()
    assert stream.getvalue().count("2/2 steps") >= 2


def test_hidden_run_progress_is_silent() -> None:
    assert isinstance(progress_for("hidden"), Silence)
