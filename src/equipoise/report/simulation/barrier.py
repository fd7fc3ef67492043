"""A few steps as a Gantt chart: who reads, and who waits at the barrier."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from equipoise.balancer.requests.cluster import Cluster
from equipoise.balancer.requests.comparison import Result
from equipoise.balancer.requests.outcome import Reals
from equipoise.report.canvas import Picture, draw
from equipoise.report.palette import MUTED
from equipoise.report.simulation.seen import EXCERPT, Excerpt
from equipoise.report.simulation.shades import of_policy
from equipoise.report.simulation.simulated import Simulated

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_WORKERS = 12
"""That are drawn: more would be a carpet."""
READING, WAITING, FIXED = "#82aedb", "#d9604a", "#c9c4b8"


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps; seconds from the first, k steps, g workers.

    Attributes:
        begins: of each step, [k].
        reading: of each worker, [k, g].
        barrier: until the fullest worker has read, [k].
        seconds: of each step, [k].
    """

    begins: Reals
    reading: Reals
    barrier: Reals
    seconds: Reals


def stretch(excerpt: Excerpt, cluster: Cluster) -> Stretch:
    """From tokens to seconds."""
    rate = cluster.step.per_token
    return Stretch(
        excerpt.clock - excerpt.clock[0],
        np.asarray(excerpt.loads * rate, dtype=np.float64),
        excerpt.largest * rate,
        excerpt.seconds,
    )


def barrier_gantt(found: Simulated) -> Picture | None:
    """The routers with most and with least idle time, and the default; None without any."""
    shown = _telling(found)
    if not shown:
        return None
    cluster = found.subject.cluster
    workers = min(cluster.workers, MOST_WORKERS)

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        for axis, result in zip(axes, shown, strict=True):
            excerpt = found.seen[result.contender.label].excerpt
            _panel(axis, result, stretch(excerpt, cluster), workers)
        _legend(figure)
        axes[-1].set_xlabel("milliseconds")

    more = "" if workers == cluster.workers else f" The first {workers} workers."
    return Picture(
        f"{EXCERPT} steps, worker by worker",
        "Every worker reads the KV of its requests, then waits at the barrier for the fullest one; "
        "the rest of the step is the same for all. Most idle, least idle, and the default, on one "
        f"scale; steps as idle as the run is, first seed.{more}{_caveat(cluster)}",
        draw("barrier", 0.8 + len(shown) * (0.45 + 0.17 * workers), paint),
    )


def _caveat(cluster: Cluster) -> str:
    if cluster.prefill is None and not cluster.step.noise:
        return ""
    return " Prompts that are computed, and noise, count as waiting here: only loads were kept."


def _telling(found: Simulated) -> list[Result]:
    """At most three, by falling idle time."""
    drawn = [r for r in found.results if r.contender.label in found.seen]
    ranked = sorted(drawn, key=lambda result: -result.interval("idle").mean)
    wanted = [*ranked[:1], *(r for r in ranked if r is found.reference), *ranked[-1:]]
    return [r for r in ranked if any(r is one for one in wanted)]


def _panel(axis: "Axes", result: Result, seen: Stretch, workers: int) -> None:
    for left, width, row, colour in _boxes(seen, workers):
        axis.barh(row, width * 1e3, left=left * 1e3, height=0.8, color=colour, linewidth=0)
    for begin in seen.begins[1:]:
        axis.axvline(begin * 1e3, color=MUTED, linewidth=0.5, alpha=0.7)
    axis.set_ylim(workers - 0.4, -0.6)
    axis.set_yticks(range(workers), [str(worker) for worker in range(workers)], fontsize=7.5)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.set_xlim(left=0)
    label, idle = result.contender.label, result.interval("idle").mean
    axis.set_title(f"{label}, {idle:.1%} idle", color=of_policy(label), pad=4)
    axis.set_ylabel("worker")


def _boxes(seen: Stretch, workers: int) -> Iterator[tuple[Reals, Reals, int, str]]:
    """Left edges and widths of all steps [k], row and colour."""
    for row in range(workers):
        reading = seen.reading[:, row]
        yield seen.begins, reading, row, READING
        yield seen.begins + reading, np.maximum(seen.barrier - reading, 0), row, WAITING
        yield seen.begins + seen.barrier, np.maximum(seen.seconds - seen.barrier, 0), row, FIXED


def _legend(figure: "Figure") -> None:
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
