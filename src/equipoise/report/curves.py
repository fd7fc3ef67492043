"""The curves of a run: imbalance and step time by step."""

from typing import TYPE_CHECKING

import numpy as np

from equipoise.demo.record import RunRecord, VariantRecord
from equipoise.report import marks, metrics
from equipoise.report.canvas import Picture, draw
from equipoise.report.metrics import Reals
from equipoise.report.palette import INK, MUTED, of_variant
from equipoise.report.summary import main_variant
from equipoise.report.table import ORDER

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
        "every rank were equally likely to get every row; only shares solved on the batch's own "
        "counts (exact) get below it on average. After a switch the old placement is wrong "
        "until new load is seen.",
        draw("imbalance", 3.9, paint),
    )


def step_time_curve(record: RunRecord) -> Picture:
    """Milliseconds per step with and without balancing, as measured."""
    main = main_variant(record)
    drawn = [v for v in (record.variants.get("unbalanced"), main) if v is not None]

    def paint(figure: "Figure") -> None:
        axis = figure.subplots()
        for variant in drawn:
            _line(axis, variant.step_seconds * 1e3, variant.name, record)
        axis.set_ylim(bottom=0)
        axis.set_ylabel("milliseconds per step")
        _finish(axis, record)
        _label_ends(axis, {v.name: v.step_seconds * 1e3 for v in drawn})

    return Picture(
        "Step time",
        "Wall time of the slowest rank, as measured on this machine. Ranks that share processor "
        "cores take turns, so balance itself saves them no time here; what to look for is whether "
        "the marks under the axis, where epochs took effect, stand out.",
        draw("time", 2.9, paint),
    )


def _present(record: RunRecord) -> list[VariantRecord]:
    return [record.variants[name] for name in ORDER if name in record.variants]


def _floors(record: RunRecord) -> dict[str, Reals]:
    """The noise floor by step: the same rows, hence the same floor, for every variant."""
    some = next(iter(record.variants.values()), None)
    return {"noise floor": metrics.floor_by_step(some.rank_rows)} if some else {}


def _line(axis: "Axes", values: Reals, name: str, record: RunRecord) -> None:
    main = name in (record.shares, "unbalanced")
    shown = np.maximum(values, LEAST_SHOWN)
    middle = np.arange(len(shown)) + 0.5
    axis.plot(
        middle, shown, color=of_variant(name), linewidth=1.9 if main else 1.1, zorder=3 + main
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
    marks.switches(axis, record, INK)
    marks.phase_names(axis, record)
    marks.epochs(axis, main_variant(record))


def _label_ends(axis: "Axes", lines: dict[str, Reals]) -> None:
    """At the mean of the last steps, so that one wild last step does not misplace a name."""
    to_axis = axis.transData + axis.transAxes.inverted()
    ends = {}
    for name, values in lines.items():
        tail = values[~np.isnan(values)][-5:]
        if tail.size:
            height = to_axis.transform((0.0, max(float(tail.mean()), LEAST_SHOWN)))[1]
            ends[name] = (float(height), of_variant(name))
    marks.end_labels(axis, ends, least_gap=0.075)
