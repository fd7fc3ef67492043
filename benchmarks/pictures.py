"""The pictures of docs/performance.md, from files of figures. Drawn by `performance.py`.

A picture names the figures it was drawn from, so that a test can hold both together.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from evidence import ROOT

from equipoise.report.canvas import draw
from equipoise.report.palette import INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = ROOT / "docs" / "images"
Figures = dict[str, Any]
BLUE, TEAL, RED, GOLD = "#3d6fb6", "#4f8f8b", "#c8553d", "#c99a2e"
COLOURS = {"greedy": RED, "swift-like": GOLD, "connected": TEAL, "incremental": BLUE}
WIDTHS = {"greedy": 2.8, "swift-like": 1.4, "connected": 1.5, "incremental": 2.2}
"""Of lines: of two that lie on each other both are seen. The wider lies below."""
LEAST_MOVED = 3e-5
"""Part of the slots; less, which is nothing, is drawn there: the scale is logarithmic."""
ZIPF = "first layout, Zipf 0.8"
POLICIES = {
    "drop-in": (BLUE, "*", "drop-in: even split, target 0.02"),
    "swift-like": (GOLD, "o", "swift-like"),
    "greedy": (RED, "o", "greedy"),
}
"""Colour, sign and name of those that are one point."""


def mark(figures: Figures) -> str:
    """Of what a picture was drawn from."""
    return hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()[:16]


def on_paper(svg: str, name: str = "") -> str:
    """A page brings its own ink and paper, a file does not."""
    paper = '<svg xmlns="http://www.w3.org/2000/svg" style="background:#fff;color:#1f2933"'
    bare = svg.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)
    opened = bare.replace("<svg", paper, 1)
    if name:
        opened = opened.replace(">", f">\n<desc>figures {name}</desc>", 1)
    return opened + "\n"


def by_window(figures: Figures) -> str:
    """What is served, planned and moved, window by window, on the first shape; an SVG file."""
    shape = figures["a"]

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(3, 1, sharex=True)
        for axis, paint_one in zip(axes, (_served, _planned, _moved), strict=True):
            paint_one(axis, shape["series"])
            for switch in shape["switches"]:
                axis.axvline(switch, color=MUTED, linewidth=1.0, linestyle=(0, (4, 3)), zorder=0)
        for switch in shape["switches"]:
            _label(axes[0], (switch + 0.06, 1.3), "other traffic", MUTED, (0, 0))
        _windows(axes[-1], len(shape["series"]["greedy"]["plan"]))
        handles, names = axes[1].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper right", ncols=len(names), frameon=False,
                      labelcolor="linecolor", fontsize=9.5)  # fmt: skip

    return on_paper(draw("planner", 7.6, paint), mark(shape))


def _windows(axis: "Axes", plans: int) -> None:
    axis.set_xlim(1, plans + 1)
    axis.set_xticks([number + 0.5 for number in range(1, plans + 1)])
    axis.set_xticklabels([str(number) for number in range(1, plans + 1)])
    axis.set_xlabel("window; a plan is made at its end, for the next one")


def _served(axis: "Axes", series: Figures) -> None:
    for name, colour in COLOURS.items():
        values = series[name]["exact"]
        axis.stairs(values, np.arange(1, len(values) + 2), baseline=None, color=colour,
                    linewidth=WIDTHS[name], zorder=5 - WIDTHS[name])  # fmt: skip
    _logarithmic(axis, "Served: batches of the window, shares solved on each")
    axis.set_ylim(1e-3, 2.5)
    axis.set_ylabel("max / mean \u2212 1")


def _planned(axis: "Axes", series: Figures) -> None:
    for name in COLOURS:
        _line(axis, name, series[name]["plan"])
    _logarithmic(axis, "Planned: on the load of the window that ends")
    axis.set_ylim(5e-5, 0.1)
    axis.set_ylabel("max / mean \u2212 1")


def _moved(axis: "Axes", series: Figures) -> None:
    for name in COLOURS:
        _line(axis, name, [max(part, LEAST_MOVED) for part in series[name]["moved"][1:]], 2)
    _logarithmic(axis, "Moved: copies that their rank did not hold, of all slots")
    axis.yaxis.set_major_formatter(
        lambda value, _: "0" if value <= LEAST_MOVED else f"{value * 100:.3g} %"
    )
    axis.set_ylim(LEAST_MOVED * 0.8, 1.6)
    axis.set_yticks([LEAST_MOVED, 1e-4, 1e-3, 1e-2, 1e-1, 1.0])


def _line(axis: "Axes", name: str, values: Sequence[float], first: int = 1) -> None:
    """A point at the end of each window."""
    axis.plot(np.arange(first, first + len(values)), values, color=COLOURS[name], marker="o",
              markersize=3.6, linewidth=WIDTHS[name], zorder=5 - WIDTHS[name], label=name,
              clip_on=False)  # fmt: skip


def _logarithmic(axis: "Axes", title: str) -> None:
    axis.set_yscale("log")
    axis.minorticks_off()
    axis.tick_params(axis="x", length=0)
    axis.set_title(title, pad=8)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")


def pareto(figures: Figures) -> str:
    """Moves against balance, Zipf 0.8; an SVG file."""

    def paint(figure: "Figure") -> None:
        axis = figure.subplots()
        axis.set_yscale("log")
        axis.minorticks_off()
        axis.fill_between([0, 3700], 1e-4, 0.02, color=BLUE, alpha=0.09, linewidth=0)
        _label(axis, (0, 0.02), "asked for: 3,700 moves, 0.02", MUTED, (6, -13))
        _curve(axis, figures["curve"]["even"], BLUE, "even split, targets 0.3 to 0.005")
        _curve(axis, figures["curve"]["level"], TEAL, "shares, targets 0.3 to 0.005")
        _points(axis, figures)
        axis.legend(frameon=False, loc="upper right", labelcolor="linecolor", fontsize=9.5)
        axis.set_xlim(left=-150)
        axis.set_ylim(5e-4, 5)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        axis.set_xlabel(f"copies moved, of {figures['slots']:,}")
        axis.set_ylabel("max / mean \u2212 1 afterwards")

    return on_paper(draw("pareto", 4.6, paint), mark(figures))


def _curve(axis: "Axes", points: list[Figures], colour: str, words: str) -> None:
    moves = [point["moves"] for point in points]
    heights = [point["imbalance"] for point in points]
    axis.plot(moves, heights, color=colour, marker="o", markersize=4, linewidth=1.6, label=words)


def _points(axis: "Axes", figures: Figures) -> None:
    axis.plot(0, figures["curve"]["start"], marker="s", color=INK, clip_on=False)
    _label(axis, (0, figures["curve"]["start"]), "as installed", INK, (9, -3))
    for name, (colour, sign, words) in POLICIES.items():
        rows = figures["starts"][ZIPF][name]
        moves = float(np.mean([row["moves"] for row in rows]))
        height = float(np.mean([row["after"] for row in rows])) - 1.0
        size = 12 if sign == "*" else 7
        axis.plot(moves, height, marker=sign, color=colour, markersize=size, linestyle="none",
                  label=words)  # fmt: skip


def _label(
    axis: "Axes", at: tuple[float, float], words: str, colour: str, by: tuple[int, int]
) -> None:
    axis.annotate(words, at, xytext=by, textcoords="offset points", color=colour, fontsize=9.5)


PICTURES: dict[str, tuple[str, Callable[[Figures], str], Callable[[Figures], Figures]]] = {
    "planner-windows.svg": ("planner", by_window, lambda figures: figures["a"]),
    "moves-and-balance.svg": ("even_split", pareto, lambda figures: figures),
}
"""By file: the results, how they are drawn, and the part of them that is."""


def draw_all(load: Callable[[str], Figures | None]) -> None:
    """Draw those there are results for."""
    for file, (source, paint, _) in PICTURES.items():
        found = load(source)
        if found is not None:
            (IMAGES / file).write_text(paint(found["figures"]))
