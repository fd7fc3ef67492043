"""Windows of load from a trace, for advice."""

from dataclasses import dataclass

import numpy as np

from equipoise.balancer.experts.placement import Load
from equipoise.balancer.formats.statistics import ExpertStatistics
from equipoise.report.replay.steps import StepSource

MAX_WINDOWS = 256
"""Enough to plan on one half and measure on the other."""


@dataclass(frozen=True)
class TraceWindows:
    """A trace as statistics.

    Attributes:
        statistics: up to 2 * `MAX_WINDOWS` windows of equally many steps; the last may have fewer.
        steps: of a window.
        step_rows: of a layer in a step, mean; at least 1.
    """

    statistics: ExpertStatistics
    steps: int
    step_rows: int


def windows_of(source: StepSource) -> TraceWindows:
    """Sums consecutive steps, so many that no more windows are left; the trace is streamed.

    Layers without a row are left out. Raises `FormatError` for what is wrong with the trace.
    """
    sums: list[Load] = []
    length, rest, steps = 1, 0, 0
    for block in source.blocks():
        for counts in block.counts:
            if rest:
                sums[-1] = sums[-1] + counts
            else:
                sums.append(counts.astype(np.int64))
            rest = (rest + 1) % length
            steps += 1
            if not rest and len(sums) == 2 * MAX_WINDOWS:
                sums = [first + second for first, second in zip(sums[::2], sums[1::2], strict=True)]
                length *= 2
    shape = len(sums), len(source.layers), source.experts
    statistics = ExpertStatistics(np.array(sums, np.int64).reshape(shape), source.layers)
    kept = statistics.without_empty_layers()
    rows = int(kept.counts.sum()) // max(steps * len(kept.layers), 1)
    return TraceWindows(kept, length, max(rows, 1))
