"""Rebalance after rebalance by rival policies, at DeepSeek-V3's size: what moves, and how level."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import ExpertShape
from lib.loads import Counts, Model, windows
from lib.results import spread

SHAPE = ExpertShape(layers=58, experts=256, slots=288, ranks=32)
WINDOWS, PERIOD = 12, 4
SEEDS = (11, 12, 13, 14, 15)
"""Not those with which defaults were chosen (0, 1 and 2)."""
Table = npt.NDArray[np.int64]
"""[layers, slots], the expert in each slot."""
Rival = Callable[[Counts, Table], Table]
"""From (steps, layers, experts) and the installed table to the next one."""
Figure = Callable[[Counts, Table], float]
"""Of a table under a load (layers, experts)."""


def copied_fraction(before: Table, after: Table, shape: ExpertShape = SHAPE) -> float:
    """Experts that ranks have now and had not, as part of all slots."""
    held = [np.zeros((shape.layers, shape.ranks, shape.experts), dtype=bool) for _ in range(2)]
    for mask, table in zip(held, (before, after), strict=True):
        np.put_along_axis(mask, table.reshape(shape.layers, shape.ranks, -1), True, axis=2)
    return float((held[1] & ~held[0]).sum() / before.size)


def copies(table: Table, shape: ExpertShape = SHAPE) -> npt.NDArray[np.int64]:
    """(layers, experts): slots of each."""
    return np.stack([np.bincount(row, minlength=shape.experts) for row in table])


def even_split(load: Counts, table: Table) -> float:
    """Imbalance where the slots of an expert take equal parts."""
    return imbalance(np.take_along_axis(load / copies(table), table, axis=1))


def imbalance(rows: npt.NDArray[np.float64], shape: ExpertShape = SHAPE) -> float:
    """max/mean - 1 of the ranks, mean over layers, from rows by slot."""
    ranks = rows.reshape(shape.layers, shape.ranks, -1).sum(axis=2)
    return float((ranks.max(axis=1) / ranks.mean(axis=1) - 1).mean())


def trial(
    rival: Rival, seed: int, first: Table, others: Mapping[str, Figure]
) -> Iterator[dict[str, Any]]:
    """One rebalance after the other; `others` are further figures of the next window."""
    model = Model(
        layers=SHAPE.layers, experts=SHAPE.experts, ranks=SHAPE.ranks, sub_windows=4, period=PERIOD
    )
    table = first
    for number, (window, later) in enumerate(pairwise(windows(model, seed, WINDOWS + 1))):
        began = time.thread_time()
        after = rival(window.counts, table)
        seconds = time.thread_time() - began
        kind = "first" if number == 0 else "switch" if window.switched else "steady"
        yield {
            "kind": kind,
            "seconds": seconds,
            "moved": copied_fraction(table, after),
            "layers": int((table != after).any(axis=1).sum()),
            "planned": even_split(window.load, after),
            "next": even_split(later.load, after),
            **{name: figure(later.load, after) for name, figure in others.items()},
            # Where the next window is of another kind, nobody could know.
            "same_traffic": not later.switched,
        }
        table = after


Trials = Sequence[Sequence[Mapping[str, Any]]]
"""What `trial` yields, by seed."""


def by_seed(trials: Trials, figure: str) -> list[float]:
    """A figure of each seed: sum of what is moved, median of seconds, else the mean over windows
    before one of the same traffic."""
    match figure:
        case "moved":
            return [sum(each["moved"] for each in one) for one in trials]
        case "seconds":
            return [statistics.median(each["seconds"] for each in one) for one in trials]
    return [statistics.mean(each[figure] for each in one if each["same_traffic"]) for one in trials]


def row(name: str, trials: Trials, *others: str) -> dict[str, Any]:
    """One line of a table: median, least and most of seeds."""

    def of(kind: str, figure: str) -> list[float]:
        chosen = ([each[figure] for each in one if each["kind"] == kind] for one in trials)
        return spread(statistics.mean(values) for values in chosen)

    return {
        "policy": name,
        "first": of("first", "moved"),
        "steady": of("steady", "moved"),
        "switch": of("switch", "moved"),
        "layers": of("steady", "layers"),
        **{
            figure: spread(by_seed(trials, figure))
            for figure in ("planned", "next", *others, "seconds")
        },
    }


def ratio(policy: Trials, base: Trials, figure: str) -> list[float]:
    """A policy's figure over another's, seed by seed: median, least and most."""
    pairs = zip(by_seed(policy, figure), by_seed(base, figure), strict=True)
    return spread(mine / theirs for mine, theirs in pairs)
