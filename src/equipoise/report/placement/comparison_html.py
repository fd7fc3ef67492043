"""The HTML page of `equipoise report`, with heat maps of ranks and experts."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from equipoise import __version__
from equipoise.report import plot_helpers
from equipoise.report.page import CSS, card_section, escape_html, facts, table
from equipoise.report.placement.comparison import FIGURES, Comparison
from equipoise.report.placement.spread import LoadSpread, Reals
from equipoise.report.run.metrics import relative_load
from equipoise.report.svg import DIVERGING, SEQUENTIAL, Picture, draw
from equipoise.report.text import format_number, pluralize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIN_SCALE_TOP = 1.2
"""The scale ends there or above: what is nearly even should look so."""
SCALE_PERCENTILE = 99.5
"""Per cent of the experts that the scale holds: a few wild ones would wash out all others."""


def heat_maps(comparison: Comparison) -> tuple[Picture, ...]:
    """Raises PlotsMissing without matplotlib."""
    return rank_heat_map(comparison), expert_heat_map(comparison)


def rank_heat_map(comparison: Comparison) -> Picture:
    """Rows / mean of every rank by layer, in each way, on one scale."""
    loads = [relative_load(layout.rank_rows) for layout in comparison.layouts]
    top = max(MIN_SCALE_TOP, *(float(np.nanmax(load)) for load in loads))

    def paint(figure: "Figure") -> None:
        from matplotlib.colors import TwoSlopeNorm

        axes = figure.subplots(len(loads), 1, squeeze=False)[:, 0]
        for axis, layout, load in zip(axes, comparison.layouts, loads, strict=True):
            norm = TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=top)
            _image(axis, load, cmap=plot_helpers.colour_map(DIVERGING), norm=norm)
            axis.set_title(layout.name, pad=6)
            _names(axis, comparison, "destination rank")
        plot_helpers.colour_bar(figure, list(axes), "rows of the rank / mean over ranks")

    return Picture(
        "Rows by layer and destination rank",
        "All windows summed. Red makes the others wait, blue waits.",
        draw("ranks", 0.8 + 3.2 * len(loads), paint),
    )


def expert_heat_map(comparison: Comparison) -> Picture:
    """Rows / mean of every expert by layer."""
    load = relative_load(comparison.statistics.counts.sum(axis=0))
    top = max(1.0, float(np.nanpercentile(load, SCALE_PERCENTILE)))

    def paint(figure: "Figure") -> None:
        axis = figure.subplots()
        _image(axis, load, cmap=plot_helpers.colour_map(SEQUENTIAL), vmin=0.0, vmax=top)
        _names(axis, comparison, "expert")
        plot_helpers.colour_bar(figure, [axis], "rows of the expert / mean over experts")

    return Picture(
        "Rows by layer and expert",
        "All windows summed. What is dark here is what copies are for.",
        draw("experts", 4.0, paint),
    )


def _image(axis: "Axes", load: Reals, **look: object) -> None:
    rows, columns = load.shape
    extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    axis.imshow(load, aspect="auto", interpolation="nearest", extent=extent, **look)  # type: ignore[arg-type]
    plot_helpers.hide_spines(axis)


def _names(axis: "Axes", comparison: Comparison, across: str) -> None:
    layers = comparison.statistics.layers
    places = range(0, len(layers), -(-len(layers) // 12))
    axis.set_yticks(list(places), [str(layers[place]) for place in places])
    axis.set_ylabel("layer")
    axis.set_xlabel(across)
    axis.locator_params(axis="x", integer=True)


SHAPES = ",.1f", ",.1f", ".4f"
WINDOW_QUANTILES = 0.0, 0.5, 0.9, 1.0


def render_html(comparison: Comparison, about: Mapping[str, str]) -> str:
    """The whole file as text; `about` names command and files. Raises PlotsMissing."""
    body = "\n".join(
        (
            _head(comparison),
            card_section("Mean over layers", _averages(comparison)),
            card_section("Window by window", _windows(comparison)),
            *(_picture(picture) for picture in heat_maps(comparison)),
            card_section("Layer by layer, ranks", _layers(comparison)),
            card_section("Where from", _about(about)),
        )
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Equipoise: rows on {comparison.ranks} ranks</title>\n<style>{CSS}</style>\n"
        f"</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(comparison: Comparison) -> str:
    statistics = comparison.statistics
    return (
        "<header><h1>Who has how much to do</h1>"
        f'<p class="soft">{pluralize(len(statistics.layers), "layer")} of '
        f"{pluralize(statistics.experts, 'expert')} on {pluralize(comparison.ranks, 'rank')}, "
        f"{pluralize(statistics.windows, 'window')}. Imbalance is max / mean \u2212 1; "
        "every figure is the mean over windows, the first table's also over layers.</p></header>"
    )


def _averages(comparison: Comparison) -> str:
    rows = [
        (f"{layout.name}, by {unit}", str(layout.slots), *_three(spread.average))
        for unit in ("rank", "slot")
        for layout in comparison.layouts
        for spread in (layout.by_rank if unit == "rank" else layout.by_slot,)
    ]
    return table(("", "slots", *FIGURES), rows)


def _windows(comparison: Comparison) -> str:
    """How imbalance is distributed over windows: sums hide a load that varies."""
    rows, numbered = [], comparison.statistics.first_iteration
    first = numbered or 0
    for layout in comparison.layouts:
        known = layout.by_window[~np.isnan(layout.by_window)]
        if known.size:
            figures = [format_number(float(v)) for v in np.quantile(known, WINDOW_QUANTILES)]
            rows.append((layout.name, *figures, str(first + int(np.nanargmax(layout.by_window)))))
    note = '<p class="soft">Imbalance of the ranks in one window, mean over layers.</p>'
    where = "window, of these from 0" if numbered is None else "iteration"
    return note + table(("", "least", "median", "90 % below", "largest", f"in {where}"), rows)


def _layers(comparison: Comparison) -> str:
    heads = [f"{layout.name}: {name}" for layout in comparison.layouts for name in FIGURES]
    rows = [
        (
            str(layer),
            *(text for layout in comparison.layouts for text in _of(layout.by_rank, place)),
        )
        for place, layer in enumerate(comparison.statistics.layers)
    ]
    return f"<details><summary>All layers</summary>{table(('layer', *heads), rows)}</details>"


def _of(spread: LoadSpread, place: int) -> tuple[str, ...]:
    return _three((spread.mean[place], spread.std[place], spread.imbalance[place]))


def _three(values: Iterable[float]) -> tuple[str, ...]:
    return tuple(format_number(float(v), shape) for v, shape in zip(values, SHAPES, strict=True))


def _picture(picture: Picture) -> str:
    inner = f'<p class="soft">{escape_html(picture.caption)}</p>{picture.svg}'
    return card_section(picture.title, inner)


def _about(about: Mapping[str, str]) -> str:
    return facts({"equipoise": __version__, **about}.items())
