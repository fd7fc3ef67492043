"""Compares policies on the same workloads over several seeds, with confidence intervals."""

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
"""Builds the workload of a seed."""
ComparisonProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with the policy's label, the seed, and the number of ended requests of this run."""


@dataclass(frozen=True)
class NamedPolicy:
    """A policy with its label in tables."""

    label: str
    policy: RoutingPolicySettings


@dataclass(frozen=True)
class Interval:
    """A mean with half the width of its 95 % confidence interval (Student's t over seeds), which is
    NaN with one seed."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half


@dataclass(frozen=True)
class PolicyResult:
    """The metrics of one policy, one run per seed."""

    named_policy: NamedPolicy
    metrics: tuple[SimulationMetrics, ...]

    def interval(self, figure: str) -> Interval:
        """Returns the interval of a metric, by name."""
        return interval([getattr(run, figure) for run in self.metrics])

    def relative_to(self, other: "PolicyResult", figure: str) -> Interval:
        """Returns the interval of the relative difference to `other` by seed: 0.1 is 10 % more."""
        pairs = zip(self.metrics, other.metrics, strict=True)
        return interval([_relative(getattr(a, figure), getattr(b, figure)) for a, b in pairs])


@dataclass(frozen=True, kw_only=True)
class ComparisonSetup:
    """Workloads, seeds and scenario of a comparison.

    Attributes:
        workload_factory: builds the workload of a seed.
        seeds: each policy runs once per seed.
        scenario: its policy and seed are replaced.
        fixed_share: fixed part of a step at full load; None: the scenario's step time as it is.
        load: arrival rate as a fraction of the capacity (Poisson); None: the scenario's arrivals.
        keep_arrival_gaps: scale the workload's own times to the load, instead of Poisson arrivals.
    """

    workload_factory: WorkloadFactory
    seeds: Sequence[int]
    scenario: Scenario
    fixed_share: float | None = 0.5
    load: float | None = None
    keep_arrival_gaps: bool = False

    def scenario_of_seed(self, seed: int) -> tuple[Workload, Scenario]:
        """Returns the workload of a seed, with arrival times, and the scenario to run it in."""
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
"""Called with every run, before the next one begins."""


def named_policies(names: Iterable[str]) -> tuple[NamedPolicy, ...]:
    """Returns policies by name; `brh_oracle` is `brh` with the oracle as its predictor."""
    policies = []
    for name in names:
        if name == "brh_oracle":
            policy = RoutingPolicySettings(name="brh", predictor=Predictor.ORACLE)
        else:
            policy = RoutingPolicySettings(name=name)
        policies.append(NamedPolicy(name, policy))
    return tuple(policies)


def compare_policies(
    setup: ComparisonSetup,
    policies: Sequence[NamedPolicy],
    progress: ComparisonProgress | None = None,
    on_result: ResultCallback | None = None,
) -> tuple[PolicyResult, ...]:
    """Runs every policy on every seed; returns results in the order of `policies`.

    All policies get the same requests at the same times on the same cluster, so differences should
    be taken seed by seed. Raises what `simulate` raises.
    """
    metrics: Mapping[str, list[SimulationMetrics]] = {
        named_policy.label: [] for named_policy in policies
    }
    for seed in setup.seeds:
        workload, scenario = setup.scenario_of_seed(seed)
        for named_policy in policies:
            run = simulate(
                workload,
                replace(scenario, policy=named_policy.policy),
                None if progress is None else _progress(progress, named_policy.label, seed),
            )
            metrics[named_policy.label].append(run.metrics())
            if on_result is not None:
                on_result(named_policy, seed, run)
    return tuple(
        PolicyResult(named_policy, tuple(metrics[named_policy.label])) for named_policy in policies
    )


def interval(values: Sequence[float]) -> Interval:
    """Returns the mean of `values` with its 95 % confidence interval, by Student's t."""
    array = np.asarray(values, dtype=np.float64)
    if array.size < 2:
        return Interval(float(array.mean()), float("nan"))
    deviation = float(array.std(ddof=1)) / float(np.sqrt(array.size))
    return Interval(float(array.mean()), student_t_975(array.size - 1) * deviation)


def student_t_975(freedom: int) -> float:
    """Returns the 97.5 % quantile of Student's t.

    Exact to four digits up to 10 degrees of freedom; above, by Hill's expansion (CACM 396, 1970).
    """
    table = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
    if freedom <= len(table):
        return table[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


def _progress(progress: ComparisonProgress, label: str, seed: int) -> Callable[[int], None]:
    return lambda done: progress(label, seed, done)


def _relative(value: float, other: float) -> float:
    return value / other - 1 if other else float("nan")
