"""Curves of all routers: how balanced steps are, and who waits how long."""

from typing import TYPE_CHECKING

import numpy as np

from equipoise.report.canvas import Picture, draw
from equipoise.report.simulation.seen import QUANTILES
from equipoise.report.simulation.shades import (
    gridded,
    layer_of,
    names_beside,
    of_policy,
    width_of,
)
from equipoise.report.simulation.simulated import Simulated

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST_SHOWN = 0.99
"""The axis begins there or below."""
SEEN = 0.01
"""Quantile of the most uneven router at which the axis begins."""


def balance_curve(found: Simulated) -> Picture | None:
    """Distribution of mean / largest work over steps; None where nobody served anything."""
    if not found.seen:
        return None

    def paint(figure: "Figure") -> None:
        axis = figure.subplots()
        for label, seen in found.seen.items():
            _line(axis, label, seen.balance, QUANTILES)
        least = min(float(np.interp(SEEN, QUANTILES, s.balance)) for s in found.seen.values())
        axis.set_xlim(min(least, LEAST_SHOWN), 1.0)
        axis.set_ylim(0, 1)
        axis.set_xlabel("balance ratio of a step: mean / largest work of the workers")
        axis.set_ylabel("part of the steps below")
        gridded(axis)
        medians = {n: float(np.interp(0.5, QUANTILES, s.balance)) for n, s in found.seen.items()}
        ranked = sorted(medians, key=lambda label: medians[label])
        names_beside(axis, [(label, f"{medians[label]:.3f}") for label in ranked])

    return Picture(
        "How balanced steps are",
        "Cumulative distribution over steps, mean over seeds; further right is better, 1 is "
        "perfect. Beside it the medians, from worst to best.",
        draw("balance", 3.9, paint),
    )


def wait_by_size(found: Simulated) -> Picture | None:
    """Mean wait of ten classes of requests by prompt; None where nobody served anything."""
    if not found.seen:
        return None

    def paint(figure: "Figure") -> None:
        axis = figure.subplots()
        for label, seen in found.seen.items():
            _line(axis, label, np.arange(len(seen.waits)), seen.waits, marker="o", markersize=3)
        sizes = next(iter(found.seen.values())).sizes
        axis.set_xticks(range(len(sizes)), [f"{size:,.0f}" for size in sizes])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("mean prompt of each tenth of the requests, tokens")
        axis.set_ylabel("mean wait for a slot, s")
        gridded(axis)
        names_beside(axis, _by_fairness(found))

    return Picture(
        "Who waits: small requests or large ones",
        "Requests in ten classes of as many by prompt length. A level line is fair; a router that "
        "picks what fits lets those wait that seldom fit. Mean over seeds; beside it fairness, "
        "Jain's index of the ten.",
        draw("waits", 4.0, paint),
    )


def _line(axis: "Axes", label: str, across: object, up: object, **look: object) -> None:
    axis.plot(
        across,  # type: ignore[arg-type]
        up,  # type: ignore[arg-type]
        color=of_policy(label),
        linewidth=width_of(label),
        zorder=layer_of(label),
        **look,  # type: ignore[arg-type]
    )


def _by_fairness(found: Simulated) -> list[tuple[str, str]]:
    """Those drawn, fairest first."""
    values = {r.contender.label: r.interval("fairness").mean for r in found.results}
    ranked = sorted(found.seen, key=lambda label: -values[label])
    return [(label, f"{values[label]:.3f}") for label in ranked]
