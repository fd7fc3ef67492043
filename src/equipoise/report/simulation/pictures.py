"""The pictures of a simulation, in the order of the report."""

from equipoise.report.canvas import Picture
from equipoise.report.simulation.barrier import barrier_gantt
from equipoise.report.simulation.bars import idle_bars
from equipoise.report.simulation.curves import balance_curve, wait_by_size
from equipoise.report.simulation.loads import load_lines
from equipoise.report.simulation.simulated import Simulated
from equipoise.report.simulation.sweeps import sweep_pictures


def pictures(found: Simulated) -> tuple[Picture, ...]:
    """Raises PlotsMissing without matplotlib."""
    drawn = (
        idle_bars(found),
        barrier_gantt(found),
        load_lines(found),
        balance_curve(found),
        wait_by_size(found),
        *(() if found.sweep is None else sweep_pictures(found.sweep)),
    )
    return tuple(picture for picture in drawn if picture is not None)
