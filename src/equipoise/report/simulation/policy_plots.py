"""Plots that compare policies: idle time, throughput, balance, waits, sweeps."""

from math import log
from typing import TYPE_CHECKING

import numpy as np

from equipoise.balancer.requests.policy_comparison import PolicyResult
from equipoise.report.simulation.plot_style import PolicyStyle, add_grid
from equipoise.report.simulation.result import QUANTILES, SimulationResult, Sweep
from equipoise.report.svg import MUTED, TEXT_COLOUR, Picture, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def idle_bars(comparison: SimulationResult) -> Picture:
    """Idle on the left, tokens a second and their bound on the right."""
    results = [r for r in comparison.results if r.interval("idle").mean == r.interval("idle").mean]
    style = PolicyStyle.of(comparison)

    def paint(figure: "Figure") -> None:
        idle, tokens = figure.subplots(1, 2, sharey=True)
        _idle(idle, results, style)
        _tokens(tokens, results, style)
        idle.set_yticks(range(len(results)), [r.named_policy.label for r in results])
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


def _idle(axis: "Axes", results: list[PolicyResult], style: PolicyStyle) -> None:
    values = [result.interval("idle") for result in results]
    colours = [style.colour(result.named_policy.label) for result in results]
    means = [value.mean * 100 for value in values]
    axis.barh(range(len(results)), means, color=colours, height=0.68, linewidth=0)
    ends = []
    for row, value in enumerate(values):
        half = 0.0 if value.half != value.half else value.half * 100
        axis.plot(
            [means[row] - half, means[row] + half], [row, row], color=TEXT_COLOUR, linewidth=1.0
        )
        ends.append(means[row] + half)
    for row, end in enumerate(ends):
        axis.annotate(
            f"{means[row]:.1f}", (end, row), xytext=(5, 0), textcoords="offset points",
            va="center", fontsize=9,
        )  # fmt: skip
    axis.set_xlim(0, max([*ends, 1e-3]) * 1.14)
    axis.set_xlabel("idle, % of the time for reading")
    add_grid(axis)
    axis.grid(axis="y", visible=False)


def _tokens(axis: "Axes", results: list[PolicyResult], style: PolicyStyle) -> None:
    for row, result in enumerate(results):
        throughput, bound = result.interval("throughput"), result.interval("bound").mean
        colour = style.colour(result.named_policy.label)
        axis.plot(
            [throughput.mean, bound], [row, row], color=MUTED, linewidth=1.0, alpha=0.6, zorder=2
        )
        axis.plot(
            bound, row, marker="|", markersize=11, color=TEXT_COLOUR, markeredgewidth=1.6, zorder=3
        )
        axis.plot(throughput.mean, row, marker="o", markersize=6.5, color=colour, zorder=4)
        if throughput.half == throughput.half:
            axis.plot(
                [throughput.low, throughput.high], [row, row], color=colour, linewidth=1.6, zorder=3
            )
    axis.set_xlabel("tokens/s, and their bound")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.locator_params(axis="x", nbins=6)
    add_grid(axis)
    axis.grid(axis="y", alpha=0.12)


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST_SHOWN = 0.99
"""The axis begins there or below."""
SEEN = 0.01
"""Quantile of the most uneven router at which the axis begins."""


def balance_curve(comparison: SimulationResult) -> Picture | None:
    """Distribution of mean / largest work over steps; None where no worker served anything."""
    if not comparison.plot_data:
        return None
    style = PolicyStyle.of(comparison)

    def paint(figure: "Figure") -> None:
        axis = figure.subplots()
        for label, plot_data in comparison.plot_data.items():
            _policy_curve(axis, style, label, plot_data.balance, QUANTILES)
        least = min(
            float(np.interp(SEEN, QUANTILES, s.balance)) for s in comparison.plot_data.values()
        )
        axis.set_xlim(min(least, LEAST_SHOWN), 1.0)
        axis.set_ylim(0, 1)
        axis.set_xlabel("balance ratio of a step: mean / largest work of the workers")
        axis.set_ylabel("part of the steps below")
        add_grid(axis)
        medians = {
            n: float(np.interp(0.5, QUANTILES, s.balance)) for n, s in comparison.plot_data.items()
        }
        ranked = sorted(medians, key=lambda label: medians[label])
        style.label_beside(axis, [(label, f"{medians[label]:.3f}") for label in ranked])

    return Picture(
        "How balanced steps are",
        "Cumulative distribution over steps, mean over seeds; further right is better, 1 is "
        "perfect. Beside it the medians, from worst to best.",
        draw("balance", 3.9, paint),
    )


def wait_by_prompt(comparison: SimulationResult) -> Picture | None:
    """Mean wait of ten classes of requests by prompt; None where no worker served anything."""
    if not comparison.plot_data:
        return None
    style = PolicyStyle.of(comparison)

    def paint(figure: "Figure") -> None:
        axis = figure.subplots()
        for label, plot_data in comparison.plot_data.items():
            _policy_curve(
                axis,
                style,
                label,
                np.arange(len(plot_data.waits)),
                plot_data.waits,
                marker="o",
                markersize=3,
            )
        sizes = next(iter(comparison.plot_data.values())).sizes
        axis.set_xticks(range(len(sizes)), [f"{size:,.0f}" for size in sizes])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("mean prompt of each tenth of the requests, tokens")
        axis.set_ylabel("mean wait for a slot, s")
        add_grid(axis)
        style.label_beside(axis, _by_fairness(comparison))

    return Picture(
        "Who waits: small requests or large ones",
        "Requests in ten classes of as many by prompt length. A level line is fair; a router that "
        "picks what fits lets those wait that seldom fit. Mean over seeds; beside it fairness, "
        "Jain's index of the ten.",
        draw("waits", 4.0, paint),
    )


def _policy_curve(
    axis: "Axes", style: PolicyStyle, label: str, across: object, up: object, **look: object
) -> None:
    axis.plot(
        across,  # type: ignore[arg-type]
        up,  # type: ignore[arg-type]
        color=style.colour(label),
        linewidth=style.line_width(label),
        zorder=style.z_order(label),
        **look,  # type: ignore[arg-type]
    )


def _by_fairness(simulation: SimulationResult) -> list[tuple[str, str]]:
    """Those drawn, fairest first."""
    values = {r.named_policy.label: r.interval("fairness").mean for r in simulation.results}
    ranked = sorted(simulation.plot_data, key=lambda label: -values[label])
    return [(label, f"{values[label]:.3f}") for label in ranked]


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BASELINE = "round_robin"
"""Stands for first come, first served: the theorem's baseline."""
DASHES = (0, (4, 3))


def sweep_pictures(sweep: Sweep, style: PolicyStyle) -> tuple[Picture, ...]:
    """One of them. Raises PlotsMissing without matplotlib."""
    return (_by_load(sweep, style) if sweep.over == "load" else _by_workers(sweep, style),)


def means(sweep: Sweep, label: str, figure: str) -> list[float]:
    """Of one router, at every point."""
    return [
        result.interval(figure).mean
        for point in sweep.points
        for result in point.results
        if result.named_policy.label == label
    ]


def labels_of(sweep: Sweep) -> tuple[str, ...]:
    """Of the routers."""
    return tuple(result.named_policy.label for result in sweep.points[0].results)


def _by_load(sweep: Sweep, style: PolicyStyle) -> Picture:
    loads = [point.value for point in sweep.points]

    def paint(figure: "Figure") -> None:
        idle, pace, wait = figure.subplots(1, 3)
        for label in labels_of(sweep):
            tokens = [value / 1e3 for value in means(sweep, label, "throughput")]
            _sweep_curve(idle, style, label, loads, _times(means(sweep, label, "idle"), 100))
            _sweep_curve(pace, style, label, tokens, _times(means(sweep, label, "tpot_p95"), 1e3))
            _sweep_curve(wait, style, label, tokens, means(sweep, label, "ttft_p99"))
        _axes(idle, "load, part of the capacity", "idle, %")
        _axes(pace, "throughput, thousand tokens/s", "TPOT P95, ms")
        _axes(wait, "throughput, thousand tokens/s", "TTFT P99, s")
        idle.set_ylim(bottom=0)
        wait.set_yscale("log")
        wait.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        style.legend_below(figure, labels_of(sweep))

    return Picture(
        "From idle to overload",
        "Left: idle time by load; routers change places where slots begin to bind. Middle and "
        "right: throughput against latency, a dot for each load; lower and further right is "
        "better. Above the capacity queues grow as long as the run lasts.",
        draw("sweep", 3.9, paint),
    )


def _by_workers(sweep: Sweep, style: PolicyStyle) -> Picture:
    counts = [point.value for point in sweep.points]
    labels = labels_of(sweep)
    base = BASELINE if BASELINE in labels else labels[0]

    def paint(figure: "Figure") -> None:
        idle, smaller = figure.subplots(1, 2)
        ground = means(sweep, base, "imbalance")
        for label in labels:
            _sweep_curve(idle, style, label, counts, _times(means(sweep, label, "idle"), 100))
            parts = zip(ground, means(sweep, label, "imbalance"), strict=True)
            _sweep_curve(
                smaller, style, label, counts, [a / b if b else float("nan") for a, b in parts]
            )
        _reference(idle, counts, means(sweep, base, "idle")[0] * 100, 1.0, "\u221d log G")
        best = max(_ratios(sweep, base))
        _reference(smaller, counts, best, 0.5, "\u221d \u221a(log G)")
        _axes(idle, "workers, G", "idle, %")
        _axes(smaller, "workers, G", f"times less imbalance than {base}")
        for axis in (idle, smaller):
            axis.set_ylim(bottom=0)
            _doubling(axis, counts)
        style.legend_below(figure, labels)

    return Picture(
        "More workers",
        f"Left: idle time by number of workers; dashed, growth as log G from {base}'s first point. "
        f"Right: imbalance of {base} over that of each router; dashed, \u221a(log G) from the best "
        "first point, as the theorem of BF-IO (arXiv 2601.17855) bounds the gain from below.",
        draw("sweep", 3.9, paint),
    )


def _ratios(sweep: Sweep, base: str) -> list[float]:
    """At the first point, of those that have any imbalance."""
    first = {r.named_policy.label: r.interval("imbalance").mean for r in sweep.points[0].results}
    return [first[base] / value for value in first.values() if value > 0] or [1.0]


def _reference(axis: "Axes", counts: list[float], start: float, power: float, name: str) -> None:
    """`start` * (log G / log of the first G) ^ power, from the first G above 1 on."""
    xs = [count for count in counts if count > 1]
    if len(xs) < 2:
        return
    line = [start * (log(count) / log(xs[0])) ** power for count in xs]
    axis.plot(xs, line, color=MUTED, linewidth=1.1, linestyle=DASHES, zorder=2)
    axis.annotate(
        name, (xs[-1], line[-1]), xytext=(-4, 5), textcoords="offset points", ha="right",
        color=MUTED, fontsize=9,
    )  # fmt: skip


def _doubling(axis: "Axes", counts: list[float]) -> None:
    axis.set_xscale("log")
    axis.set_xticks(counts, [f"{count:g}" for count in counts])
    axis.minorticks_off()


def _sweep_curve(
    axis: "Axes", style: PolicyStyle, label: str, across: list[float], up: list[float]
) -> None:
    axis.plot(
        across, up, color=style.colour(label), linewidth=style.line_width(label),
        marker="o", markersize=3, zorder=style.z_order(label),
    )  # fmt: skip


def _axes(axis: "Axes", across: str, up: str) -> None:
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    add_grid(axis)


def _times(values: list[float], scale: float) -> list[float]:
    return [value * scale for value in values]
