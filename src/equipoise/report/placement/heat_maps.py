"""Heat maps of rows by layer and rank, and by layer and expert."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from equipoise.report import plot_helpers
from equipoise.report.placement.spread import Reals
from equipoise.report.svg import DIVERGING, SEQUENTIAL, Picture, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIN_SCALE_TOP = 1.2
"""The scale ends there or above: what is nearly even should look so."""
SCALE_PERCENTILE = 99.5
"""Per cent of the experts that the scale holds: a few wild ones would wash out all others."""


def rank_heat_map(layers: Sequence[int], loads: Mapping[str, Reals], summed: str) -> Picture:
    """Rows / mean of every rank by layer, in each named way, on one scale.

    Args:
        layers: numbers of the layers.
        loads: (layers, ranks) of each way; NaN where a layer has no rows.
        summed: over what the rows were summed, a sentence.
    """
    top = max(MIN_SCALE_TOP, *(float(np.nanmax(load)) for load in loads.values()))

    def paint(figure: "Figure") -> None:
        from matplotlib.colors import TwoSlopeNorm

        axes = figure.subplots(len(loads), 1, squeeze=False)[:, 0]
        for axis, (name, load) in zip(axes, loads.items(), strict=True):
            norm = TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=top)
            _image(axis, load, cmap=plot_helpers.colour_map(DIVERGING), norm=norm)
            axis.set_title(name, pad=6)
            _names(axis, layers, "destination rank")
        plot_helpers.colour_bar(figure, list(axes), "rows of the rank / mean over ranks")

    return Picture(
        "Rows by layer and destination rank",
        f"{summed} Red makes the others wait, blue waits.",
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


def _image(axis: "Axes", load: Reals, **look: object) -> None:
    rows, columns = load.shape
    extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    axis.imshow(load, aspect="auto", interpolation="nearest", extent=extent, **look)  # type: ignore[arg-type]
    plot_helpers.hide_spines(axis)


def _names(axis: "Axes", layers: Sequence[int], across: str) -> None:
    places = range(0, len(layers), -(-len(layers) // 12))
    axis.set_yticks(list(places), [str(layers[place]) for place in places])
    axis.set_ylabel("layer")
    axis.set_xlabel(across)
    axis.locator_params(axis="x", integer=True)
