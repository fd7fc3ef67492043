"""What a simulation has seen: every step and every request, and the figures of both."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from equipoise.balancer.requests.cluster import Cluster
from equipoise.balancer.requests.workload import Workload

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
WARM_UP = 0.15
"""The part of the steps before the last admission that no figure is taken of."""


@dataclass(frozen=True, kw_only=True)
class SimulationMetrics:
    """Of one run; docs/metrics.md has the formulas.

    Attributes:
        imbalance: G * largest - sum of the workers' work, KV tokens, mean over steps.
        idle: the part of the work-dependent time that workers wait at the barrier, 0 to 1.
        throughput: tokens a second.
        bound: the same for the same steps, had the work been spread evenly (perfect balance).
        gap: 1 - throughput / bound.
        tpot_mean: seconds a token from admission to the end, mean over requests.
        tpot_p95: its 95th percentile.
        ttft_mean: seconds from arrival to the first token.
        ttft_p99: its 99th percentile.
        wait_mean: seconds from arrival to a slot.
        wait_p99: its 99th percentile.
        wait_max: its largest.
        failed: part of the requests that failed.
        fairness: Jain's index of the waits of requests by size, in ten classes: 1 where large and
            small ones wait alike, 0.1 where one class waits alone.
        occupancy: slots taken, part of all.
        preempted: requests put back into a queue, times, per request.
        steps: how many the figures are taken of.
    """

    imbalance: float
    idle: float
    throughput: float
    bound: float
    gap: float
    tpot_mean: float
    tpot_p95: float
    ttft_mean: float
    ttft_p99: float
    wait_mean: float
    wait_p99: float
    wait_max: float
    failed: float
    fairness: float
    occupancy: float
    preempted: float
    steps: float

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Of all figures."""
        return tuple(field.name for field in fields(cls))


@dataclass(frozen=True, eq=False)
class RequestTimes:
    """By request, all [n]; times in seconds, -1 where that never came."""

    arrival: FloatArray
    admitted: FloatArray
    first: FloatArray
    end: FloatArray
    worker: IntArray
    admitted_step: IntArray
    preemptions: IntArray
    failed: IntArray


@dataclass(frozen=True, eq=False)
class StepSeries:
    """By step, all [k].

    Attributes:
        clock: seconds at which it began.
        seconds: it took.
        ideal_seconds: it would have taken with its work spread evenly.
        largest: work of the worker that had most.
        sum: work of all.
        tokens: made.
        active: requests with a slot.
        waiting: requests without, behind the step.
        loads: of the first steps, KV tokens by worker, [steps kept, workers].
    """

    clock: FloatArray
    seconds: FloatArray
    ideal_seconds: FloatArray
    largest: FloatArray
    sum: FloatArray
    tokens: IntArray
    active: IntArray
    waiting: IntArray
    loads: IntArray


@dataclass(frozen=True, eq=False)
class SimulationRun:
    """A run of the simulator."""

    workload: Workload
    cluster: Cluster
    requests: RequestTimes
    steps: StepSeries

    @classmethod
    def of(
        cls,
        workload: Workload,
        cluster: Cluster,
        jobs: Mapping[str, Any],
        steps: Mapping[str, Any],
    ) -> "SimulationRun":
        """From what the native simulator returns."""
        shaped = dict(steps) | {"loads": steps["loads"].reshape(-1, cluster.workers)}
        return cls(workload, cluster, RequestTimes(**jobs), StepSeries(**shaped))

    @cached_property
    def window(self) -> slice:
        """The steps that figures are taken of: warm, and while requests still came."""
        end = int(self.requests.admitted_step.max(initial=-1)) + 1
        return slice(int(WARM_UP * end), max(end, 1))

    @cached_property
    def measured(self) -> npt.NDArray[np.bool_]:
        """The requests that figures are taken of: admitted in the window, and not failed."""
        inside = self.requests.admitted_step >= self.window.start
        kept: npt.NDArray[np.bool_] = (
            inside & (self.requests.admitted >= 0) & (self.requests.failed == 0)
        )
        return kept

    @property
    def queue_times(self) -> FloatArray:
        """Seconds from arrival to a slot, of the measured requests."""
        return (self.requests.admitted - self.requests.arrival)[self.measured]

    @property
    def time_to_first_token(self) -> FloatArray:
        """Seconds from arrival to the first token, of the measured requests."""
        return (self.requests.first - self.requests.arrival)[self.measured]

    @property
    def time_per_output_token(self) -> FloatArray:
        """Seconds a token, of the measured requests."""
        spent = (self.requests.end - self.requests.admitted)[self.measured]
        return np.asarray(spent / self.workload.outputs[self.measured], dtype=np.float64)

    @cached_property
    def balancedness(self) -> FloatArray:
        """Mean over largest work, by step of the window: 1 is perfect."""
        largest = self.steps.largest[self.window]
        mean = self.steps.sum[self.window] / self.cluster.workers
        return np.asarray(mean / np.maximum(largest, 1e-300), dtype=np.float64)

    def metrics(self) -> SimulationMetrics:
        """Of the window."""
        steps, window, workers = self.steps, self.window, self.cluster.workers
        largest, total = steps.largest[window], steps.sum[window]
        idle = workers * largest - total
        tokens = float(steps.tokens[window].sum())
        throughput = _ratio(tokens, float(steps.seconds[window].sum()))
        bound = _ratio(tokens, float(steps.ideal_seconds[window].sum()))
        taken = _mean(steps.active[window].astype(np.float64))
        return SimulationMetrics(
            imbalance=_mean(idle),
            idle=_ratio(float(idle.sum()), workers * float(largest.sum())),
            throughput=throughput,
            bound=bound,
            gap=1 - _ratio(throughput, bound),
            occupancy=taken / (workers * self.cluster.slots),
            steps=float(idle.size),
            failed=float((self.requests.failed != 0).mean()),
            preempted=float(self.requests.preemptions.mean()),
            fairness=fairness(self.workload.prompts[self.measured], self.queue_times),
            **self._latency_metrics(),
        )

    def _latency_metrics(self) -> dict[str, float]:
        tpot, ttft, wait = self.time_per_output_token, self.time_to_first_token, self.queue_times
        return {
            "tpot_mean": _mean(tpot),
            "tpot_p95": _percentile(tpot, 95),
            "ttft_mean": _mean(ttft),
            "ttft_p99": _percentile(ttft, 99),
            "wait_mean": _mean(wait),
            "wait_p99": _percentile(wait, 99),
            "wait_max": _percentile(wait, 100),
        }


def fairness(sizes: IntArray, waits: FloatArray, classes: int = 10) -> float:
    """Jain's index of the mean waits of `classes` classes of requests by size (Jain, Chiu and
    Hawe, 1984): (sum of x)^2 / (n * sum of x^2). NaN without waits; 1 where nobody waits."""
    if not waits.size:
        return float("nan")
    ranked = waits[np.argsort(sizes, kind="stable")]
    means = np.array([part.mean() for part in np.array_split(ranked, classes) if part.size])
    squares = float((means**2).sum())
    return 1.0 if squares == 0 else float(means.sum() ** 2 / (means.size * squares))


def _ratio(value: float, by: float) -> float:
    """NaN where nothing took any time: every request failed, or no step is in the window."""
    return value / by if by > 0 else float("nan")


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if values.size else float("nan")


def _percentile(values: FloatArray, percent: float) -> float:
    return float(np.percentile(values, percent)) if values.size else float("nan")
