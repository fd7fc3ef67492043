"""Figures of a request log: of all requests, of each worker, and load over time.

Load is reconstructed: tokens are put at equal distances between first answer and end.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from typing import Any

import numpy as np

from equipoise.report.proxy_log.active_time import ActiveTime, Reals
from equipoise.report.proxy_log.requests import COMPLETED, LoggedRequest, ProxyLog

MOMENTS = 4096


@dataclass(frozen=True)
class WorkerLoads:
    """KV tokens of every worker at moments that lie equally far apart, pauses left out.

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


def worker_loads(log: ProxyLog, moments: int = MOMENTS) -> WorkerLoads | None:
    """None where no worker had a request.

    A request weighs its prompt from its binding on, and its tokens as they come: at equal
    distances from the first to the end, since a log has no others. Tokens of an answer that is not
    streamed weigh nothing: the policy learns of them at the end.
    """
    if not log.bound_requests:
        return None
    begin, active = log.begin, ActiveTime.of(log.requests)
    step = max(active.seconds, 1e-9) / moments
    middles = np.arange(moments, dtype=np.float64) + 0.5
    times = active.times(middles * step) - begin
    columns = [
        _load([request for request in requests if request.bound_at is not None], begin, times)
        for requests in log.by_worker.values()
    ]
    tokens = np.stack(columns, axis=1)
    starts = [
        request.bound_at - begin for request in log.bound_requests if request.bound_at is not None
    ]
    during = (times >= min(starts)) & (times <= max(max(starts), min(starts) + step))
    return WorkerLoads(times, tokens, during & (tokens.max(axis=1) > 0))


def _load(requests: list[LoggedRequest], begin: float, times: Reals) -> Reals:
    """Of one worker: a sum of steps and ramps, each of which is switched on and off again."""
    if not requests:
        return np.zeros_like(times)
    edges = [edge for request in requests for edge in _edges(request, begin)]
    when = np.array([edge[0] for edge in edges])
    order = np.argsort(when, kind="stable")
    level, slope = (np.array([edge[k] for edge in edges])[order] for k in (1, 2))
    edges_before = np.searchsorted(when[order], times, side="right")
    levels = np.concatenate([[0.0], np.cumsum(level)])[edges_before]
    slopes = np.concatenate([[0.0], np.cumsum(slope)])[edges_before]
    # Adding and subtracting the same loads leaves a rounding error.
    load = levels + slopes * times
    return np.where(load > 1e-3, load, 0.0)


def _edges(request: LoggedRequest, begin: float) -> list[tuple[float, float, float]]:
    """(seconds after `begin`, by how much the level changes, by how much the slope does)."""
    assert request.bound_at is not None
    start = request.bound_at - begin
    end = max(request.ended_at - begin, start)
    edges = [(start, float(request.prompt), 0.0), (end, -float(request.prompt), 0.0)]
    if request.first_token_at is None or not request.output:
        return edges
    first = min(max(request.first_token_at - begin, start), end)
    rate = (request.output - 1) / (end - first) if end > first else 0.0
    ramp = 1.0 - rate * first
    return [*edges, (first, ramp, rate), (end, -ramp, -rate)]


@dataclass(frozen=True)
class MeanAndP99:
    """Mean and 99th percentile in seconds; nan without any."""

    mean: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class RequestFigures:
    """What some of the requests came to.

    Attributes:
        requests: that ended.
        completed: of them, those that came to a good end.
        retried: of them, those that were sent more than once.
        prompt: tokens.
        output: tokens.
        wait: until a worker had them; not of those that were sent more than once.
        retry_delay: until the last worker had them, of those that were.
        ttft: time to the first token, from arrival; streams only.
        tpot: time for each further token; completed streams only.
        load: mean KV tokens while requests were bound; nan without.
    """

    requests: int
    completed: int
    retried: int
    prompt: int
    output: int
    wait: MeanAndP99
    retry_delay: MeanAndP99
    ttft: MeanAndP99
    tpot: MeanAndP99
    load: float


@dataclass(frozen=True, kw_only=True)
class ProxyLogFigures:
    """Everything that a table of a log has.

    Attributes:
        begin: when the first request arrived, seconds since 1970.
        seconds: from the first arrival to the last end.
        active_seconds: of them, those in which the proxy had requests, short breaks included.
        pauses: longer times without any request.
        outcomes: how many requests ended so, most first.
        total: of all requests.
        workers: of each worker that had any.
        imbalance: workers x largest load - all load, mean, tokens; nan without load.
        idle: that, as a part of workers x largest load; nan without load.
        cut_lines: lines of the log that were left out.
    """

    begin: float
    seconds: float
    active_seconds: float
    pauses: int
    outcomes: dict[str, int]
    total: RequestFigures
    workers: dict[str, RequestFigures]
    imbalance: float
    idle: float
    cut_lines: int

    def to_json(self) -> dict[str, Any]:
        """Plain values; None for what is not known."""
        figures: dict[str, Any] = _none_if_nan(asdict(self))
        return figures


def proxy_log_figures(log: ProxyLog) -> ProxyLogFigures:
    """All of them."""
    loads, active = worker_loads(log), ActiveTime.of(log.requests)
    means = {} if loads is None else dict(zip(log.workers, _mean_loads(loads), strict=True))
    return ProxyLogFigures(
        begin=log.begin,
        seconds=log.seconds,
        active_seconds=active.seconds,
        pauses=len(active.pauses),
        outcomes=dict(Counter(request.outcome for request in log.requests).most_common()),
        total=_share(log.requests, sum(means.values()) if means else float("nan")),
        workers={
            name: _share(requests, means.get(name, float("nan")))
            for name, requests in log.by_worker.items()
        },
        imbalance=float("nan") if loads is None else loads.imbalance,
        idle=float("nan") if loads is None else loads.idle,
        cut_lines=log.cut_lines,
    )


def mean_and_p99(values: Iterable[float | None]) -> MeanAndP99:
    """Of those that are known."""
    numbers = np.array([value for value in values if value is not None], dtype=np.float64)
    if not numbers.size:
        return MeanAndP99(float("nan"), float("nan"))
    return MeanAndP99(float(numbers.mean()), float(np.quantile(numbers, 0.99)))


def _mean_loads(loads: WorkerLoads) -> list[float]:
    if not loads.busy.any():
        return [float("nan")] * loads.tokens.shape[1]
    return [float(mean) for mean in loads.tokens[loads.busy].mean(axis=0)]


def _share(requests: Sequence[LoggedRequest], load: float) -> RequestFigures:
    return RequestFigures(
        requests=len(requests),
        completed=sum(request.outcome == COMPLETED for request in requests),
        retried=sum(request.attempts > 1 for request in requests),
        prompt=sum(request.prompt for request in requests),
        output=sum(request.output for request in requests),
        wait=mean_and_p99(request.wait for request in requests),
        retry_delay=mean_and_p99(one.delay for one in requests if one.attempts > 1),
        ttft=mean_and_p99(request.ttft for request in requests),
        tpot=mean_and_p99(request.tpot for request in requests),
        load=load,
    )


def _none_if_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _none_if_nan(one) for key, one in value.items()}
    return None if isinstance(value, float) and isnan(value) else value
