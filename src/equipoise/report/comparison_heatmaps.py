"""The heat maps of a comparison: which rank, and which expert, had how much to do."""

from typing import TYPE_CHECKING

import numpy as np

from equipoise.report import marks
from equipoise.report.canvas import Picture, draw
from equipoise.report.comparison import Comparison
from equipoise.report.metrics import relative_load
from equipoise.report.palette import DIVERGING, SEQUENTIAL
from equipoise.report.spread import Reals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST_TOP = 1.2
"""The scale ends there or above: what is nearly even should look so."""
SEEN = 99.5
"""Per cent of the experts that the scale holds: a few wild ones would wash out all others."""


def heat_maps(found: Comparison) -> tuple[Picture, ...]:
    """Raises PlotsMissing without matplotlib."""
    return rank_heat(found), expert_heat(found)


def rank_heat(found: Comparison) -> Picture:
    """Rows / mean of every rank by layer, in each way, on one scale."""
    loads = [relative_load(served.rank_rows) for served in found.served]
    top = max(LEAST_TOP, *(float(np.nanmax(load)) for load in loads))

    def paint(figure: "Figure") -> None:
        from matplotlib.colors import TwoSlopeNorm

        axes = figure.subplots(len(loads), 1, squeeze=False)[:, 0]
        for axis, served, load in zip(axes, found.served, loads, strict=True):
            norm = TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=top)
            _image(axis, load, cmap=marks.colours(DIVERGING), norm=norm)
            axis.set_title(served.name, pad=6)
            _names(axis, found, "destination rank")
        marks.scale(figure, list(axes), "rows of the rank / mean over ranks")

    return Picture(
        "Rows by layer and destination rank",
        "All windows summed. Red makes the others wait, blue waits.",
        draw("ranks", 0.8 + 3.2 * len(loads), paint),
    )


def expert_heat(found: Comparison) -> Picture:
    """Rows / mean of every expert by layer."""
    load = relative_load(found.statistics.counts.sum(axis=0))
    top = max(1.0, float(np.nanpercentile(load, SEEN)))

    def paint(figure: "Figure") -> None:
        axis = figure.subplots()
        _image(axis, load, cmap=marks.colours(SEQUENTIAL), vmin=0.0, vmax=top)
        _names(axis, found, "expert")
        marks.scale(figure, [axis], "rows of the expert / mean over experts")

    return Picture(
        "Rows by layer and expert",
        "All windows summed. What is dark here is what copies are for.",
        draw("experts", 4.0, paint),
    )


def _image(axis: "Axes", load: Reals, **look: object) -> None:
    rows, columns = load.shape
    extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    axis.imshow(load, aspect="auto", interpolation="nearest", extent=extent, **look)  # type: ignore[arg-type]
    marks.frameless(axis)


def _names(axis: "Axes", found: Comparison, across: str) -> None:
    layers = found.statistics.layers
    shown = range(0, len(layers), -(-len(layers) // 12))
    axis.set_yticks(list(shown), [str(layers[place]) for place in shown])
    axis.set_ylabel("layer")
    axis.set_xlabel(across)
    axis.locator_params(axis="x", integer=True)
