"""The same comparison at several loads, or on several numbers of workers, as curves."""

from math import log
from typing import TYPE_CHECKING

from equipoise.report.canvas import Picture, draw
from equipoise.report.palette import MUTED
from equipoise.report.simulation.shades import (
    gridded,
    layer_of,
    names_below,
    of_policy,
    width_of,
)
from equipoise.report.simulation.simulated import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BASELINE = "round_robin"
"""Stands for first come, first served: the theorem's baseline."""
DASHES = (0, (4, 3))


def sweep_pictures(sweep: Sweep) -> tuple[Picture, ...]:
    """One of them. Raises PlotsMissing without matplotlib."""
    return (_by_load(sweep),) if sweep.over == "load" else (_by_workers(sweep),)


def means(sweep: Sweep, label: str, figure: str) -> list[float]:
    """Of one router, at every point."""
    return [
        result.interval(figure).mean
        for point in sweep.points
        for result in point.results
        if result.contender.label == label
    ]


def labels_of(sweep: Sweep) -> tuple[str, ...]:
    """Of the routers."""
    return tuple(result.contender.label for result in sweep.points[0].results)


def _by_load(sweep: Sweep) -> Picture:
    loads = [point.value for point in sweep.points]

    def paint(figure: "Figure") -> None:
        idle, pace, wait = figure.subplots(1, 3)
        for label in labels_of(sweep):
            tokens = [value / 1e3 for value in means(sweep, label, "throughput")]
            _line(idle, label, loads, _times(means(sweep, label, "idle"), 100))
            _line(pace, label, tokens, _times(means(sweep, label, "tpot_p95"), 1e3))
            _line(wait, label, tokens, means(sweep, label, "ttft_p99"))
        _axes(idle, "load, part of the capacity", "idle, %")
        _axes(pace, "throughput, thousand tokens/s", "TPOT P95, ms")
        _axes(wait, "throughput, thousand tokens/s", "TTFT P99, s")
        idle.set_ylim(bottom=0)
        wait.set_yscale("log")
        wait.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        names_below(figure, labels_of(sweep))

    return Picture(
        "From idle to overload",
        "Left: idle time by load; routers change places where slots begin to bind. Middle and "
        "right: throughput against latency, a dot for each load; lower and further right is "
        "better. Above the capacity queues grow as long as the run lasts.",
        draw("sweep", 3.9, paint),
    )


def _by_workers(sweep: Sweep) -> Picture:
    counts = [point.value for point in sweep.points]
    labels = labels_of(sweep)
    base = BASELINE if BASELINE in labels else labels[0]

    def paint(figure: "Figure") -> None:
        idle, smaller = figure.subplots(1, 2)
        ground = means(sweep, base, "imbalance")
        for label in labels:
            _line(idle, label, counts, _times(means(sweep, label, "idle"), 100))
            parts = zip(ground, means(sweep, label, "imbalance"), strict=True)
            _line(smaller, label, counts, [a / b if b else float("nan") for a, b in parts])
        _reference(idle, counts, means(sweep, base, "idle")[0] * 100, 1.0, "\u221d log G")
        best = max(_ratios(sweep, base))
        _reference(smaller, counts, best, 0.5, "\u221d \u221a(log G)")
        _axes(idle, "workers, G", "idle, %")
        _axes(smaller, "workers, G", f"times less imbalance than {base}")
        for axis in (idle, smaller):
            axis.set_ylim(bottom=0)
            _doubling(axis, counts)
        names_below(figure, labels)

    return Picture(
        "More workers",
        f"Left: idle time by number of workers; dashed, growth as log G from {base}'s first point. "
        f"Right: imbalance of {base} over that of each router; dashed, \u221a(log G) from the best "
        "first point, as the theorem of BF-IO (arXiv 2601.17855) bounds the gain from below.",
        draw("sweep", 3.9, paint),
    )


def _ratios(sweep: Sweep, base: str) -> list[float]:
    """At the first point, of those that have any imbalance."""
    first = {r.contender.label: r.interval("imbalance").mean for r in sweep.points[0].results}
    return [first[base] / value for value in first.values() if value > 0] or [1.0]


def _reference(axis: "Axes", counts: list[float], start: float, power: float, name: str) -> None:
    """`start` * (log G / log of the first G) ^ power, from the first G above 1 on."""
    known = [count for count in counts if count > 1]
    if len(known) < 2:
        return
    line = [start * (log(count) / log(known[0])) ** power for count in known]
    axis.plot(known, line, color=MUTED, linewidth=1.1, linestyle=DASHES, zorder=2)
    axis.annotate(
        name, (known[-1], line[-1]), xytext=(-4, 5), textcoords="offset points", ha="right",
        color=MUTED, fontsize=9,
    )  # fmt: skip


def _doubling(axis: "Axes", counts: list[float]) -> None:
    axis.set_xscale("log")
    axis.set_xticks(counts, [f"{count:g}" for count in counts])
    axis.minorticks_off()


def _line(axis: "Axes", label: str, across: list[float], up: list[float]) -> None:
    axis.plot(
        across, up, color=of_policy(label), linewidth=width_of(label), marker="o", markersize=3,
        zorder=layer_of(label),
    )  # fmt: skip


def _axes(axis: "Axes", across: str, up: str) -> None:
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    gridded(axis)


def _times(values: list[float], scale: float) -> list[float]:
    return [value * scale for value in values]
