"""Plots of a request log: requests and load of every worker over time, waits by prompt length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from equipoise.report import plot_helpers
from equipoise.report.proxy_log.active_time import (
    GAP,
    ActiveTime,
    Reals,
    name_pauses,
    show_clock,
)
from equipoise.report.proxy_log.figures import WorkerLoads, worker_loads
from equipoise.report.proxy_log.requests import COMPLETED, LoggedRequest, ProxyLog
from equipoise.report.simulation.plot_style import add_grid
from equipoise.report.svg import MUTED, SEQUENTIAL, TEXT_COLOUR, Picture, draw
from equipoise.report.text import printable

PAUSE_WORDS = " Grey bands are pauses without requests, which are cut short."
MAX_WORKERS = 8
"""That are drawn: more would be a carpet."""
MAX_REQUESTS = 480


@dataclass(frozen=True)
class LogExcerpt:
    """Requests that arrived one after the other, and the workers that had them.

    Attributes:
        workers: names.
        lanes: of each worker, lanes of requests that do not overlap.
        whole: whether these are all requests that any worker had.
    """

    workers: tuple[str, ...]
    lanes: tuple[tuple[tuple[LoggedRequest, ...], ...], ...]
    whole: bool


def log_excerpt(log: ProxyLog) -> LogExcerpt | None:
    """Those in the middle, where there are more than can be drawn; None where there are none."""
    workers = log.workers[:MAX_WORKERS]
    worker_names = set(workers)
    requests = sorted(
        (request for request in log.bound_requests if request.worker in worker_names),
        key=lambda request: request.arrived_at,
    )
    if not requests:
        return None
    skipped = max(0, len(requests) - MAX_REQUESTS) // 2
    middle = requests[skipped : skipped + MAX_REQUESTS]
    lanes = tuple(pack_lanes([t for t in middle if t.worker == worker]) for worker in workers)
    return LogExcerpt(workers, lanes, len(middle) == len(log.bound_requests))


def pack_lanes(requests: Sequence[LoggedRequest]) -> tuple[tuple[LoggedRequest, ...], ...]:
    """In as few lanes as can be: each request takes the lane that is free first."""
    lanes: list[list[LoggedRequest]] = []
    free: list[tuple[float, int]] = []
    for request in sorted(requests, key=lambda one: one.arrived_at):
        if free and free[0][0] <= request.arrived_at:
            lane = heappop(free)[1]
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(request)
        heappush(free, (request.ended_at, lane))
    return tuple(map(tuple, lanes))


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PART_COLOURS = {
    "waits at the proxy": "#b9b2a3",
    "sent to a worker that lost it": "#b5658f",
    "until the first token": "#e0a458",
    "makes tokens": "#3d6fb6",
    "whole answer, not streamed": "#7a5ba6",
}
FAILED_LABEL = "ended otherwise than well"
FAILED_COLOUR = "#b3331d"
LEAST, MOST = 0.55, 2.2
"""Inches for a worker."""
LANE_HEIGHT = 0.035
MAX_NAME = 18


def request_gantt(log: ProxyLog) -> Picture | None:
    """None where no worker had a request."""
    excerpt = log_excerpt(log)
    if excerpt is None:
        return None
    shown = [one for lanes in excerpt.lanes for lane in lanes for one in lane]
    active = ActiveTime.of(shown, GAP)
    heights = [min(MOST, max(LEAST, LANE_HEIGHT * len(lanes))) for lanes in excerpt.lanes]

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[
            :, 0
        ]
        for axis, name, lanes in zip(axes, excerpt.workers, excerpt.lanes, strict=True):
            _worker(axis, name, lanes, active)
            show_clock(axis, active)
            axis.label_outer()
        name_pauses(axes[0], active)
        _legend(figure)

    return Picture(
        "Requests, worker by worker",
        f"{_which(log, excerpt)} Each is a line from its arrival at the proxy to its end, at "
        "the worker that had it last. Waiting is done at the proxy, where a request can still go "
        "anywhere; before a retry another worker had it, which the log does not name. A red end is "
        f"one that did not end well.{PAUSE_WORDS if active.pauses else ''}",
        draw("requests", 1.0 + sum(heights), paint),
    )


def _which(log: ProxyLog, excerpt: LogExcerpt) -> str:
    count = sum(len(lane) for lanes in excerpt.lanes for lane in lanes)
    if excerpt.whole:
        return f"All {count:,} requests that a worker had."
    of = f"of the {len(log.bound_requests):,} that a worker had"
    workers = f", on {len(excerpt.workers)} of {len(log.workers)} workers"
    fewer = workers if len(excerpt.workers) < len(log.workers) else ""
    return f"{count:,} requests from the middle {of}{fewer}."


def _worker(
    axis: "Axes", name: str, lanes: Sequence[Sequence[LoggedRequest]], active: ActiveTime
) -> None:
    bars = [
        (number, part, active.place(start), active.place(end) - active.place(start))
        for number, lane in enumerate(lanes)
        for request in lane
        for part, start, end in request_parts(request)
    ]
    for part, colour in PART_COLOURS.items():
        own = [bar for bar in bars if bar[1] == part]
        axis.barh(
            [bar[0] for bar in own], [bar[3] for bar in own], left=[bar[2] for bar in own],
            height=0.82, color=colour, linewidth=0,
        )  # fmt: skip
    ends = [
        (active.place(request.ended_at), number)
        for number, lane in enumerate(lanes)
        for request in lane
        if request.outcome != COMPLETED
    ]
    axis.plot([end[0] for end in ends], [end[1] for end in ends], marker="|", markersize=5,
              linestyle="none", color=FAILED_COLOUR, markeredgewidth=1.6)  # fmt: skip
    _tidy(axis, name, len(lanes))


def _tidy(axis: "Axes", name: str, lanes: int) -> None:
    text = printable(name)
    short = text if len(text) <= MAX_NAME else text[: MAX_NAME - 1] + "\u2026"
    axis.set_ylim(max(lanes, 1) - 0.4, -0.6)
    axis.set_yticks([])
    axis.set_ylabel(short, rotation=0, ha="right", va="center")
    axis.spines["left"].set_visible(False)
    axis.margins(x=0.01)
    axis.grid(axis="x", color=MUTED, alpha=0.2, linewidth=0.6)
    axis.set_axisbelow(True)


def request_parts(request: LoggedRequest) -> Iterator[tuple[str, float, float]]:
    """(what it was doing, from, to), in the order of `PARTS`; none is shorter than nothing."""
    waits, lost, prompts, makes, whole = PART_COLOURS
    start = (
        request.ended_at if request.bound_at is None else max(request.bound_at, request.arrived_at)
    )
    yield waits if request.attempts <= 1 else lost, request.arrived_at, start
    if request.bound_at is None:
        return
    if not request.streamed:
        yield whole, start, max(request.ended_at, start)
        return
    first = max(
        request.ended_at if request.first_answer_at is None else request.first_answer_at, start
    )
    yield prompts, start, first
    yield makes, first, max(request.ended_at, first)


def _legend(figure: "Figure") -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [Patch(color=c, label=name) for name, c in PART_COLOURS.items()]
    handles.append(Line2D([], [], marker="|", linestyle="none", color=FAILED_COLOUR,
                          markeredgewidth=1.6, label=FAILED_LABEL))  # fmt: skip
    figure.legend(handles=handles, loc="outside upper right", ncols=6, frameon=False, fontsize=8,
                  handlelength=1.0, columnspacing=1.4)  # fmt: skip


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN_MOMENTS = 800
"""Moments of a line."""
RASTER_FROM = 16
"""Lines as such up to so many; more are an image, which does not grow with their number."""
CLASSES = 10
MIN_REQUESTS = 20
"""Requests, which suffice for classes."""
BLUE, RED = "#3d6fb6", "#b3331d"


def worker_load_plot(log: ProxyLog) -> Picture | None:
    """None where no worker had a request."""
    loads, active = worker_loads(log, DRAWN_MOMENTS), ActiveTime.of(log.requests, GAP)
    if loads is None:
        return None
    places = np.array([active.place(time) for time in loads.times + log.begin])

    def paint(figure: "Figure") -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.1))
        _loads(above, loads, places)
        _idle(below, loads, places)
        for axis in (above, below):
            show_clock(axis, active)
            axis.label_outer()
        name_pauses(above, active)
        figure.legend(handles=_keys(), loc="outside upper right", ncols=2, frameon=False,
                      fontsize=9)  # fmt: skip

    return Picture(
        "Load of every worker",
        "KV tokens of the requests that a worker has, prompts and tokens made, reconstructed from "
        "the log: tokens at equal distances from the first to the last, prompts as long as "
        "workers said in the end, those of an answer that is not streamed when it ends, which is "
        "when a policy learns of them. A retried request counts where it was last. Below: what "
        "workers are short of the fullest one, which is what they idle if a step waits for all "
        "of them. A worker that never had a request is not in the log, and not counted."
        f"{PAUSE_WORDS if active.pauses else ''}",
        draw("loads", 4.6, paint),
    )


def _loads(axis: "Axes", loads: WorkerLoads, places: Reals) -> None:
    tones = plot_helpers.colour_map(SEQUENTIAL)(np.linspace(0.3, 0.75, loads.tokens.shape[1]))
    raster = loads.tokens.shape[1] > RASTER_FROM
    for worker, tone in enumerate(tones):
        axis.plot(places, loads.tokens[:, worker] / 1e3, color=tone, linewidth=0.9, alpha=0.85,
                  rasterized=raster)  # fmt: skip
    axis.plot(places, loads.tokens.max(axis=1) / 1e3, color=TEXT_COLOUR, linewidth=1.0)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("KV tokens, thousands")
    add_grid(axis)


def _idle(axis: "Axes", loads: WorkerLoads, places: Reals) -> None:
    envelope = loads.envelope
    gap = envelope - loads.tokens.sum(axis=1)
    share = np.divide(gap, envelope, out=np.zeros_like(gap), where=envelope > 0)
    axis.fill_between(places, share * 100, color=MUTED, alpha=0.55, linewidth=0, step="mid")
    axis.set_ylim(0, 100)
    axis.set_ylabel("idle, %")
    add_grid(axis)


def _keys() -> list[object]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=TEXT_COLOUR, linewidth=1.4, label="the fullest worker"),
        Line2D(
            [],
            [],
            color=plot_helpers.colour_map(SEQUENTIAL)(0.5),
            linewidth=1.4,
            label="each worker",
        ),
    ]


def prompt_classes(log: ProxyLog) -> list[Reals]:
    """(prompt, wait) of requests in classes by prompt; those that are alike are in one class."""
    points = [
        (request.prompt, request.wait) for request in log.bound_requests if request.wait is not None
    ]
    if len(points) < MIN_REQUESTS:
        return []
    pairs = np.array(points, dtype=np.float64)
    edges = np.unique(np.quantile(pairs[:, 0], np.arange(1, CLASSES) / CLASSES))
    class_numbers = np.searchsorted(edges, pairs[:, 0])
    return [pairs[class_numbers == number] for number in np.unique(class_numbers)]


def wait_by_prompt(log: ProxyLog) -> Picture | None:
    """None where prompts are too few, or too much alike, to be classed."""
    classes = prompt_classes(log)
    if len(classes) < 2:
        return None

    def paint(figure: "Figure") -> None:
        axis = figure.subplots()
        across = range(len(classes))
        axis.plot(across, [np.quantile(one[:, 1], 0.99) for one in classes], color=RED,
                  marker="o", markersize=3.5, linewidth=1.2, label="P99")  # fmt: skip
        axis.plot(across, [one[:, 1].mean() for one in classes], color=BLUE, marker="o",
                  markersize=4.5, linewidth=2.0, label="mean")  # fmt: skip
        axis.set_xticks(across, [f"{one[:, 0].mean():,.0f}" for one in classes])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("mean prompt of each class of requests, tokens")
        axis.set_ylabel("wait at the proxy, s")
        axis.legend(frameon=False, fontsize=9)
        add_grid(axis)

    return Picture(
        "Who waits: small requests or large ones",
        "Requests in classes by prompt length, ten of as many where lengths differ, from arrival "
        "to the worker; those that were sent again are left out. A level line is fair; a policy "
        "that picks what fits lets those wait that seldom fit.",
        draw("waits", 3.6, paint),
    )
