"""The pictures of a run, in the order of the report."""

from equipoise.demo.record import RunRecord
from equipoise.report.canvas import Picture
from equipoise.report.curves import imbalance_curve, step_time_curve
from equipoise.report.heatmaps import expert_heat, rank_heat


def pictures(record: RunRecord) -> tuple[Picture, ...]:
    """Raises PlotsMissing without matplotlib."""
    return (
        rank_heat(record),
        imbalance_curve(record),
        expert_heat(record),
        step_time_curve(record),
    )
