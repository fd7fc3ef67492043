"""How much each router leaves idle at the barrier, and how near throughput is to its bound."""

from typing import TYPE_CHECKING

from equipoise.balancer.requests.comparison import Result
from equipoise.report.canvas import Picture, draw
from equipoise.report.palette import INK, MUTED
from equipoise.report.simulation.shades import gridded, of_policy
from equipoise.report.simulation.simulated import Simulated

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def idle_bars(found: Simulated) -> Picture:
    """Idle on the left, tokens a second and their bound on the right."""
    results = [r for r in found.results if r.interval("idle").mean == r.interval("idle").mean]

    def paint(figure: "Figure") -> None:
        idle, tokens = figure.subplots(1, 2, sharey=True)
        _idle(idle, results)
        _tokens(tokens, results)
        idle.set_yticks(range(len(results)), [r.contender.label for r in results])
        idle.set_ylim(len(results) - 0.4, -0.6)
        for axis in (idle, tokens):
            axis.tick_params(axis="y", length=0)
            axis.spines["left"].set_visible(False)

    return Picture(
        "Idle at the barrier, and tokens a second",
        "Left: the part of the time for reading KV that workers wait for the fullest one. Right: "
        "tokens made a second, the dot, and their bound, the upright bar: the same steps with "
        "their work spread evenly. Thin lines are 95 % confidence intervals over seeds.",
        draw("idle", 0.9 + 0.29 * max(len(results), 3), paint),
    )


def _idle(axis: "Axes", results: list[Result]) -> None:
    values = [result.interval("idle") for result in results]
    colours = [of_policy(result.contender.label) for result in results]
    means = [value.mean * 100 for value in values]
    axis.barh(range(len(results)), means, color=colours, height=0.68, linewidth=0)
    ends = []
    for row, value in enumerate(values):
        half = 0.0 if value.half != value.half else value.half * 100
        axis.plot([means[row] - half, means[row] + half], [row, row], color=INK, linewidth=1.0)
        ends.append(means[row] + half)
    for row, end in enumerate(ends):
        axis.annotate(
            f"{means[row]:.1f}", (end, row), xytext=(5, 0), textcoords="offset points",
            va="center", fontsize=9,
        )  # fmt: skip
    axis.set_xlim(0, max([*ends, 1e-3]) * 1.14)
    axis.set_xlabel("idle, % of the time for reading")
    gridded(axis)
    axis.grid(axis="y", visible=False)


def _tokens(axis: "Axes", results: list[Result]) -> None:
    for row, result in enumerate(results):
        made, bound = result.interval("throughput"), result.interval("bound").mean
        colour = of_policy(result.contender.label)
        axis.plot([made.mean, bound], [row, row], color=MUTED, linewidth=1.0, alpha=0.6, zorder=2)
        axis.plot(bound, row, marker="|", markersize=11, color=INK, markeredgewidth=1.6, zorder=3)
        axis.plot(made.mean, row, marker="o", markersize=6.5, color=colour, zorder=4)
        if made.half == made.half:
            axis.plot([made.low, made.high], [row, row], color=colour, linewidth=1.6, zorder=3)
    axis.set_xlabel("tokens/s, and their bound")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.locator_params(axis="x", nbins=6)
    gridded(axis)
    axis.grid(axis="y", alpha=0.12)
