"""Load of workers over time, reconstructed from a log of requests."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from equipoise.report.routed.trips import Routed, Trip

Reals: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
MOMENTS = 4096


@dataclass(frozen=True)
class Loads:
    """KV tokens of every worker at moments that lie equally far apart.

    Attributes:
        times: seconds since the first request arrived, [moments].
        tokens: [moments, workers].
        busy: moments from which figures are taken: from the first binding to the last one, and
            with any load. Behind the last one workers only empty, [moments].
    """

    times: Reals
    tokens: Reals
    busy: "np.ndarray[Any, np.dtype[np.bool_]]"

    @property
    def envelope(self) -> Reals:
        """Workers times the largest load, at each moment."""
        return np.asarray(self.tokens.max(axis=1) * self.tokens.shape[1], dtype=np.float64)

    @property
    def imbalance(self) -> float:
        """Mean of workers x largest load - all load, tokens; nan where nothing was busy."""
        gap = self.envelope - self.tokens.sum(axis=1)
        return float(gap[self.busy].mean()) if self.busy.any() else float("nan")

    @property
    def idle(self) -> float:
        """That, as a part of workers x largest load, 0 to 1; nan where nothing was busy."""
        envelope = self.envelope[self.busy]
        return self.imbalance / float(envelope.mean()) if envelope.size else float("nan")


def loads_of(routed: Routed, moments: int = MOMENTS) -> Loads | None:
    """None where no worker had a request.

    A request weighs its prompt from its binding on, and its tokens as they come: at equal
    distances from the first to the end, since a log has no others. Tokens of an answer that is not
    streamed weigh nothing: the policy learns of them at the end.
    """
    if not routed.bound:
        return None
    begin = routed.begin
    step = max(routed.seconds, 1e-9) / moments
    times: Reals = np.asarray((np.arange(moments) + 0.5) * step, dtype=np.float64)
    columns = [
        _load([trip for trip in trips if trip.bound is not None], begin, times)
        for trips in routed.by_worker.values()
    ]
    tokens = np.stack(columns, axis=1)
    starts = [trip.bound - begin for trip in routed.bound if trip.bound is not None]
    during = (times >= min(starts)) & (times <= max(max(starts), min(starts) + step))
    return Loads(times, tokens, during & (tokens.max(axis=1) > 0))


def _load(trips: list[Trip], begin: float, times: Reals) -> Reals:
    """Of one worker: a sum of steps and ramps, each of which is switched on and off again."""
    if not trips:
        return np.zeros_like(times)
    edges = [edge for trip in trips for edge in _edges(trip, begin)]
    when = np.array([edge[0] for edge in edges])
    order = np.argsort(when, kind="stable")
    level, slope = (np.array([edge[k] for edge in edges])[order] for k in (1, 2))
    passed = np.searchsorted(when[order], times, side="right")
    levels = np.concatenate([[0.0], np.cumsum(level)])[passed]
    slopes = np.concatenate([[0.0], np.cumsum(slope)])[passed]
    # What is switched on and off leaves the rounding of a sum behind.
    load = levels + slopes * times
    return np.where(load > 1e-3, load, 0.0)


def _edges(trip: Trip, begin: float) -> list[tuple[float, float, float]]:
    """(seconds behind `begin`, by how much the level changes, by how much the slope does)."""
    assert trip.bound is not None
    bound = trip.bound - begin
    end = max(trip.end - begin, bound)
    edges = [(bound, float(trip.prompt), 0.0), (end, -float(trip.prompt), 0.0)]
    if trip.begun is None or not trip.output:
        return edges
    first = min(max(trip.begun - begin, bound), end)
    rate = (trip.output - 1) / (end - first) if end > first else 0.0
    ramp = 1.0 - rate * first
    return [*edges, (first, ramp, rate), (end, -ramp, -rate)]
