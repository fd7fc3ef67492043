"""Progress on a terminal and in a log."""

import io
import math

from hypothesis import given
from hypothesis import strategies as st

from equipoise.cli.progress import LINES_PER_VARIANT, Bars, Lines, progress_for
from equipoise.demo.progress import Silence


@given(steps=st.integers(1, 300))
def test_a_log_gets_few_lines_and_always_the_last(steps: int) -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    lines.variant("exact", steps)
    for done in range(1, steps + 1):
        lines.step(done, 0.5, "")
    written = stream.getvalue().splitlines()
    assert 1 <= len(written) <= LINES_PER_VARIANT
    assert written[-1] == f"exact: {steps}/{steps} steps, imbalance 0.500"


def test_an_unknown_imbalance_is_not_shown() -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    lines.variant("reference", 1)
    lines.step(1, math.nan, "3 s")
    lines.step(1, math.nan, "")
    assert "nan" not in stream.getvalue()
    assert "reference: 1/1 steps, 3 s" in stream.getvalue()


def test_a_bar_is_closed_when_the_next_begins() -> None:
    stream = io.StringIO()
    bars = Bars(stream)
    for name in ("unbalanced", "exact"):
        bars.variant(name, 2)
        bars.step(2, 0.1, "")
    bars.done()
    bars.done()
    assert stream.getvalue().count("2/2 steps") >= 2


def test_nobody_hears_a_hidden_run() -> None:
    assert isinstance(progress_for("hidden"), Silence)
