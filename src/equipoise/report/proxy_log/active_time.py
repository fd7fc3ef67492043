"""The time in which a proxy had requests: a log's long pauses would squeeze everything else."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from equipoise.report.proxy_log.requests import LoggedRequest
from equipoise.report.svg import MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Reals: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

PAUSE = 0.05
"""Of the time with requests: a longer time without any is a pause."""
GAP = 0.03
"""Of the time with requests: the width of a pause in a picture."""
MAX_GAPS = 0.3
"""Of the time with requests: the width of all pauses of a picture together."""
MAX_NAMED = 10
"""Pauses whose length is written into a picture."""


@dataclass(frozen=True)
class ActiveTime:
    """Stretches of time with requests, and the pauses between them, each `gap` seconds long.

    Attributes:
        stretches: (begin, end) of each, seconds since 1970, ascending.
        gap: seconds that a pause takes on the axis.
    """

    stretches: tuple[tuple[float, float], ...]
    gap: float = 0.0

    @classmethod
    def of(cls, requests: Iterable[LoggedRequest], gap: float = 0.0) -> "ActiveTime":
        """Of at least one request; `gap` is a part of the time with requests."""
        spans: list[tuple[float, float]] = []
        for begin, end in sorted((one.arrived_at, one.ended_at) for one in requests):
            if spans and begin <= spans[-1][1]:
                spans[-1] = spans[-1][0], max(spans[-1][1], end)
            else:
                spans.append((begin, max(begin, end)))
        active = sum(end - begin for begin, end in spans)
        merged = spans[:1]
        for begin, end in spans[1:]:
            if begin - merged[-1][1] > PAUSE * active:
                merged.append((begin, end))
            else:
                merged[-1] = merged[-1][0], end
        return cls(tuple(merged), active * min(gap, MAX_GAPS / max(len(merged) - 1, 1)))

    @property
    def seconds(self) -> float:
        """Of all stretches."""
        return sum(end - begin for begin, end in self.stretches)

    @property
    def pauses(self) -> tuple[tuple[float, float], ...]:
        """(begin, end) of each, seconds since 1970."""
        return tuple((a[1], b[0]) for a, b in pairwise(self.stretches))

    @property
    def length(self) -> float:
        """Seconds of the axis: all stretches, and a gap for each pause."""
        return self.seconds + self.gap * len(self.pauses)

    def place(self, time: float) -> float:
        """Where a time is on the axis; one within a pause at a part of the gap."""
        begins, offsets = self._edges
        number = max(bisect_right(begins, time) - 1, 0)
        begin, end = self.stretches[number]
        before = offsets[number] + self.gap * number
        if time <= end or number + 1 == len(self.stretches):
            return before + time - begin
        part = (time - end) / (begins[number + 1] - end)
        return before + end - begin + part * self.gap

    def times(self, places: Reals) -> Reals:
        """Times at places on an axis without gaps."""
        begins, offsets = map(np.array, self._edges)
        number = np.clip(np.searchsorted(offsets, places, side="right") - 1, 0, None)
        return np.asarray(begins[number] + places - offsets[number], dtype=np.float64)

    @cached_property
    def _edges(self) -> tuple[list[float], list[float]]:
        """Of each stretch, when it begins and how much time with requests is before it."""
        lengths = (end - begin for begin, end in self.stretches)
        return [begin for begin, _ in self.stretches], [0.0, *accumulate(lengths)][:-1]


def clock_text(time: float, step: float = 1.0) -> str:
    """Hours, minutes and seconds of a time, UTC; with decimals for steps below a second."""
    decimals = 0 if step >= 1 else (1 if step >= 0.1 else 3)
    moment = _moment(round(time, decimals))
    if moment is None:
        return f"{time:,.{decimals}f} s"
    whole = moment.strftime("%H:%M:%S")
    return whole + (f".{moment.microsecond / 1e6:.{decimals}f}"[2:] if decimals else "")


def date_time_text(time: float) -> str:
    """Date and time to a second, UTC."""
    moment = _moment(time)
    return f"{time:,.0f} s" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S")


def duration_text(seconds: float) -> str:
    """A length of time in its two largest units."""
    for size, unit, smaller, part in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if seconds >= size:
            whole, rest = divmod(round(seconds / smaller), size // smaller)
            return f"{whole} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


STEPS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400),
)
"""Seconds between ticks."""
TICKS = 8
NARROW = 0.07
"""Of the axis: ticks nearer to each other would write over each other."""


def ticks(active: ActiveTime) -> list[tuple[float, str]]:
    """(place, text) of ticks: round times within stretches, and where each stretch begins."""
    fitting = (step for step in STEPS if active.seconds / step <= TICKS)
    step = next(fitting, active.seconds / TICKS)
    marks: list[tuple[float, str]] = []
    for number, (begin, end) in enumerate(active.stretches):
        rounds = np.arange(np.ceil(begin / step), np.floor(end / step) + 1) * step
        times = [*([begin] if number or not len(rounds) else []), *rounds.tolist()]
        for time in times:
            place = active.place(time)
            if not marks or place - marks[-1][0] >= NARROW * active.length:
                marks.append((place, clock_text(time, step)))
    return marks


def show_clock(axis: "Axes", active: ActiveTime) -> None:
    """Ticks with times of day; a bright band for each pause, with its length where few are."""
    marks = ticks(active)
    axis.set_xlim(-0.01 * active.length, 1.01 * max(active.length, 1e-9))
    axis.set_xticks([place for place, _ in marks], [text for _, text in marks])
    axis.set_xlabel("time of day, UTC")
    for begin, _ in active.pauses:
        first = active.place(begin)
        axis.axvspan(first, first + active.gap, color=MUTED, alpha=0.18, linewidth=0)


def name_pauses(axis: "Axes", active: ActiveTime) -> None:
    """The length of each pause above the axis."""
    if len(active.pauses) > MAX_NAMED:
        return
    for begin, end in active.pauses:
        axis.annotate(
            duration_text(end - begin), (active.place(begin) + active.gap / 2, 1.0),
            xycoords=axis.get_xaxis_transform(), xytext=(0, 3), textcoords="offset points",
            ha="center", color=MUTED, fontsize=8,
        )  # fmt: skip


def _moment(time: float) -> datetime | None:
    """None for a time that is beyond what dates can say."""
    try:
        return datetime.fromtimestamp(time, UTC)
    except (OverflowError, ValueError, OSError):
        return None
