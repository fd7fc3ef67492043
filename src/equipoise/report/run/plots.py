"""Plots of a run, in the order of the report: curves, heat maps, a Gantt chart of a rebalance."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from equipoise.balancer.experts.runtime.events import Track
from equipoise.balancer.observe.trace_buffer import RecordedSpan
from equipoise.demo.run_record import Rebalance, RunRecord, VariantRecord
from equipoise.report import plot_helpers
from equipoise.report.run import metrics
from equipoise.report.run.metrics import Reals
from equipoise.report.run.summary import committed_rebalances, main_variant
from equipoise.report.run.table import ORDER
from equipoise.report.svg import (
    DIVERGING,
    HEAT_MAP_LINES,
    MUTED,
    PHASE_COLOURS,
    SEQUENTIAL,
    TEXT_COLOUR,
    WORK_COLOURS,
    Picture,
    draw,
    variant_colour,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST_SHOWN = 1e-3
"""Imbalance below this is drawn there: the scale is logarithmic."""


def imbalance_curve(record: RunRecord) -> Picture:
    """Every variant's imbalance by step, above the band that chance alone fills."""
    lines = {v.name: metrics.imbalance_by_step(v.rank_rows) for v in _present(record)}
    floors = _floors(record)

    def paint(figure: "Figure") -> None:
        axis = figure.subplots()
        axis.set_yscale("log")
        for name, values in lines.items():
            _line(axis, values, name, record)
        for floor in floors.values():
            _floor_band(axis, floor)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        axis.set_ylabel("max / mean \u2212 1 over ranks")
        _finish(axis, record)
        _label_ends(axis, lines | floors)

    return Picture(
        "Imbalance by step",
        "Mean over layers, logarithmic. The grey band is the sampling noise that would remain if "
        "every rank were equally likely to get every row; only shares that level the batch "
        "itself (local, node, exact) get below it on average. After a switch the old placement is "
        "wrong until new load is seen.",
        draw("imbalance", 3.9, paint),
    )


def step_time_curve(record: RunRecord) -> Picture:
    """Milliseconds per step with and without balancing, with medians and P95 of each phase."""
    main = main_variant(record)
    variants = [v for v in (record.variants.get("unbalanced"), main) if v is not None]
    top = max((float(np.quantile(v.step_seconds, 0.99)) * 1e3 for v in variants), default=1.0)

    def paint(figure: "Figure") -> None:
        axis = figure.subplots()
        for variant in variants:
            millis = variant.step_seconds * 1e3
            middle = np.arange(len(millis)) + 0.5
            colour = variant_colour(variant.name)
            axis.plot(middle, millis, color=colour, linewidth=0.8, alpha=0.35)
            for first, last, median, p95 in phase_times(record, millis):
                axis.hlines(median, first, last, color=colour, linewidth=2.6, zorder=5)
                axis.hlines(p95, first, last, color=colour, linewidth=1.3, zorder=4, linestyle=DOTS)
        axis.set_ylim(0, top * 1.15)
        axis.set_ylabel("milliseconds per step")
        _finish(axis, record)
        _label_ends(axis, {v.name: _last_median(record, v) for v in variants})

    return Picture(
        "Step time",
        f"{_phase_words(record, variants)} Thick: the median of each text; dotted: what one step "
        "in twenty exceeds; thin: every step, wall time of the slowest rank on this machine. Ranks "
        "that share processor cores take turns, so this cannot show what balance gains; what to "
        "look for is whether the marks under the axis, where rebalances took effect, stand out.",
        draw("time", 2.9, paint),
    )


DOTS = (0, (1, 1.5))


def phase_times(record: RunRecord, millis: Reals) -> list[tuple[int, int, float, float]]:
    """Of each phase with steps: first step, one after the last, median and P95."""
    edges = [0, *record.switch_steps, len(millis)]
    return [
        (
            first,
            last,
            float(np.median(millis[first:last])),
            float(np.quantile(millis[first:last], 0.95)),
        )
        for first, last in pairwise(edges)
        if first < last
    ]


def _phase_words(record: RunRecord, variants: Sequence[VariantRecord]) -> str:
    """P50 and P95 over all steps, in words."""
    parts = [
        f"{v.name} {np.median(v.step_seconds) * 1e3:,.0f} ms "
        f"(P95 {np.quantile(v.step_seconds, 0.95) * 1e3:,.0f})"
        for v in variants
    ]
    return f"Median of all steps: {', '.join(parts)}." if parts else ""


def _last_median(record: RunRecord, variant: VariantRecord) -> Reals:
    return np.array([phase_times(record, variant.step_seconds * 1e3)[-1][2]])


def _present(record: RunRecord) -> list[VariantRecord]:
    return [record.variants[name] for name in ORDER if name in record.variants]


def _floors(record: RunRecord) -> dict[str, Reals]:
    """The noise floor by step: the same rows, hence the same floor, for every variant."""
    some = next(iter(record.variants.values()), None)
    return {"noise floor": metrics.noise_floor_by_step(some.rank_rows)} if some else {}


def _line(axis: "Axes", values: Reals, name: str, record: RunRecord) -> None:
    main = name in (record.shares, "unbalanced")
    heights = np.maximum(values, LEAST_SHOWN)
    middle = np.arange(len(heights)) + 0.5
    axis.plot(
        middle, heights, color=variant_colour(name), linewidth=1.9 if main else 1.1, zorder=3 + main
    )


def _floor_band(axis: "Axes", floor: Reals) -> None:
    middle = np.arange(len(floor)) + 0.5
    axis.fill_between(middle, LEAST_SHOWN, floor, color=MUTED, alpha=0.22, linewidth=0)
    axis.set_ylim(bottom=LEAST_SHOWN)


def _finish(axis: "Axes", record: RunRecord) -> None:
    axis.set_xlim(0, record.steps)
    axis.set_xlabel("step")
    axis.grid(axis="y", color=MUTED, alpha=0.25, linewidth=0.6)
    axis.minorticks_off()
    plot_helpers.mark_switches(axis, record, TEXT_COLOUR)
    plot_helpers.label_phases(axis, record)
    plot_helpers.mark_rebalances(axis, main_variant(record))


def _label_ends(axis: "Axes", lines: dict[str, Reals]) -> None:
    """At the mean of the last steps, so that one wild last step does not misplace a name."""
    to_axis = axis.transData + axis.transAxes.inverted()
    ends = {}
    for name, values in lines.items():
        tail = values[~np.isnan(values)][-5:]
        if tail.size:
            height = to_axis.transform((0.0, max(float(tail.mean()), LEAST_SHOWN)))[1]
            ends[name] = (float(height), variant_colour(name))
    plot_helpers.label_line_ends(axis, ends, least_gap=0.075)


PANEL_TITLES = {"unbalanced": "without balancing", "placement": "balanced, the given placement"}

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def rank_heat_map(record: RunRecord) -> Picture:
    """Load / mean of every rank and layer by step, before and after, on one scale."""
    candidates = [record.variants.get("unbalanced"), main_variant(record)]
    panels = [variant for variant in candidates if variant is not None]
    loads = [by_rank_and_layer(variant) for variant in panels]
    top = max((_top(load) for load in loads), default=1.0)

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axis, variant, load in zip(axes, panels, loads, strict=True):
            _rank_panel(axis, record, variant, load, max(top, 1.2))
        plot_helpers.label_phases(axes[0], record)
        axes[0].set_title(axes[0].get_title(loc="left"), pad=19)
        axes[-1].set_xlabel("step")
        plot_helpers.colour_bar(figure, list(axes), "rows of the rank / mean over ranks")

    return Picture(
        "Tokens by rank and step",
        "One band per rank, one line per layer within it. Red waits for nobody and makes the "
        "others wait; blue waits. Vertical lines: the kind of text switches. Small marks under the "
        "axis: a rebalance took effect.",
        draw("ranks", 1.1 + 2.3 * len(panels), paint),
    )


def by_rank_and_layer(variant: VariantRecord) -> Reals:
    """Load / mean as (ranks * layers, steps) float64, all layers of a rank together."""
    load = metrics.relative_load(variant.rank_rows)
    steps, layers, ranks = load.shape
    return load.transpose(2, 1, 0).reshape(ranks * layers, steps)


def expert_heat_map(record: RunRecord) -> Picture:
    """Load / mean of every expert by step, in the layer that is least balanced untouched."""
    layer = least_balanced_layer(record)
    relative = metrics.relative_load(record.expert_rows[:, layer]).T
    order = experts_by_busiest_phase(record, relative)

    def paint(figure: "Figure") -> None:
        axis = figure.subplots()
        axis.imshow(
            relative[order],
            aspect="auto",
            interpolation="nearest",
            cmap=plot_helpers.colour_map(SEQUENTIAL),
            vmin=0.0,
            vmax=max(1.0, _top(relative)),
            extent=(0, record.steps, len(order), 0),
        )
        axis.set_yticks(np.arange(len(order)) + 0.5, [str(e) for e in order], fontsize=7)
        axis.set_ylabel("expert")
        axis.set_xlabel("step")
        plot_helpers.mark_switches(axis, record, HEAT_MAP_LINES)
        plot_helpers.label_phases(axis, record)
        plot_helpers.hide_spines(axis)
        plot_helpers.colour_bar(figure, [axis], "rows of the expert / mean over experts")

    return Picture(
        "Tokens by expert and step",
        f"Layer {layer}; experts sorted by the text that likes them best. The router's taste "
        "changes with the text: that is why yesterday's placement does not fit today.",
        draw("experts", 4.6, paint),
    )


def least_balanced_layer(record: RunRecord) -> int:
    """The layer with the largest imbalance untouched, or 0 where nothing was served untouched."""
    unbalanced = record.variants.get("unbalanced")
    if unbalanced is None:
        return 0
    excess = np.nan_to_num(metrics.relative_load(unbalanced.rank_rows).max(axis=-1) - 1.0)
    return int(excess.mean(axis=0).argmax())


def experts_by_busiest_phase(record: RunRecord, relative: Reals) -> list[int]:
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
    cells = load[~np.isnan(load)]
    return float(np.percentile(cells, 99.5)) if cells.size else 1.0


def _rank_panel(
    axis: "Axes", record: RunRecord, variant: VariantRecord, load: Reals, top: float
) -> None:
    from matplotlib.colors import TwoSlopeNorm

    axis.imshow(
        load,
        aspect="auto",
        interpolation="nearest",
        cmap=plot_helpers.colour_map(DIVERGING),
        norm=TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=top),
        extent=(0, record.steps, len(load), 0),
    )
    middle = (np.arange(record.ranks) + 0.5) * record.layers
    axis.set_yticks(middle, [f"rank {rank}" for rank in range(record.ranks)])
    for rank in range(1, record.ranks):
        axis.axhline(rank * record.layers, color="white", linewidth=1.6)
    plot_helpers.mark_switches(axis, record, HEAT_MAP_LINES)
    plot_helpers.hide_spines(axis)
    plot_helpers.mark_rebalances(axis, variant)
    axis.set_title(PANEL_TITLES.get(variant.name, f"balanced, {variant.name} shares"), pad=6)


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_RANKS = 8
"""Ranks that are drawn: more would be a carpet."""
LANES = (Track.REBALANCE, Track.COMPUTE, Track.TRANSFER, Track.COPY, Track.PLANNER, Track.VOTE)
LANE_NAMES = {
    Track.REBALANCE: "phase",
    Track.COMPUTE: "steps",
    Track.TRANSFER: "transfer",
    Track.COPY: "rounds",
}
SPAN_KEY = str(Track.REBALANCE)
"""Detail that holds the number of a rebalance, and how the name of its span begins: the recorder of
the engine calls both as it calls the track."""
MARGIN = 0.06
"""Of the rebalance's length, shown before and after it."""
SHORTEST = 0.0015
"""Of the width: shorter work is drawn so long, to be seen at all."""


@dataclass(frozen=True)
class RebalanceExtent:
    """Wall-clock seconds from which to which the picture goes, and the rebalance within."""

    begin: float
    end: float
    first: float
    last: float


def rebalance_gantt(record: RunRecord) -> Picture | None:
    """The committed rebalance that moved most; None where nothing was moved under observation."""
    rebalance = largest_rebalance(record)
    extent = None if rebalance is None else rebalance_extent(rebalance, record.spans)
    if rebalance is None or extent is None:
        return None
    ranks = sorted({span.rank for span in record.spans})[:MAX_RANKS]

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(len(ranks), 1, sharex=True, squeeze=False)[:, 0]
        for axis, rank in zip(axes, ranks, strict=True):
            _rank(axis, rank, _within(record.spans, rank, extent), extent)
        _legend(axes[0], {span.name for span in record.spans if span.track == Track.REBALANCE})
        axes[-1].set_xlabel("milliseconds since the rebalance was opened")

    return Picture(
        f"Rebalance {rebalance.number}, rank by rank",
        f"Opened before step {rebalance.opened_at}, installed before step {rebalance.step}: "
        f"{rebalance.copies} copies. The steps of the model go on above the work that is done "
        "beside them: a plan, votes, and rounds in which weights travel. A phase changes only "
        "between two steps. As the host sees it; ranks that share processor cores take turns.",
        draw("gantt", 0.9 + 1.25 * len(ranks), paint),
    )


def largest_rebalance(record: RunRecord) -> Rebalance | None:
    """The committed rebalance with most copies, the first of several; none without a copy."""
    main = main_variant(record)
    rebalances = (
        [rebalance for rebalance in committed_rebalances(main) if rebalance.copies] if main else []
    )
    return max(rebalances, key=lambda rebalance: rebalance.copies, default=None)


def rebalance_extent(rebalance: Rebalance, spans: Sequence[RecordedSpan]) -> RebalanceExtent | None:
    """When it was, over all ranks; None where its spans were not kept."""
    own = [
        span
        for span in spans
        if span.track == Track.REBALANCE and span.details.get(SPAN_KEY) == rebalance.number
    ]
    if not own:
        return None
    first, last = min(span.begin for span in own), max(span.end for span in own)
    margin = (last - first) * MARGIN
    return RebalanceExtent(first - margin, last + margin, first, last)


def _within(
    spans: Sequence[RecordedSpan], rank: int, extent: RebalanceExtent
) -> list[RecordedSpan]:
    """Of one rank, cut to the extent."""
    return [
        span
        for span in spans
        if span.rank == rank and span.end > extent.begin and span.begin < extent.end
    ]


def _rank(axis: "Axes", rank: int, spans: Sequence[RecordedSpan], extent: RebalanceExtent) -> None:
    for lane, track in enumerate(LANES):
        for span in spans:
            if span.track == track and not span.name.startswith(SPAN_KEY):
                _bar(axis, lane, span, extent)
    axis.set_ylim(len(LANES) - 0.4, -0.6)
    axis.set_yticks(range(len(LANES)), [LANE_NAMES.get(track, str(track)) for track in LANES])
    axis.tick_params(axis="y", length=0, labelsize=7.5)
    axis.set_xlim((extent.begin - extent.first) * 1e3, (extent.end - extent.first) * 1e3)
    axis.set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center", labelpad=26)
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x", color=MUTED, alpha=0.2, linewidth=0.6)
    axis.set_axisbelow(True)
    for edge in (0.0, (extent.last - extent.first) * 1e3):
        axis.axvline(edge, color=TEXT_COLOUR, linewidth=0.9, linestyle=(0, (4, 3)))


def _bar(axis: "Axes", lane: int, span: RecordedSpan, extent: RebalanceExtent) -> None:
    begin, end = max(span.begin, extent.begin), min(span.end, extent.end)
    width = max(end - begin, (extent.end - extent.begin) * SHORTEST)
    axis.barh(
        lane,
        width * 1e3,
        left=(begin - extent.first) * 1e3,
        height=0.78,
        color=_colour(span),
        linewidth=0,
    )


def _colour(span: RecordedSpan) -> str:
    return (PHASE_COLOURS if span.track == Track.REBALANCE else WORK_COLOURS).get(
        span.name if span.track == Track.REBALANCE else span.track, MUTED
    )


def _legend(axis: "Axes", present: set[str]) -> None:
    """The colours of the phases; every other lane has one colour and its name next to it."""
    from matplotlib.patches import Patch

    names = [name for name in PHASE_COLOURS if name in present]
    axis.legend(
        handles=[Patch(color=PHASE_COLOURS[name], label=name) for name in names],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(names),
        frameon=False,
        fontsize=8.5,
        handlelength=1.0,
        columnspacing=1.4,
    )


def pictures(record: RunRecord) -> tuple[Picture, ...]:
    """Raises PlotsMissing without matplotlib."""
    gantt = rebalance_gantt(record)
    return (
        rank_heat_map(record),
        imbalance_curve(record),
        expert_heat_map(record),
        step_time_curve(record),
        *([] if gantt is None else [gantt]),
    )
