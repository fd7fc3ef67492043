"""The heat maps of a run: who was busy when."""

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from equipoise.demo.record import RunRecord, VariantRecord
from equipoise.report import marks, metrics
from equipoise.report.canvas import Picture, draw
from equipoise.report.metrics import Reals
from equipoise.report.palette import DIVERGING, ON_HEAT, SEQUENTIAL
from equipoise.report.summary import main_variant

TITLES = {"unbalanced": "without balancing", "placement": "balanced, the given placement"}

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def rank_heat(record: RunRecord) -> Picture:
    """Load / mean of every rank and layer by step, before and after, on one scale."""
    shown = [record.variants.get("unbalanced"), main_variant(record)]
    panels = [variant for variant in shown if variant is not None]
    loads = [by_rank_and_layer(variant) for variant in panels]
    top = max((_top(load) for load in loads), default=1.0)

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axis, variant, load in zip(axes, panels, loads, strict=True):
            _rank_panel(axis, record, variant, load, max(top, 1.2))
        marks.phase_names(axes[0], record)
        axes[0].set_title(axes[0].get_title(loc="left"), pad=19)
        axes[-1].set_xlabel("step")
        marks.scale(figure, list(axes), "rows of the rank / mean over ranks")

    return Picture(
        "Tokens by rank and step",
        "One band per rank, one line per layer within it. Red waits for nobody and makes the "
        "others wait; blue waits. Vertical lines: the kind of text switches. Small marks under the "
        "axis: an epoch took effect.",
        draw("ranks", 1.1 + 2.3 * len(panels), paint),
    )


def by_rank_and_layer(variant: VariantRecord) -> Reals:
    """Load / mean as (ranks * layers, steps) float64, all layers of a rank together."""
    load = metrics.relative_load(variant.rank_rows)
    steps, layers, ranks = load.shape
    return load.transpose(2, 1, 0).reshape(ranks * layers, steps)


def expert_heat(record: RunRecord) -> Picture:
    """Load / mean of every expert by step, in the layer that is least balanced untouched."""
    layer = telling_layer(record)
    relative = metrics.relative_load(record.expert_rows[:, layer]).T
    order = by_favourite_phase(record, relative)

    def paint(figure: "Figure") -> None:
        axis = figure.subplots()
        axis.imshow(
            relative[order],
            aspect="auto",
            interpolation="nearest",
            cmap=marks.colours(SEQUENTIAL),
            vmin=0.0,
            vmax=max(1.0, _top(relative)),
            extent=(0, record.steps, len(order), 0),
        )
        axis.set_yticks(np.arange(len(order)) + 0.5, [str(e) for e in order], fontsize=7)
        axis.set_ylabel("expert")
        axis.set_xlabel("step")
        marks.switches(axis, record, ON_HEAT)
        marks.phase_names(axis, record)
        marks.frameless(axis)
        marks.scale(figure, [axis], "rows of the expert / mean over experts")

    return Picture(
        "Tokens by expert and step",
        f"Layer {layer}; experts sorted by the text that likes them best. The router's taste "
        "changes with the text: that is why yesterday's placement does not fit today.",
        draw("experts", 4.6, paint),
    )


def telling_layer(record: RunRecord) -> int:
    """The layer with the largest imbalance untouched, or 0 where nothing was served untouched."""
    unbalanced = record.variants.get("unbalanced")
    if unbalanced is None:
        return 0
    excess = np.nan_to_num(metrics.relative_load(unbalanced.rank_rows).max(axis=-1) - 1.0)
    return int(excess.mean(axis=0).argmax())


def by_favourite_phase(record: RunRecord, relative: Reals) -> list[int]:
    """Expert ids by the phase in which each is busiest, busiest first within a phase.

    `relative`: load / mean, (experts, steps) float64.
    """
    edges = [0, *record.switch_steps, record.steps]
    spans = [slice(a, b) for a, b in pairwise(edges) if a < b]
    means = np.stack([np.nan_to_num(relative[:, span]).mean(axis=1) for span in spans])
    favourite = means.argmax(axis=0)
    return [int(e) for e in np.lexsort((-means.max(axis=0), favourite))]


def _top(load: Reals) -> float:
    """Where the scale ends: a few wild cells of the ramp at the start would wash out all others."""
    known = load[~np.isnan(load)]
    return float(np.percentile(known, 99.5)) if known.size else 1.0


def _rank_panel(
    axis: "Axes", record: RunRecord, variant: VariantRecord, load: Reals, top: float
) -> None:
    from matplotlib.colors import TwoSlopeNorm

    axis.imshow(
        load,
        aspect="auto",
        interpolation="nearest",
        cmap=marks.colours(DIVERGING),
        norm=TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=top),
        extent=(0, record.steps, len(load), 0),
    )
    middle = (np.arange(record.ranks) + 0.5) * record.layers
    axis.set_yticks(middle, [f"rank {rank}" for rank in range(record.ranks)])
    for rank in range(1, record.ranks):
        axis.axhline(rank * record.layers, color="white", linewidth=1.6)
    marks.switches(axis, record, ON_HEAT)
    marks.frameless(axis)
    marks.epochs(axis, variant)
    axis.set_title(TITLES.get(variant.name, f"balanced, {variant.name} shares"), pad=6)
