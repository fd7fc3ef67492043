"""Recorded rows served by experts in linear order, and by a placement: figures and table.

The table is 80 columns wide.
"""

from dataclasses import dataclass
from typing import Any

from equipoise import __version__
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.balancer.formats.statistics import ExpertStatistics
from equipoise.report.placement.spread import (
    LayoutLoad,
    LoadSpread,
    layout_load,
    linear,
    select_layers,
)
from equipoise.report.terminal import ColourMode, TextStyle, styled
from equipoise.report.text import format_number, json_float, pluralize

FIGURES = "mean", "std", "imbalance"


@dataclass(frozen=True)
class Comparison:
    """The same statistics, served in one way or two; linear first.

    Attributes:
        statistics: what was recorded.
        ranks: number of ranks.
        layouts: the load under each.
        placement: the last of them, of just the layers of the statistics.
    """

    statistics: ExpertStatistics
    ranks: int
    layouts: tuple[LayoutLoad, ...]
    placement: ExpertPlacement

    def to_json(self) -> dict[str, Any]:
        """As plain values; null where a layer had no rows."""
        return {
            "equipoise": __version__,
            "ranks": self.ranks,
            "experts": self.statistics.experts,
            "windows": self.statistics.windows,
            "layers": list(self.statistics.layers),
            "served": {
                layout.name: {
                    "slots": layout.slots,
                    "by_rank": _figures(layout.by_rank),
                    "by_slot": _figures(layout.by_slot),
                    "by_window": {"imbalance": [json_float(v) for v in layout.by_window]},
                }
                for layout in self.layouts
            },
        }


def compare(
    statistics: ExpertStatistics, placement: ExpertPlacement | None, ranks: int
) -> Comparison:
    """Raises `PlacementError` where the placement is of other layers or experts."""
    last = linear(statistics, ranks)
    layouts = [layout_load("linear", statistics, last)]
    if placement is not None:
        layouts.append(layout_load("placement", statistics, placement))
        last = select_layers(placement, statistics)
    return Comparison(statistics, ranks, tuple(layouts), last)


def _figures(spread: LoadSpread) -> dict[str, Any]:
    columns = spread.mean, spread.std, spread.imbalance
    return {
        "average": {n: json_float(v) for n, v in zip(FIGURES, spread.average, strict=True)},
        "layers": {n: [json_float(v) for v in c] for n, c in zip(FIGURES, columns, strict=True)},
    }


COLUMNS = "", "slots", "mean", "std", "imbalance", "worst", "in layer"
WIDTHS = 20, 7, 12, 12, 11, 9, 9


def render(comparison: Comparison, colours: ColourMode) -> str:
    """The whole table; its last lines say what the figures are."""
    lines = [
        styled(_title(comparison), TextStyle.BOLD, colours),
        styled(_source(comparison), TextStyle.DIM, colours),
        "",
        styled(_aligned(COLUMNS), TextStyle.DIM, colours),
        *_rows(comparison, "rank"),
        *_rows(comparison, "slot"),
        "",
        "rows of a rank or slot in a window; imbalance is max/mean - 1; each is the mean",
        "over windows, then over layers",
    ]
    return "\n".join(lines)


def _title(comparison: Comparison) -> str:
    layers, experts = len(comparison.statistics.layers), comparison.statistics.experts
    subject = f"{pluralize(layers, 'layer')} of {pluralize(experts, 'expert')}"
    return f"{subject} on {pluralize(comparison.ranks, 'rank')}"


def _source(comparison: Comparison) -> str:
    statistics = comparison.statistics
    if statistics.first_iteration is None:
        return pluralize(statistics.windows, "window")
    last = statistics.first_iteration + statistics.windows - 1
    return f"iterations {statistics.first_iteration} to {last}"


def _rows(comparison: Comparison, unit: str) -> list[str]:
    return [
        _row(comparison, f"{layout.name}, by {unit}", layout, unit) for layout in comparison.layouts
    ]


def _row(comparison: Comparison, name: str, layout: LayoutLoad, unit: str) -> str:
    spread: LoadSpread = layout.by_rank if unit == "rank" else layout.by_slot
    mean, std, imbalance = spread.average
    worst = spread.worst
    texts = (
        name,
        str(layout.slots),
        format_number(mean, ",.1f"),
        format_number(std, ",.1f"),
        format_number(imbalance),
        format_number(float(spread.imbalance[worst]), ".3f"),
        str(comparison.statistics.layers[worst]),
    )
    return _aligned(texts)


def _aligned(texts: tuple[str, ...]) -> str:
    first = f"{texts[0]:<{WIDTHS[0]}}"
    rest = zip(texts[1:], WIDTHS[1:], strict=True)
    return first + "".join(f" {text:>{width - 1}}" for text, width in rest)
