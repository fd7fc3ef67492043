"""Figures of a proxy's log: of all requests together, and of each worker's."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from typing import Any

import numpy as np

from equipoise.report.routed.loads import Loads, loads_of
from equipoise.report.routed.trips import COMPLETED, Routed, Trip


@dataclass(frozen=True)
class Spread:
    """Mean and 99th percentile in seconds; nan where nobody has any."""

    mean: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Share:
    """What some of the requests came to.

    Attributes:
        requests: that ended.
        completed: of them, those that came to a good end.
        retried: of them, those that were sent more than once.
        prompt: tokens.
        output: tokens.
        wait: until a worker had them.
        ttft: time to the first token, from arrival; streams only.
        tpot: time for each further token; completed streams only.
        load: mean KV tokens while requests were bound; nan without.
    """

    requests: int
    completed: int
    retried: int
    prompt: int
    output: int
    wait: Spread
    ttft: Spread
    tpot: Spread
    load: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Everything that a table of a log has.

    Attributes:
        seconds: from the first arrival to the last end.
        outcomes: how many requests ended so, most first.
        total: of all requests.
        workers: of each worker that had any.
        imbalance: workers x largest load - all load, mean, tokens; nan without load.
        idle: that, as a part of workers x largest load; nan without load.
        cut: lines of the log that were left out.
    """

    seconds: float
    outcomes: dict[str, int]
    total: Share
    workers: dict[str, Share]
    imbalance: float
    idle: float
    cut: int

    def to_json(self) -> dict[str, Any]:
        """Plain values; None for what is not known."""
        found: dict[str, Any] = _known(asdict(self))
        return found


def figures_of(routed: Routed) -> Figures:
    """All of them."""
    loads = loads_of(routed)
    means = {} if loads is None else dict(zip(routed.workers, _build_context(loads), strict=True))
    return Figures(
        seconds=routed.seconds,
        outcomes=dict(Counter(trip.outcome for trip in routed.trips).most_common()),
        total=_share(routed.trips, sum(means.values()) if means else float("nan")),
        workers={
            name: _share(trips, means.get(name, float("nan")))
            for name, trips in routed.by_worker.items()
        },
        imbalance=float("nan") if loads is None else loads.imbalance,
        idle=float("nan") if loads is None else loads.idle,
        cut=routed.cut,
    )


def spread_of(values: Iterable[float | None]) -> Spread:
    """Of those that are known."""
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not known.size:
        return Spread(float("nan"), float("nan"))
    return Spread(float(known.mean()), float(np.quantile(known, 0.99)))


def _build_context(loads: Loads) -> list[float]:
    if not loads.busy.any():
        return [float("nan")] * loads.tokens.shape[1]
    return [float(mean) for mean in loads.tokens[loads.busy].mean(axis=0)]


def _share(trips: Sequence[Trip], load: float) -> Share:
    return Share(
        requests=len(trips),
        completed=sum(trip.outcome == COMPLETED for trip in trips),
        retried=sum(trip.attempts > 1 for trip in trips),
        prompt=sum(trip.prompt for trip in trips),
        output=sum(trip.output for trip in trips),
        wait=spread_of(trip.wait for trip in trips),
        ttft=spread_of(trip.ttft for trip in trips),
        tpot=spread_of(trip.tpot for trip in trips),
        load=load,
    )


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _known(one) for key, one in value.items()}
    return None if isinstance(value, float) and isnan(value) else value
