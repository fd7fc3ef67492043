"""The pictures of a run, in the order of the report."""

from equipoise.demo.record import RunRecord
from equipoise.report.canvas import Picture
from equipoise.report.curves import imbalance_curve, step_time_curve
from equipoise.report.gantt import epoch_gantt
from equipoise.report.heatmaps import expert_heat, rank_heat


def pictures(record: RunRecord) -> tuple[Picture, ...]:
    """Raises PlotsMissing without matplotlib."""
    gantt = epoch_gantt(record)
    return (
        rank_heat(record),
        imbalance_curve(record),
        expert_heat(record),
        step_time_curve(record),
        *([] if gantt is None else [gantt]),
    )
