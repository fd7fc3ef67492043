"""The HTML page of `equipoise report`: imbalance by window and layer, ranks, experts."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from equipoise.balancer.experts.placement import SHARE_ONE
from equipoise.report.page import flat_facts, render_page
from equipoise.report.placement.comparison import FIGURES, Comparison
from equipoise.report.placement.heat_maps import (
    SCALE_PERCENTILE,
    layer_curve,
    rank_heat_map,
    window_heat_map,
)
from equipoise.report.placement.spread import PEAK, LoadSpread, Reals
from equipoise.report.run.metrics import relative_load
from equipoise.report.svg import SEQUENTIAL, Picture
from equipoise.report.text import format_number, pluralize

SHAPES = ",.1f", ",.1f", ".4f"
WINDOW_QUANTILES = {"least": 0.0, "P50": 0.5, "P90": 0.9, "P99": PEAK, "largest": 1.0}
HOTTEST = 20
"""Experts that are listed."""


def pictures(comparison: Comparison) -> tuple[Picture, ...]:
    """Raises PlotsMissing without matplotlib."""
    statistics, layouts = comparison.statistics, comparison.layouts
    shown = (
        "P99 over windows: what a rank has in its fullest ones."
        if statistics.windows > 1
        else "The one window."
    )
    return (
        window_heat_map(
            statistics.layers,
            {layout.name: layout.window_imbalance for layout in layouts},
            statistics.first_iteration or 0,
        ),
        layer_curve(
            statistics.layers,
            {
                layout.name: (layout.quantile_over_windows(0.5), layout.quantile_over_windows(PEAK))
                for layout in layouts
            },
        ),
        rank_heat_map(
            statistics.layers, {layout.name: layout.rank_peaks for layout in layouts}, shown
        ),
    )


def render_html(comparison: Comparison, about: Mapping[str, str]) -> str:
    """The whole file as text; `about` names command and files. Raises PlotsMissing."""
    statistics = comparison.statistics
    numbered = statistics.first_iteration is not None
    more = {name: value for name, value in about.items() if name != "command"}
    return render_page(
        "placement.html",
        command=about.get("command", ""),
        title="Load of ranks and experts",
        subtitle=f"{pluralize(len(statistics.layers), 'layer')} of "
        f"{pluralize(statistics.experts, 'expert')} on {pluralize(comparison.ranks, 'rank')}, "
        f"{pluralize(statistics.windows, 'window')}",
        tiles=list(_tiles(comparison)),
        average_heads=("", "slots", *FIGURES),
        averages=list(_averages(comparison)),
        window_heads=("", *WINDOW_QUANTILES, "in iteration" if numbered else "in window, from 0"),
        windows=list(_windows(comparison)),
        pictures=pictures(comparison),
        name=comparison.layouts[-1].name,
        experts=expert_data(comparison),
        hottest=list(_hottest(comparison)),
        layer_heads=(
            "layer",
            *(f"{layout.name}: {name}" for layout in comparison.layouts for name in FIGURES),
        ),
        layers=list(_layers(comparison)),
        about=flat_facts(more),
    )


def expert_data(comparison: Comparison) -> dict[str, object]:
    """What the script of the page needs to draw experts and to name their copies."""
    placement, rows = comparison.placement, comparison.statistics.counts.sum(axis=0)
    load = relative_load(rows)
    known = load[~np.isnan(load)]
    return {
        "layers": list(comparison.statistics.layers),
        "rows": rows.tolist(),
        "placement": placement.placement.tolist(),
        "shares": np.rint(placement.shares * 100 / SHARE_ONE).astype(int).tolist(),
        "slotsPerRank": placement.slots // placement.ranks,
        "top": max(1.0, float(np.percentile(known, SCALE_PERCENTILE)) if known.size else 1.0),
        "colours": list(SEQUENTIAL),
    }


def _tiles(comparison: Comparison) -> Iterator[tuple[str, str]]:
    for layout in comparison.layouts:
        yield format_number(layout.by_rank.average[2], ".3f"), f"imbalance, {layout.name}"
        known = layout.by_window[~np.isnan(layout.by_window)]
        peak = float(np.quantile(known, PEAK)) if known.size else float("nan")
        yield format_number(peak, ".3f"), f"P99 over windows, {layout.name}"


def _averages(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    for unit in ("rank", "slot"):
        for layout in comparison.layouts:
            spread = layout.by_rank if unit == "rank" else layout.by_slot
            yield f"{layout.name}, by {unit}", str(layout.slots), *_three(spread.average)


def _windows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """How imbalance is distributed over windows: sums hide a load that varies."""
    first = comparison.statistics.first_iteration or 0
    for layout in comparison.layouts:
        known = layout.by_window[~np.isnan(layout.by_window)]
        if known.size:
            values = np.quantile(known, tuple(WINDOW_QUANTILES.values()))
            figures = (format_number(float(value)) for value in values)
            yield layout.name, *figures, str(first + int(np.nanargmax(layout.by_window)))


def _hottest(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Those with most rows for their layer, and where their copies are."""
    statistics, placement = comparison.statistics, comparison.placement
    rows = statistics.counts.sum(axis=0)
    load = np.nan_to_num(relative_load(rows))
    size = placement.slots // placement.ranks
    for place in np.argsort(-load, axis=None, kind="stable")[:HOTTEST].tolist():
        layer, expert = divmod(place, statistics.experts)
        slots = np.flatnonzero(placement.placement[layer] == expert)
        yield (
            str(statistics.layers[layer]),
            str(expert),
            f"{rows[layer, expert]:,}",
            f"{load[layer, expert] / statistics.experts:.1%}",
            f"{load[layer, expert]:.1f}",
            str(len(slots)),
            ", ".join(str(slot // size) for slot in slots),
        )


def _layers(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    for place, layer in enumerate(comparison.statistics.layers):
        spreads = (_of(layout.by_rank, place) for layout in comparison.layouts)
        yield str(layer), *(text for spread in spreads for text in spread)


def _of(spread: LoadSpread, place: int) -> tuple[str, ...]:
    return _three((spread.mean[place], spread.std[place], spread.imbalance[place]))


def _three(values: Iterable[float] | Reals) -> tuple[str, ...]:
    return tuple(format_number(float(v), shape) for v, shape in zip(values, SHAPES, strict=True))
