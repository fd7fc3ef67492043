"""The result of a simulation: times of requests, series of steps, and metrics of both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from equipoise.balancer.requests.cluster import Cluster
from equipoise.balancer.requests.workload import Workload

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
WARM_UP_FRACTION = 0.15
"""Fraction of the steps, up to the last admission, that metrics leave out as warm-up."""


@dataclass(frozen=True, kw_only=True)
class SimulationMetrics:
    """The metrics of one run; docs/metrics.md has the formulas.

    Attributes:
        imbalance: G * largest - sum of the workers' work, KV tokens, mean over steps.
        idle: fraction of the work-dependent time that workers wait at the barrier, 0 to 1.
        throughput: tokens per second.
        bound: tokens per second if the work of the same steps had been spread evenly.
        gap: 1 - throughput / bound.
        tpot_mean: seconds per token from admission to the end, mean over requests.
        tpot_p95: its 95th percentile.
        tpot_p99: its 99th percentile.
        ttft_mean: seconds from arrival to the first token.
        ttft_p99: its 99th percentile.
        e2e_p99: seconds from arrival to the last token, 99th percentile.
        wait_mean: seconds from arrival to a slot.
        wait_p99: its 99th percentile.
        wait_max: its largest.
        failed: fraction of the requests that failed.
        fairness: Jain's index of the waits of requests by size, in ten classes: 1 if large and
            small ones wait alike, 0.1 if only one class waits.
        occupancy: fraction of the slots that is taken.
        preempted: preemptions per request.
        steps: number of measured steps.
    """

    imbalance: float
    idle: float
    throughput: float
    bound: float
    gap: float
    tpot_mean: float
    tpot_p95: float
    tpot_p99: float
    ttft_mean: float
    ttft_p99: float
    e2e_p99: float
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
        """Returns the names of all metrics."""
        return tuple(field.name for field in fields(cls))


@dataclass(frozen=True, eq=False)
class RequestTimes:
    """Times of each request, all [n]; in seconds, -1 if it never happened."""

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
    """Values of each step, all [k].

    Attributes:
        clock: time at which it began, in seconds.
        seconds: its duration.
        ideal_seconds: its duration if its work had been spread evenly.
        largest: work of the worker with most work.
        sum: work of all workers.
        tokens: tokens made.
        active: requests with a slot.
        waiting: requests without a slot after the step.
        loads: KV tokens by worker in the first steps, [steps kept, workers].
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
    """One run of the simulator.

    `prompt_weights`: by front end, what its policy took a prompt token to weigh at the end, fitted
    to the times of steps; 0 where it did not.
    """

    workload: Workload
    cluster: Cluster
    requests: RequestTimes
    steps: StepSeries
    prompt_weights: tuple[float, ...]

    @classmethod
    def of(
        cls,
        workload: Workload,
        cluster: Cluster,
        requests: Mapping[str, Any],
        steps: Mapping[str, Any],
        prompt_weights: Sequence[float],
    ) -> "SimulationRun":
        """Builds it from the dictionaries that the native simulator returns."""
        shaped = dict(steps) | {"loads": steps["loads"].reshape(-1, cluster.workers)}
        return cls(
            workload,
            cluster,
            RequestTimes(**requests),
            StepSeries(**shaped),
            tuple(prompt_weights),
        )

    @cached_property
    def window(self) -> slice:
        """The measured steps: after the warm-up, and up to the last admission."""
        end = int(self.requests.admitted_step.max(initial=-1)) + 1
        return slice(int(WARM_UP_FRACTION * end), max(end, 1))

    @cached_property
    def measured(self) -> npt.NDArray[np.bool_]:
        """The measured requests: admitted in the window, and not failed."""
        inside = self.requests.admitted_step >= self.window.start
        mask: npt.NDArray[np.bool_] = (
            inside & (self.requests.admitted >= 0) & (self.requests.failed == 0)
        )
        return mask

    @property
    def queue_times(self) -> FloatArray:
        """Seconds from arrival to a slot, of the measured requests."""
        return (self.requests.admitted - self.requests.arrival)[self.measured]

    @property
    def time_to_first_token(self) -> FloatArray:
        """Seconds from arrival to the first token, of the measured requests."""
        return (self.requests.first - self.requests.arrival)[self.measured]

    @property
    def end_to_end(self) -> FloatArray:
        """Seconds from arrival to the last token, of the measured requests."""
        return (self.requests.end - self.requests.arrival)[self.measured]

    @property
    def time_per_output_token(self) -> FloatArray:
        """Seconds per token, of the measured requests."""
        seconds = (self.requests.end - self.requests.admitted)[self.measured]
        return np.asarray(seconds / self.workload.outputs[self.measured], dtype=np.float64)

    @cached_property
    def balancedness(self) -> FloatArray:
        """Mean over largest work, by step of the window: 1 is perfect."""
        largest = self.steps.largest[self.window]
        mean = self.steps.sum[self.window] / self.cluster.workers
        return np.asarray(mean / np.maximum(largest, 1e-300), dtype=np.float64)

    def metrics(self) -> SimulationMetrics:
        """Computes the metrics over the window."""
        steps, window, workers = self.steps, self.window, self.cluster.workers
        largest, total = steps.largest[window], steps.sum[window]
        idle = workers * largest - total
        tokens = float(steps.tokens[window].sum())
        throughput = _ratio(tokens, float(steps.seconds[window].sum()))
        bound = _ratio(tokens, float(steps.ideal_seconds[window].sum()))
        mean_active = _mean(steps.active[window].astype(np.float64))
        return SimulationMetrics(
            imbalance=_mean(idle),
            idle=_ratio(float(idle.sum()), workers * float(largest.sum())),
            throughput=throughput,
            bound=bound,
            gap=1 - _ratio(throughput, bound),
            occupancy=mean_active / self.cluster.total_slots,
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
            "tpot_p99": _percentile(tpot, 99),
            "ttft_mean": _mean(ttft),
            "ttft_p99": _percentile(ttft, 99),
            "e2e_p99": _percentile(self.end_to_end, 99),
            "wait_mean": _mean(wait),
            "wait_p99": _percentile(wait, 99),
            "wait_max": _percentile(wait, 100),
        }


def fairness(sizes: IntArray, waits: FloatArray, classes: int = 10) -> float:
    """Returns Jain's fairness index of the mean waits of classes of requests by size.

    (sum of x)^2 / (n * sum of x^2), after Jain, Chiu and Hawe, 1984. NaN without requests; 1 if
    none waits.
    """
    if not waits.size:
        return float("nan")
    ranked = waits[np.argsort(sizes, kind="stable")]
    means = np.array([part.mean() for part in np.array_split(ranked, classes) if part.size])
    squares = float((means**2).sum())
    return 1.0 if squares == 0 else float(means.sum() ** 2 / (means.size * squares))


def _ratio(value: float, by: float) -> float:
    """Divides; NaN if `by` is 0: every request failed, or no step is in the window."""
    return value / by if by > 0 else float("nan")


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if values.size else float("nan")


def _percentile(values: FloatArray, percent: float) -> float:
    return float(np.percentile(values, percent)) if values.size else float("nan")
