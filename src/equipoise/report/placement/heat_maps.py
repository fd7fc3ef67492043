"""Pictures of imbalance by layer and window, and of rows by layer, rank and expert."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from equipoise.report import plot_helpers
from equipoise.report.placement.spread import Reals
from equipoise.report.svg import DIVERGING, MUTED, SEQUENTIAL, VARIANT_COLOURS, Picture, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIN_SCALE_TOP = 0.01
"""Imbalance at which a scale ends at least: what is nearly even should look so."""
OWN_SCALES = "Each has a scale of its own, so compare its numbers, not its colours."
"""On the scale of what was uneven, what was evened out is one empty rectangle."""
SCALE_PERCENTILE = 99.5
"""Per cent of the experts that the scale holds: a few wild ones would wash out all others."""

LAYOUT_COLOURS = VARIANT_COLOURS["unbalanced"], VARIANT_COLOURS["exact"]
"""Of what was, and of what is to be."""


def window_heat_map(layers: Sequence[int], imbalances: Mapping[str, Reals], first: int) -> Picture:
    """Imbalance by layer and window, in each named way, each on its own scale.

    Args:
        layers: numbers of the layers.
        imbalances: (layers, windows) of each way; NaN where a layer has no rows.
        first: number of the first window.
    """

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(len(imbalances), 1, sharex=True, squeeze=False)[:, 0]
        for axis, (name, values) in zip(axes, imbalances.items(), strict=True):
            colours = plot_helpers.colour_map(SEQUENTIAL)
            _image(axis, values, first, cmap=colours, vmin=0.0, vmax=_scale_top(values))
            axis.set_title(name, pad=6)
            _names(axis, layers, "")
            plot_helpers.colour_bar(figure, [axis], "max / mean \u2212 1 over ranks")
        axes[-1].set_xlabel("window")

    return Picture(
        "Imbalance by layer and window",
        "Every window by itself: what a sum over windows hides. Light is even; a dark row is a "
        f"layer that stays uneven, a dark column a moment that was unlike the others. {OWN_SCALES}",
        draw("windows", 0.8 + 2.6 * len(imbalances), paint),
    )


def layer_curve(layers: Sequence[int], quantiles: Mapping[str, tuple[Reals, Reals]]) -> Picture:
    """Median and P99 of the imbalance over windows, by layer, worst of the first way first.

    Args:
        layers: numbers of the layers.
        quantiles: median and P99 of each way, (layers,) each; NaN where a layer has no rows.
    """
    order = np.argsort(-np.nan_to_num(next(iter(quantiles.values()))[0], nan=-1.0), kind="stable")
    across = np.arange(len(layers))

    def paint(figure: "Figure") -> None:
        axis = figure.subplots()
        for (name, (median, p99)), colour in zip(quantiles.items(), LAYOUT_COLOURS, strict=False):
            axis.fill_between(
                across, median[order], p99[order], color=colour, alpha=0.2, linewidth=0
            )
            axis.plot(across, p99[order], color=colour, linewidth=1.0, linestyle=(0, (1, 1.5)))
            axis.plot(across, median[order], color=colour, linewidth=2.0, marker="o", markersize=3,
                      label=name)  # fmt: skip
        places = range(0, len(layers), -(-len(layers) // 30))
        axis.set_xticks(list(places), [str(layers[order[place]]) for place in places])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("layer, worst first")
        axis.set_ylabel("max / mean \u2212 1 over ranks")
        axis.grid(axis="y", color=MUTED, alpha=0.25, linewidth=0.6)
        axis.legend(frameon=False, fontsize=9)

    return Picture(
        "Imbalance by layer",
        "Line: median over windows; dotted: P99, which one window in a hundred exceeds. A step "
        "waits for every layer in turn, so layers on the left are where time is lost.",
        draw("layers", 3.4, paint),
    )


def rank_heat_map(layers: Sequence[int], loads: Mapping[str, Reals], taken: str) -> Picture:
    """Rows / mean of every rank by layer, in each named way, each on its own scale.

    Args:
        layers: numbers of the layers.
        loads: (layers, ranks) of each way; NaN where a layer has no rows.
        taken: over what the rows were summed, or which of them are shown; a sentence.
    """

    def paint(figure: "Figure") -> None:
        from matplotlib.colors import TwoSlopeNorm

        axes = figure.subplots(len(loads), 1, squeeze=False)[:, 0]
        for axis, (name, load) in zip(axes, loads.items(), strict=True):
            top = _scale_top(np.abs(load - 1.0))
            norm = TwoSlopeNorm(vmin=max(0.0, 1.0 - top), vcenter=1.0, vmax=1.0 + top)
            _image(axis, load, cmap=plot_helpers.colour_map(DIVERGING), norm=norm)
            axis.set_title(name, pad=6)
            _names(axis, layers, "destination rank")
            plot_helpers.colour_bar(figure, [axis], "rows / mean over ranks")

    return Picture(
        "Rows by layer and destination rank",
        f"{taken} Red makes the others wait, blue waits. {OWN_SCALES}",
        draw("ranks", 0.8 + 3.2 * len(loads), paint),
    )


def expert_heat_map(layers: Sequence[int], load: Reals, summed: str) -> Picture:
    """Rows / mean of every expert by layer, (layers, experts); else as `rank_heat_map`."""
    top = max(1.0, float(np.nanpercentile(load, SCALE_PERCENTILE)))

    def paint(figure: "Figure") -> None:
        axis = figure.subplots()
        _image(axis, load, cmap=plot_helpers.colour_map(SEQUENTIAL), vmin=0.0, vmax=top)
        _names(axis, layers, "expert")
        plot_helpers.colour_bar(figure, [axis], "rows of the expert / mean over experts")

    return Picture(
        "Rows by layer and expert",
        f"{summed} What is dark here is what copies are for.",
        draw("experts", 4.0, paint),
    )


def _scale_top(values: Reals) -> float:
    known = values[~np.isnan(values)]
    return max(float(np.percentile(known, SCALE_PERCENTILE)) if known.size else 0.0, MIN_SCALE_TOP)


def _image(axis: "Axes", load: Reals, first: int = 0, **look: object) -> None:
    rows, columns = load.shape
    extent = (first - 0.5, first + columns - 0.5, rows - 0.5, -0.5)
    axis.imshow(load, aspect="auto", interpolation="nearest", extent=extent, **look)  # type: ignore[arg-type]
    plot_helpers.hide_spines(axis)


def _names(axis: "Axes", layers: Sequence[int], across: str) -> None:
    places = range(0, len(layers), -(-len(layers) // 12))
    axis.set_yticks(list(places), [str(layers[place]) for place in places])
    axis.set_ylabel("layer")
    axis.set_xlabel(across)
    axis.locator_params(axis="x", integer=True)
