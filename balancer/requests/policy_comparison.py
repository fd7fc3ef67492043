"""Several policies on the same workloads, several seeds each, and what may be said of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TypeAlias

import numpy as np

from equipoise.balancer.requests.cluster import Cluster, with_fixed_share
from equipoise.balancer.requests.policy_settings import Predictor, RoutingPolicySettings
from equipoise.balancer.requests.simulation import Scenario, TimedArrivals, simulate
from equipoise.balancer.requests.simulation_run import SimulationMetrics, SimulationRun
from equipoise.balancer.requests.workload import Workload

WorkloadFactory: TypeAlias = Callable[[int], Workload]
"""The workload of a seed."""
ComparisonProgress: TypeAlias = Callable[[str, int, int], None]
"""Label of the policy, seed, and how many requests of this run have ended."""


@dataclass(frozen=True)
class NamedPolicy:
    """A policy under the name that tables give it."""

    label: str
    policy: RoutingPolicySettings


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its 95 % confidence interval (Student's t over seeds); the
    half width is NaN with one seed."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        """Where it begins."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Where it ends."""
        return self.mean + self.half


@dataclass(frozen=True)
class PolicyResult:
    """What one contender did, a run for each seed."""

    named_policy: NamedPolicy
    metrics: tuple[SimulationMetrics, ...]

    def interval(self, figure: str) -> Interval:
        """Of a figure, by name."""
        return interval([getattr(run, figure) for run in self.metrics])

    def relative_to(self, other: "PolicyResult", figure: str) -> Interval:
        """Of the relative difference to `other`, seed by seed: 0.1 is ten per cent above."""
        pairs = zip(self.metrics, other.metrics, strict=True)
        return interval([_relative(getattr(a, figure), getattr(b, figure)) for a, b in pairs])


@dataclass(frozen=True, kw_only=True)
class ComparisonSetup:
    """What contenders are compared on.

    Attributes:
        workload_factory: the workload of a seed.
        seeds: one run of each contender for each.
        scenario: its policy and seed are replaced.
        fixed_share: fixed part of a step at full load; None: as the scenario's step time says.
        load: part of the capacity at which requests come (Poisson); None: as the scenario says.
        keep_arrival_gaps: the workload's times, stretched to the load, in place of Poisson's.
    """

    workload_factory: WorkloadFactory
    seeds: Sequence[int]
    scenario: Scenario
    fixed_share: float | None = 0.5
    load: float | None = None
    keep_arrival_gaps: bool = False

    def scenario_of_seed(self, seed: int) -> tuple[Workload, Scenario]:
        """The workload of a seed, with its times, and the scenario without its policy."""
        workload = self.workload_factory(seed)
        cluster: Cluster = self.scenario.cluster
        if self.fixed_share is not None:
            cluster = with_fixed_share(cluster, workload, self.fixed_share)
        scenario = replace(self.scenario, cluster=cluster, seed=seed)
        if self.load is None:
            return workload, scenario
        rate = self.load * cluster.capacity(workload)
        timed = (
            workload.scaled_to_rate(rate)
            if self.keep_arrival_gaps
            else workload.with_poisson_arrivals(rate, seed)
        )
        return timed, replace(scenario, arrivals=TimedArrivals())


ResultCallback: TypeAlias = Callable[[NamedPolicy, int, SimulationRun], None]
"""Is given every outcome, before the next run begins."""


def named_policies(names: Iterable[str]) -> tuple[NamedPolicy, ...]:
    """Of names of policies; `brh` is there with both predictors, and `brh_oracle` with that one."""
    made = []
    for name in names:
        if name == "brh_oracle":
            policy = RoutingPolicySettings(name="brh", predictor=Predictor.ORACLE)
        else:
            policy = RoutingPolicySettings(name=name)
        made.append(NamedPolicy(name, policy))
    return tuple(made)


def compare_policies(
    trial: ComparisonSetup,
    entered: Sequence[NamedPolicy],
    told: ComparisonProgress | None = None,
    kept: ResultCallback | None = None,
) -> tuple[PolicyResult, ...]:
    """Run every contender on every seed; results in the order of `entered`.

    Contenders meet the same requests at the same times on the same cluster, so differences are to
    be taken seed by seed. Raises what `simulate` raises.
    """
    found: Mapping[str, list[SimulationMetrics]] = {contender.label: [] for contender in entered}
    for seed in trial.seeds:
        workload, scenario = trial.scenario_of_seed(seed)
        for contender in entered:
            outcome = simulate(
                workload,
                replace(scenario, policy=contender.policy),
                None if told is None else _progress(told, contender.label, seed),
            )
            found[contender.label].append(outcome.metrics())
            if kept is not None:
                kept(contender, seed, outcome)
    return tuple(PolicyResult(contender, tuple(found[contender.label])) for contender in entered)


def interval(values: Sequence[float]) -> Interval:
    """Mean and half width of its 95 % confidence interval, by Student's t."""
    array = np.asarray(values, dtype=np.float64)
    if array.size < 2:
        return Interval(float(array.mean()), float("nan"))
    deviation = float(array.std(ddof=1)) / float(np.sqrt(array.size))
    return Interval(float(array.mean()), student_t_975(array.size - 1) * deviation)


def student_t_975(freedom: int) -> float:
    """The 97.5 % point of Student's t: exact to four digits up to 10 degrees of freedom, beyond by
    the expansion of Hill (CACM 396, 1970) in the normal's."""
    table = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
    if freedom <= len(table):
        return table[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


def _progress(told: ComparisonProgress, label: str, seed: int) -> Callable[[int], None]:
    return lambda done: told(label, seed, done)


def _relative(value: float, other: float) -> float:
    return value / other - 1 if other else float("nan")
