"""The dead zone of imbalance: up to it a step takes equally long, so balancing gains nothing.

Step time against max/mean of the ranks is a hinge: flat up to a knee, then a line. The authors of
OEPLB measured it so, with placements of chosen imbalance (github.com/sjqsjq/EPLB, September 2026:
OEPLB/theory_a100/THEORY_VALIDATION_A100.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from equipoise.hal.errors import FormatError
from equipoise.report.placement.spread import Reals

Points = Sequence[tuple[float, float]]
"""Measured: max/mean of the ranks, and step time in any unit."""

KNEE_SCALE, KNEE_POWER = 0.004, 1.5
MEASURED_RANKS = 8
DEFAULT_SLOPE = 0.34
MIN_POINTS = 3
FLAT = 1e-9
"""A slope that is rounding alone."""


@dataclass(frozen=True)
class DeadZone:
    """Step time by imbalance.

    Attributes:
        knee: max/mean of the ranks up to which a step takes equally long; at least 1.
        slope: part of that time which each unit of max/mean above the knee adds.
        source: where the figures come from, for people.
    """

    knee: float
    slope: float
    source: str

    @overload
    def factor(self, ratio: float) -> float: ...
    @overload
    def factor(self, ratio: Reals) -> Reals: ...
    def factor(self, ratio: float | Reals) -> float | Reals:
        """Step time over that of balanced ranks, by max/mean of the ranks; NaN stays NaN."""
        return 1.0 + self.slope * np.maximum(0.0, ratio - self.knee)

    @classmethod
    def default(cls, ranks: int) -> "DeadZone":
        """What OEPLB's authors measured, for those who have not measured their own.

        Their fit of the knee is 1 + 0.004 * ranks^1.5, from 2, 4 and 8 ranks. Above 8 nothing was
        measured, and the fit would forbid balancing altogether (1.72 on 32 ranks), so there the
        knee of 8 ranks is taken: a knee too low costs some moves in vain, one too high the whole
        gain. The slope is the middle of 0.285 to 0.363 at 8 ranks and 0.342 at 4.
        """
        knee = 1.0 + KNEE_SCALE * min(ranks, MEASURED_RANKS) ** KNEE_POWER
        source = "OEPLB's measurements on H20 and A100, 2 to 8 ranks"
        if ranks > MEASURED_RANKS:
            source += "; more ranks were not measured"
        return cls(knee, DEFAULT_SLOPE, source)

    @classmethod
    def fit(cls, points: Points, option: str = "dead zone") -> "DeadZone":
        """The hinge of least squares through (max/mean, step time) points.

        The best knee is either a point's ratio, or where the mean of the points before it meets
        the line through those behind it (Hudson, 1966): all are tried. The lowest knee wins a tie.
        Raises `FormatError` that names `option`: fewer than 3 ratios, a value that cannot be, or
        step times that do not rise.
        """
        ratios, times = _checked(points, option)
        best, least = None, np.inf
        for knee in sorted({1.0, *ratios.tolist(), *_meeting_points(ratios, times)}):
            height, rise, error = _hinge(ratios, times, knee)
            # Sums of squares that differ by rounding alone are a tie: a residual carries about
            # 1e-15 of its time, so a square less than 1e-24 is rounding and nothing else.
            if error < least - 1e-24 * float(times @ times):
                best, least = (knee, height, rise), error
        assert best is not None
        knee, height, rise = best
        if rise <= FLAT * height:
            raise FormatError(option, "step time does not rise with max/mean in these points")
        return cls(knee, rise / height, f"{len(ratios)} measured points")


def _checked(points: Points, option: str) -> tuple[Reals, Reals]:
    ratios, times = np.array(points, dtype=np.float64).reshape(-1, 2).T
    for ratio, time in zip(ratios.tolist(), times.tolist(), strict=True):
        if not (1 <= ratio < np.inf and 0 < time < np.inf):
            raise FormatError(
                option, f"{ratio:g}:{time:g} is not max/mean, at least 1, and a step time above 0"
            )
    if len(set(ratios.tolist())) < MIN_POINTS:
        raise FormatError(option, f"needs points of at least {MIN_POINTS} different max/mean")
    order = np.argsort(ratios, kind="stable")
    return ratios[order], times[order]


def _meeting_points(ratios: Reals, times: Reals) -> Iterator[float]:
    """Where a flat piece meets a line, between the last point of the one and the first of other."""
    for split in range(1, len(ratios) - 1):
        low, high = ratios[split - 1], ratios[split]
        if low == high or ratios[split] == ratios[-1]:
            continue
        rise, start = np.polyfit(ratios[split:], times[split:], 1)
        if rise and low < (meeting := (times[:split].mean() - start) / rise) < high:
            yield float(meeting)


def _hinge(ratios: Reals, times: Reals, knee: float) -> tuple[float, float, float]:
    """Flat time, seconds for a unit of ratio above the knee, and sum of squared errors."""
    above = np.maximum(0.0, ratios - knee)
    terms = np.stack([np.ones_like(above), above], axis=1)
    (height, rise), *_ = np.linalg.lstsq(terms, times, rcond=None)
    error = times - terms @ np.array([height, rise])
    return float(height), float(rise), float(error @ error)
