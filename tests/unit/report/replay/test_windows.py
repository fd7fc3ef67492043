"""Windows of load from traces."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.formats.routing_trace import CountsTrace
from equipoise.report.replay.steps import CountedSteps
from equipoise.report.replay.windows import MAX_WINDOWS, windows_of


def steps_of(counts: np.ndarray, blocks: int) -> CountedSteps:
    layers = tuple(range(3, 3 + counts.shape[1]))
    pieces = np.array_split(counts, blocks)
    trace = CountsTrace(layers, counts.shape[2], 8, len(counts), "here", lambda size: iter(pieces))
    return CountedSteps(trace)


@given(st.integers(1, 5 * MAX_WINDOWS), st.integers(1, 9))
def test_windows_are_sums_of_equally_many_steps(steps: int, blocks: int) -> None:
    counts = np.arange(steps * 2, dtype=np.int32).reshape(steps, 1, 2)
    windows = windows_of(steps_of(counts, blocks))
    found = windows.statistics.counts
    assert len(found) <= 2 * MAX_WINDOWS
    for number, window in enumerate(found):
        part = counts[number * windows.steps : (number + 1) * windows.steps]
        assert (window == part.sum(axis=0)).all()
    assert windows.step_rows == max(int(counts.sum()) // steps, 1)


def test_windows_leave_out_layers_without_rows() -> None:
    counts = np.zeros((4, 3, 2), np.int32)
    counts[:, 1] = 5
    windows = windows_of(steps_of(counts, 1))
    assert windows.statistics.layers == (4,)
    assert windows.step_rows == 10


@pytest.mark.parametrize("steps", [2 * MAX_WINDOWS - 1, 2 * MAX_WINDOWS])
def test_windows_are_halved_when_they_are_too_many(steps: int) -> None:
    windows = windows_of(steps_of(np.ones((steps, 1, 2), np.int32), 3))
    halved = steps == 2 * MAX_WINDOWS
    assert windows.steps == 1 + halved
    assert windows.statistics.windows == steps // windows.steps
