"""Load of every worker over time, and who waits how long."""

from typing import TYPE_CHECKING

import numpy as np

from equipoise.report import marks
from equipoise.report.canvas import Picture, draw
from equipoise.report.palette import INK, MUTED, SEQUENTIAL
from equipoise.report.routed.loads import Loads, Reals, loads_of
from equipoise.report.routed.trips import Routed
from equipoise.report.simulation.shades import gridded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN = 800
"""Moments of a line."""
RASTER_FROM = 16
"""Lines as such up to so many; more are an image, which does not grow with their number."""
CLASSES = 10
FEWEST = 20
"""Requests, of which classes can be told apart."""
BLUE, RED = "#3d6fb6", "#b3331d"


def load_lines(routed: Routed) -> Picture | None:
    """None where no worker had a request."""
    loads = loads_of(routed, DRAWN)
    if loads is None:
        return None

    def paint(figure: "Figure") -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.1))
        _loads(above, loads)
        _idle(below, loads)
        below.set_xlabel("seconds since the first request arrived")
        figure.legend(handles=_keys(), loc="outside upper right", ncols=2, frameon=False,
                      fontsize=9)  # fmt: skip

    return Picture(
        "Load of every worker",
        "KV tokens of the requests that a worker has, prompts and tokens made, reconstructed from "
        "the log: tokens at equal distances from the first to the last, prompts as long as "
        "workers said in the end, those of an answer that is not streamed when it ends, which is "
        "when a policy learns of them. A retried request counts where it was last. Below: what "
        "workers are short of the fullest one, which is what they idle if a step waits for all "
        "of them. A worker that never had a request is not in the log, and not counted.",
        draw("loads", 4.6, paint),
    )


def _loads(axis: "Axes", loads: Loads) -> None:
    tones = marks.colours(SEQUENTIAL)(np.linspace(0.3, 0.75, loads.tokens.shape[1]))
    raster = loads.tokens.shape[1] > RASTER_FROM
    for worker, tone in enumerate(tones):
        axis.plot(loads.times, loads.tokens[:, worker] / 1e3, color=tone, linewidth=0.9, alpha=0.85,
                  rasterized=raster)  # fmt: skip
    axis.plot(loads.times, loads.tokens.max(axis=1) / 1e3, color=INK, linewidth=1.0)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("KV tokens, thousands")
    gridded(axis)


def _idle(axis: "Axes", loads: Loads) -> None:
    envelope = loads.envelope
    gap = envelope - loads.tokens.sum(axis=1)
    share = np.divide(gap, envelope, out=np.zeros_like(gap), where=envelope > 0)
    axis.fill_between(loads.times, share * 100, color=MUTED, alpha=0.55, linewidth=0, step="mid")
    axis.set_ylim(0, 100)
    axis.set_ylabel("idle, %")
    gridded(axis)


def _keys() -> list[object]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=INK, linewidth=1.4, label="the fullest worker"),
        Line2D([], [], color=marks.colours(SEQUENTIAL)(0.5), linewidth=1.4, label="each worker"),
    ]


def classes_of(routed: Routed) -> list[Reals]:
    """(prompt, wait) of requests in classes by prompt; those that are alike are in one class."""
    known = [(trip.prompt, trip.wait) for trip in routed.bound if trip.wait is not None]
    if len(known) < FEWEST:
        return []
    pairs = np.array(known, dtype=np.float64)
    edges = np.unique(np.quantile(pairs[:, 0], np.arange(1, CLASSES) / CLASSES))
    which = np.searchsorted(edges, pairs[:, 0])
    return [pairs[which == number] for number in np.unique(which)]


def wait_by_size(routed: Routed) -> Picture | None:
    """None where prompts are too few, or too much alike, to be classed."""
    classes = classes_of(routed)
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
        gridded(axis)

    return Picture(
        "Who waits: small requests or large ones",
        "Requests in classes by prompt length, ten of as many where lengths differ, from arrival "
        "to the worker that had them last. A level line is fair; a policy that picks what fits "
        "lets those wait that seldom fit.",
        draw("waits", 3.6, paint),
    )
