"""The load of every worker, step by step, a small picture for each router."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from equipoise.balancer.requests.comparison import Result
from equipoise.report import marks
from equipoise.report.canvas import Picture, draw
from equipoise.report.palette import INK, MUTED, SEQUENTIAL
from equipoise.report.simulation.seen import Lines
from equipoise.report.simulation.shades import gridded, of_policy
from equipoise.report.simulation.simulated import Simulated

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3
DASHES = (0, (4, 3))
MOST_DRAWN = 16
"""Lines as such; more are drawn as an image, which does not grow with their number."""


def load_lines(found: Simulated) -> Picture | None:
    """None where nobody served anything."""
    shown = [r for r in found.results if r.contender.label in found.seen]
    if not shown:
        return None
    down = -(-len(shown) // ACROSS)
    lines = [found.seen[result.contender.label].lines for result in shown]

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(down, ACROSS, sharex=True, sharey=True, squeeze=False)
        for place, axis in enumerate(axes.flat):
            if place < len(shown):
                _panel(axis, shown[place], lines[place])
            else:
                axis.set_axis_off()
        axes[0, 0].set_ylim(*_extent(lines))
        last = max(int(one.steps[-1]) for one in lines)
        axes[0, 0].set_xlim(0, last + 1)
        axes[0, 0].locator_params(axis="x", nbins=5)
        _legend(figure, any(one.warm <= last for one in lines))
        figure.supylabel("KV tokens of a worker, thousands", fontsize=10)
        figure.supxlabel("step", fontsize=10)

    return Picture(
        "Load of every worker",
        "One line for each worker, first seed, all on one scale, which may not begin at 0. A step "
        "takes as long as the fullest worker says; what the others are below it, they wait.",
        draw("loads", 1.0 + 1.5 * down, paint),
    )


def _panel(axis: "Axes", result: Result, lines: Lines) -> None:
    steps, loads = lines.steps, lines.loads
    tones = marks.colours(SEQUENTIAL)(np.linspace(0.3, 0.75, loads.shape[1]))
    raster = loads.shape[1] > MOST_DRAWN
    for worker, tone in enumerate(tones):
        axis.plot(
            steps, loads[:, worker] / 1e3, color=tone, linewidth=0.8, alpha=0.8, rasterized=raster
        )
    axis.plot(steps, loads.max(axis=1) / 1e3, color=INK, linewidth=0.9)
    if lines.warm <= steps[-1]:
        axis.axvline(lines.warm, color=MUTED, linewidth=0.9, linestyle=DASHES)
    label, idle = result.contender.label, result.interval("idle").mean
    axis.set_title(f"{label}, {idle:.1%} idle", color=of_policy(label), fontsize=9.5, pad=4)
    gridded(axis)


def _extent(lines: Sequence[Lines]) -> tuple[float, float]:
    """From somewhat below the lowest load, once workers have filled, to above the highest."""
    filled = [one.loads[len(one.loads) // 10 :] for one in lines]
    low, high = min(int(one.min()) for one in filled), max(int(one.max()) for one in filled)
    room = max(high - low, 1)
    return max(0.0, low - 0.25 * room) / 1e3, (high + 0.05 * room) / 1e3


def _legend(figure: "Figure", dashed: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=INK, linewidth=1.4, label="the fullest worker"),
        Line2D([], [], color=marks.colours(SEQUENTIAL)(0.5), linewidth=1.4, label="the others"),
    ]
    if dashed:
        words = "figures are taken from here on"
        handles.append(Line2D([], [], color=MUTED, linestyle=DASHES, label=words))
    figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False, fontsize=9)
