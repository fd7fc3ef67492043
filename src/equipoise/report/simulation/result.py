"""Results of `equipoise simulate`: figures of each policy, and the data that plots need.

Outcomes of large runs are large, so only what is drawn is kept of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from equipoise.balancer.requests.cluster import Cluster
from equipoise.balancer.requests.policy_comparison import ComparisonSetup, NamedPolicy, PolicyResult
from equipoise.balancer.requests.simulation import SaturatedArrivals
from equipoise.balancer.requests.simulation_run import FloatArray, SimulationRun
from equipoise.balancer.requests.workload import WorkloadSummary

DRAWN_STEPS = 4000
"""Steps of which the load of every worker is drawn."""
CURVE_POINTS = 200
"""Of a line: steps between are left out."""
MAX_KEPT_LOADS = 1 << 22
"""Loads that a run keeps: 32 MiB, until it has been looked at."""
EXCERPT_STEPS = 12
"""Steps that are drawn one by one."""
QUANTILES = np.linspace(0.0, 1.0, 201)
CLASSES = 10
"""Of requests by size, as for the figure of fairness."""
Loads = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LoadCurves:
    """Loads of the first steps of a run; k <= about `CURVE_POINTS`.

    Attributes:
        steps: their numbers, [k].
        loads: KV tokens by worker, [k, workers].
        first_measured_step: first step that figures are taken of.
    """

    steps: Loads
    loads: Loads
    first_measured_step: int

    @classmethod
    def of(cls, outcome: SimulationRun) -> "LoadCurves":
        """Copies: the outcome can go."""
        count = min(len(outcome.steps.loads), DRAWN_STEPS)
        steps = np.arange(0, count, max(1, count // CURVE_POINTS))
        return cls(steps, outcome.steps.loads[steps], outcome.window.start)


@dataclass(frozen=True, eq=False)
class StepExcerpt:
    """A few consecutive steps of a run, k <= `EXCERPT_STEPS`.

    Attributes:
        loads: KV tokens by worker, [k, workers].
        clock: seconds at which each step began, [k].
        seconds: that each took, [k].
        largest: work of the fullest worker, [k].
    """

    loads: Loads
    clock: FloatArray
    seconds: FloatArray
    largest: FloatArray

    @classmethod
    def of(cls, outcome: SimulationRun) -> "StepExcerpt":
        """The steps with the idle part nearest to that of the whole run; copies."""
        steps, first = outcome.steps, typical_step(outcome)
        part = slice(first, min(first + EXCERPT_STEPS, len(steps.loads)))
        return cls(
            steps.loads[part].copy(),
            steps.clock[part].copy(),
            steps.seconds[part].copy(),
            steps.largest[part].copy(),
        )


def typical_step(outcome: SimulationRun) -> int:
    """First of `EXCERPT_STEPS` steps of the measured window that stand for the run.

    They come earlier where loads were kept for fewer steps.
    """
    last = len(outcome.steps.loads) - EXCERPT_STEPS
    start: int = outcome.window.start
    if start >= last:
        return max(last, 0)
    balance = outcome.balancedness[: last - start + EXCERPT_STEPS]
    means = np.convolve(balance, np.full(EXCERPT_STEPS, 1 / EXCERPT_STEPS), mode="valid")
    if not means.size:
        return start
    return start + int(np.abs(means - outcome.balancedness.mean()).argmin())


@dataclass(frozen=True, eq=False)
class PolicyPlotData:
    """Of one contender.

    Attributes:
        lines: of its first seed.
        excerpt: of the same.
        balance: quantiles of mean / largest work over steps at `QUANTILES`, mean over seeds.
        sizes: mean prompt of each class of requests by size, mean over seeds, [classes].
        waits: mean wait of each, seconds.
    """

    lines: LoadCurves
    excerpt: StepExcerpt
    balance: FloatArray
    sizes: FloatArray
    waits: FloatArray


@dataclass
class PlotDataCollector:
    """Is shown every outcome, and keeps what pictures need."""

    first: dict[str, tuple[LoadCurves, StepExcerpt]] = field(default_factory=dict)
    balances: dict[str, list[FloatArray]] = field(default_factory=dict)
    classes: dict[str, list[tuple[FloatArray, FloatArray]]] = field(default_factory=dict)

    def keep(self, contender: NamedPolicy, seed: int, outcome: SimulationRun) -> None:
        """Takes outcomes of `compare_policies`; skips policies of which every request failed."""
        if not outcome.balancedness.size or not outcome.queue_times.size:
            return
        label = contender.label
        if label not in self.first:
            self.first[label] = LoadCurves.of(outcome), StepExcerpt.of(outcome)
        self.balances.setdefault(label, []).append(np.quantile(outcome.balancedness, QUANTILES))
        self.classes.setdefault(label, []).append(waits_by_prompt(outcome))

    def plot_data(self) -> dict[str, PolicyPlotData]:
        """By label."""
        return {
            label: PolicyPlotData(*first, _mean(self.balances[label]), *self._classes(label))
            for label, first in self.first.items()
        }

    def _classes(self, label: str) -> tuple[FloatArray, FloatArray]:
        sizes, waits = zip(*self.classes[label], strict=True)
        fewest = min(len(one) for one in sizes)
        return _mean([s[:fewest] for s in sizes]), _mean([w[:fewest] for w in waits])


def waits_by_prompt(outcome: SimulationRun) -> tuple[FloatArray, FloatArray]:
    """Mean prompt and mean wait of `CLASSES` classes of as many requests, small ones first; fewer
    where there are fewer requests."""
    prompts, waits = outcome.workload.prompts[outcome.measured], outcome.queue_times
    order = np.array_split(np.argsort(prompts, kind="stable"), CLASSES)
    parts = [part for part in order if part.size]
    return (
        np.array([prompts[part].mean() for part in parts]),
        np.array([waits[part].mean() for part in parts]),
    )


def _mean(rows: Sequence[FloatArray]) -> FloatArray:
    return np.asarray(np.mean(rows, axis=0), dtype=np.float64)


REFERENCE_POLICY = "fit"
"""The default policy: differences are to it, where it is among the contenders."""


@dataclass(frozen=True, kw_only=True)
class SimulationSubject:
    """What was simulated, as the first seed has it.

    Attributes:
        workload: its name.
        notes: what reading it dropped, sorted or estimated.
        sampling: what seeds differ in, in words.
        arrivals: how requests came, in words.
        requests: figures of the requests.
        cluster: with the time of a step.
        full_load: KV tokens of a worker with all slots taken.
        capacity: requests a second at most.
        rate: requests a second that came; None where they always waited.
    """

    workload: str
    notes: tuple[str, ...]
    sampling: str
    arrivals: str
    requests: WorkloadSummary
    cluster: Cluster
    full_load: float
    capacity: float
    rate: float | None

    @classmethod
    def of(cls, split: ComparisonSetup, sampling: str, arrivals: str) -> "SimulationSubject":
        """The first seed's. Raises what drawing raises."""
        workload, scenario = split.scenario_of_seed(split.seeds[0])
        requests, cluster = workload.summary(), scenario.cluster
        return cls(
            workload=workload.name,
            notes=workload.notes,
            sampling=sampling,
            arrivals=arrivals,
            requests=requests,
            cluster=cluster,
            full_load=cluster.full_load(workload),
            capacity=cluster.capacity(workload),
            rate=None if isinstance(scenario.arrivals, SaturatedArrivals) else requests.rate,
        )


@dataclass(frozen=True)
class SweepPoint:
    """One value of what is swept, and what everybody did there."""

    value: float
    results: tuple[PolicyResult, ...]


@dataclass(frozen=True)
class Sweep:
    """The same again, over `load` or over `workers`."""

    over: str
    points: tuple[SweepPoint, ...]


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """All of it.

    Attributes:
        subject: what was simulated.
        seeds: a run of each contender for each.
        results: by contender, in the order of tables.
        plot_data: by label, what pictures are drawn of.
        sweep: None without one.
    """

    subject: SimulationSubject
    seeds: tuple[int, ...]
    results: tuple[PolicyResult, ...]
    plot_data: Mapping[str, PolicyPlotData] = field(default_factory=dict)
    sweep: Sweep | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Of the contenders."""
        return tuple(result.named_policy.label for result in self.results)

    @property
    def reference(self) -> PolicyResult:
        """The default policy, or the first contender where it is not among them."""
        by_label = {result.named_policy.label: result for result in self.results}
        return by_label.get(REFERENCE_POLICY, self.results[0])
