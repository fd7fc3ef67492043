"""Requests of every worker over time: waiting, computing a prompt, making tokens."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from equipoise.report.canvas import Picture, draw
from equipoise.report.palette import MUTED
from equipoise.report.routed.lanes import Excerpt, excerpt_of
from equipoise.report.routed.trips import COMPLETED, Routed, Trip
from equipoise.report.table import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = {
    "waits at the proxy": "#d8d3c7",
    "until the first token": "#e0a458",
    "makes tokens": "#3d6fb6",
    "whole answer, not streamed": "#7a5ba6",
}
ILL = "ended otherwise than well"
ILL_COLOUR = "#b3331d"
LEAST, MOST = 0.55, 2.2
"""Inches for a worker."""
A_LANE = 0.035
LONGEST_NAME = 18


def gantt(routed: Routed) -> Picture | None:
    """None where no worker had a request."""
    excerpt = excerpt_of(routed)
    if excerpt is None:
        return None
    heights = [min(MOST, max(LEAST, A_LANE * len(lanes))) for lanes in excerpt.lanes]

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[
            :, 0
        ]
        for axis, name, lanes in zip(axes, excerpt.workers, excerpt.lanes, strict=True):
            _worker(axis, name, lanes, excerpt.begin)
        axes[-1].set_xlabel("seconds" + ("" if excerpt.whole else ", from the first one shown"))
        _legend(figure)

    return Picture(
        "Requests, worker by worker",
        f"{_which(routed, excerpt)} Each is a line from its arrival at the proxy to its end, at "
        "the worker that had it last. Waiting is done at the proxy, where a request can still go "
        "anywhere; a red end is one that did not end well.",
        draw("requests", 1.0 + sum(heights), paint),
    )


def _which(routed: Routed, excerpt: Excerpt) -> str:
    shown = sum(len(lane) for lanes in excerpt.lanes for lane in lanes)
    if excerpt.whole:
        return f"All {shown:,} requests that a worker had."
    of = f"of the {len(routed.bound):,} that a worker had"
    workers = f", on {len(excerpt.workers)} of {len(routed.workers)} workers"
    fewer = workers if len(excerpt.workers) < len(routed.workers) else ""
    return f"{shown:,} requests from the middle {of}{fewer}."


def _worker(axis: "Axes", name: str, lanes: Sequence[Sequence[Trip]], begin: float) -> None:
    bars = [
        (number, part, start - begin, end - start)
        for number, lane in enumerate(lanes)
        for trip in lane
        for part, start, end in parts(trip)
    ]
    for part, colour in PARTS.items():
        own = [bar for bar in bars if bar[1] == part]
        axis.barh(
            [bar[0] for bar in own], [bar[3] for bar in own], left=[bar[2] for bar in own],
            height=0.82, color=colour, linewidth=0,
        )  # fmt: skip
    ends = [
        (trip.end - begin, number)
        for number, lane in enumerate(lanes)
        for trip in lane
        if trip.outcome != COMPLETED
    ]
    axis.plot([end[0] for end in ends], [end[1] for end in ends], marker="|", markersize=5,
              linestyle="none", color=ILL_COLOUR, markeredgewidth=1.6)  # fmt: skip
    _tidy(axis, name, len(lanes))


def _tidy(axis: "Axes", name: str, lanes: int) -> None:
    text = printable(name)
    short = text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 1] + "\u2026"
    axis.set_ylim(max(lanes, 1) - 0.4, -0.6)
    axis.set_yticks([])
    axis.set_ylabel(short, rotation=0, ha="right", va="center")
    axis.spines["left"].set_visible(False)
    axis.margins(x=0.01)
    axis.grid(axis="x", color=MUTED, alpha=0.2, linewidth=0.6)
    axis.set_axisbelow(True)


def parts(trip: Trip) -> Iterator[tuple[str, float, float]]:
    """(what it was doing, from, to), in the order of `PARTS`; none is shorter than nothing."""
    waits, prompts, makes, whole = PARTS
    bound = trip.end if trip.bound is None else max(trip.bound, trip.arrival)
    yield waits, trip.arrival, bound
    if trip.bound is None:
        return
    if not trip.streamed:
        yield whole, bound, max(trip.end, bound)
        return
    first = max(trip.end if trip.first is None else trip.first, bound)
    yield prompts, bound, first
    yield makes, first, max(trip.end, first)


def _legend(figure: "Figure") -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [Patch(color=c, label=name) for name, c in PARTS.items()]
    handles.append(Line2D([], [], marker="|", linestyle="none", color=ILL_COLOUR,
                          markeredgewidth=1.6, label=ILL))  # fmt: skip
    figure.legend(handles=handles, loc="outside upper right", ncols=5, frameon=False, fontsize=8.5,
                  handlelength=1.0, columnspacing=1.4)  # fmt: skip
