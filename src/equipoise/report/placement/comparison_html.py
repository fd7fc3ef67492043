"""The HTML page of `equipoise report`, with heat maps of ranks and experts."""

from collections.abc import Iterable, Mapping

import numpy as np

from equipoise import __version__
from equipoise.report.page import CSS, card_section, escape_html, facts, table
from equipoise.report.placement.comparison import FIGURES, Comparison
from equipoise.report.placement.heat_maps import expert_heat_map, rank_heat_map
from equipoise.report.placement.spread import LoadSpread
from equipoise.report.run.metrics import relative_load
from equipoise.report.svg import Picture
from equipoise.report.text import format_number, pluralize


def heat_maps(comparison: Comparison) -> tuple[Picture, ...]:
    """Raises PlotsMissing without matplotlib."""
    layers, summed = comparison.statistics.layers, "All windows summed."
    ranks = {layout.name: relative_load(layout.rank_rows) for layout in comparison.layouts}
    experts = relative_load(comparison.statistics.counts.sum(axis=0))
    return rank_heat_map(layers, ranks, summed), expert_heat_map(layers, experts, summed)


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
