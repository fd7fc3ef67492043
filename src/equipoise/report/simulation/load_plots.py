"""Plots of worker load: step by step for each policy, and a few steps as a Gantt chart.

The chart shows who reads and who waits at the barrier of a step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from equipoise.balancer.requests.cluster import Cluster
from equipoise.balancer.requests.policy_comparison import PolicyResult
from equipoise.balancer.requests.simulation_run import FloatArray
from equipoise.report import plot_helpers
from equipoise.report.simulation.plot_style import PolicyStyle, add_grid
from equipoise.report.simulation.result import (
    EXCERPT_STEPS,
    LoadCurves,
    SimulationResult,
    StepExcerpt,
)
from equipoise.report.svg import MUTED, SEQUENTIAL, TEXT_COLOUR, Picture, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3
MAX_PANELS = 6
"""More would be small, and a large page."""
DASHES = (0, (4, 3))
MAX_DRAWN = 48
"""Lines of all panels as such; more are images, which do not grow with their number."""


def worker_load_plot(comparison: SimulationResult) -> Picture | None:
    """None where no worker served anything."""
    results = _shown(comparison)
    if not results:
        return None
    fewer = len(results) < len(comparison.plot_data)
    down = -(-len(results) // ACROSS)
    style = PolicyStyle.of(comparison)
    lines = [comparison.plot_data[result.named_policy.label].lines for result in results]

    raster = sum(one.loads.shape[1] for one in lines) > MAX_DRAWN

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(down, ACROSS, sharex=True, sharey=True, squeeze=False)
        for place, axis in enumerate(axes.flat):
            if place < len(results):
                _load_panel(axis, style, results[place], lines[place], raster)
            else:
                axis.set_axis_off()
        axes[0, 0].set_ylim(*_extent(lines))
        last = max(int(one.steps[-1]) for one in lines)
        axes[0, 0].set_xlim(0, last + 1)
        axes[0, 0].locator_params(axis="x", nbins=5)
        _load_legend(figure, any(one.first_measured_step <= last for one in lines))
        figure.supylabel("KV tokens of a worker, thousands", fontsize=10)
        figure.supxlabel("step", fontsize=10)

    return Picture(
        "Load of every worker",
        "One line for each worker, first seed, all on one scale, which may not begin at 0. A step "
        "takes as long as the fullest worker says; what the others are below it, they wait."
        f"{' The policies in colour, and the two that idle most.' if fewer else ''}",
        draw("loads", 1.0 + 1.5 * down, paint),
    )


def _shown(comparison: SimulationResult) -> list[PolicyResult]:
    """All that served anything; of many those in colour, and the two that idle most."""
    results = [r for r in comparison.results if r.named_policy.label in comparison.plot_data]
    if len(results) <= MAX_PANELS:
        return results
    colours = PolicyStyle.of(comparison).colours
    idle = sorted(results, key=lambda result: -result.interval("idle").mean)
    picks = {r.named_policy.label for r in idle[: MAX_PANELS - len(colours)]} | set(colours)
    return [result for result in results if result.named_policy.label in picks]


def _load_panel(
    axis: "Axes", style: PolicyStyle, result: PolicyResult, lines: LoadCurves, raster: bool
) -> None:
    steps, loads = lines.steps, lines.loads
    tones = plot_helpers.colour_map(SEQUENTIAL)(np.linspace(0.3, 0.75, loads.shape[1]))
    for worker, tone in enumerate(tones):
        axis.plot(
            steps, loads[:, worker] / 1e3, color=tone, linewidth=0.8, alpha=0.8, rasterized=raster
        )
    axis.plot(steps, loads.max(axis=1) / 1e3, color=TEXT_COLOUR, linewidth=0.9)
    if lines.first_measured_step <= steps[-1]:
        axis.axvline(lines.first_measured_step, color=MUTED, linewidth=0.9, linestyle=DASHES)
    label, idle = result.named_policy.label, result.interval("idle").mean
    axis.set_title(f"{label}, {idle:.1%} idle", color=style.colour(label), fontsize=9.5, pad=4)
    add_grid(axis)


def _extent(lines: Sequence[LoadCurves]) -> tuple[float, float]:
    """From somewhat below the lowest load, once workers have filled, to above the highest."""
    filled = [one.loads[len(one.loads) // 10 :] for one in lines]
    low, high = min(int(one.min()) for one in filled), max(int(one.max()) for one in filled)
    room = max(high - low, 1)
    return max(0.0, low - 0.25 * room) / 1e3, (high + 0.05 * room) / 1e3


def _load_legend(figure: "Figure", dashed: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=TEXT_COLOUR, linewidth=1.4, label="the fullest worker"),
        Line2D(
            [],
            [],
            color=plot_helpers.colour_map(SEQUENTIAL)(0.5),
            linewidth=1.4,
            label="the others",
        ),
    ]
    if dashed:
        words = "figures are taken from here on"
        handles.append(Line2D([], [], color=MUTED, linestyle=DASHES, label=words))
    figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False, fontsize=9)


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_WORKERS = 12
"""That are drawn: more would be a carpet."""
READING, WAITING, FIXED = "#82aedb", "#d9604a", "#c9c4b8"


@dataclass(frozen=True)
class StepTimes:
    """Consecutive steps; seconds from the first, k steps, g workers.

    Attributes:
        begins: of each step, [k].
        reading: of each worker, [k, g].
        barrier: until the fullest worker has read, [k].
        seconds: of each step, [k].
    """

    begins: FloatArray
    reading: FloatArray
    barrier: FloatArray
    seconds: FloatArray


def step_times(excerpt: StepExcerpt, cluster: Cluster) -> StepTimes:
    """From tokens to seconds."""
    rate = cluster.step.per_token
    return StepTimes(
        excerpt.clock - excerpt.clock[0],
        np.asarray(excerpt.loads * rate, dtype=np.float64),
        excerpt.largest * rate,
        excerpt.seconds,
    )


def barrier_gantt(comparison: SimulationResult) -> Picture | None:
    """The routers with most and with least idle time, and the default; None without any."""
    results = _telling(comparison)
    if not results:
        return None
    cluster, style = comparison.subject.cluster, PolicyStyle.of(comparison)
    workers = min(cluster.workers, MAX_WORKERS)

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
        for axis, result in zip(axes, results, strict=True):
            excerpt = comparison.plot_data[result.named_policy.label].excerpt
            _barrier_panel(axis, style, result, step_times(excerpt, cluster), workers)
        _barrier_legend(figure)
        axes[-1].set_xlabel("milliseconds")

    more = "" if workers == cluster.workers else f" The first {workers} workers."
    return Picture(
        f"{EXCERPT_STEPS} steps, worker by worker",
        "Every worker reads the KV of its requests, then waits at the barrier for the fullest one; "
        "the rest of the step is the same for all. Most idle, least idle, and the default, on one "
        f"scale; steps as idle as the run is, first seed.{more}{_caveat(cluster)}",
        draw("barrier", 0.8 + len(results) * (0.45 + 0.17 * workers), paint),
    )


def _caveat(cluster: Cluster) -> str:
    if cluster.prefill is None and not cluster.step.noise:
        return ""
    return " Prompts that are computed, and noise, count as waiting here: only loads were kept."


def _telling(simulation: SimulationResult) -> list[PolicyResult]:
    """At most three, by falling idle time."""
    results = [r for r in simulation.results if r.named_policy.label in simulation.plot_data]
    ranked = sorted(results, key=lambda result: -result.interval("idle").mean)
    picks = [*ranked[:1], *(r for r in ranked if r is simulation.reference), *ranked[-1:]]
    return [r for r in ranked if any(r is one for one in picks)]


def _barrier_panel(
    axis: "Axes", style: PolicyStyle, result: PolicyResult, step_times: StepTimes, workers: int
) -> None:
    for left, width, row, colour in _boxes(step_times, workers):
        axis.barh(row, width * 1e3, left=left * 1e3, height=0.8, color=colour, linewidth=0)
    for begin in step_times.begins[1:]:
        axis.axvline(begin * 1e3, color=MUTED, linewidth=0.5, alpha=0.7)
    axis.set_ylim(workers - 0.4, -0.6)
    axis.set_yticks(range(workers), [str(worker) for worker in range(workers)], fontsize=7.5)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.set_xlim(left=0)
    label, idle = result.named_policy.label, result.interval("idle").mean
    axis.set_title(f"{label}, {idle:.1%} idle", color=style.colour(label), pad=4)
    axis.set_ylabel("worker")


def _boxes(
    step_times: StepTimes, workers: int
) -> Iterator[tuple[FloatArray, FloatArray, int, str]]:
    """Left edges and widths of all steps [k], row and colour."""
    for row in range(workers):
        reading = step_times.reading[:, row]
        yield step_times.begins, reading, row, READING
        yield step_times.begins + reading, np.maximum(step_times.barrier - reading, 0), row, WAITING
        yield (
            step_times.begins + step_times.barrier,
            np.maximum(step_times.seconds - step_times.barrier, 0),
            row,
            FIXED,
        )


def _barrier_legend(figure: "Figure") -> None:
    from matplotlib.patches import Patch

    names = {"reads KV": READING, "waits at the barrier": WAITING, "rest of the step": FIXED}
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in names.items()],
        loc="outside lower right",
        ncols=3,
        frameon=False,
        fontsize=9,
        handlelength=1.0,
    )
