"""What pictures need of the outcomes of runs, and no more: outcomes of big runs are large.

What `equipoise simulate` has found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from equipoise.balancer.requests.cluster import Cluster
from equipoise.balancer.requests.policy_comparison import Contender, Result, Trial
from equipoise.balancer.requests.simulation import Saturated
from equipoise.balancer.requests.simulation_run import Outcome, Reals
from equipoise.balancer.requests.workload import Summary

TRAJECTORY = 4000
"""Steps of which the load of every worker is drawn."""
POINTS = 200
"""Of a line: steps between are left out."""
KEPT = 1 << 22
"""Loads that a run keeps: 32 MiB, until it has been looked at."""
EXCERPT = 12
"""Steps that are drawn one by one."""
QUANTILES = np.linspace(0.0, 1.0, 201)
CLASSES = 10
"""Of requests by size, as for the figure of fairness."""
Loads = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Lines:
    """Loads of the first steps of a run; k <= about `POINTS`.

    Attributes:
        steps: their numbers, [k].
        loads: KV tokens by worker, [k, workers].
        warm: first step that figures are taken of.
    """

    steps: Loads
    loads: Loads
    warm: int

    @classmethod
    def of(cls, outcome: Outcome) -> "Lines":
        """Copies: the outcome can go."""
        count = min(len(outcome.steps.loads), TRAJECTORY)
        steps = np.arange(0, count, max(1, count // POINTS))
        return cls(steps, outcome.steps.loads[steps], outcome.window.start)


@dataclass(frozen=True, eq=False)
class Excerpt:
    """A few consecutive steps of a run, k <= `EXCERPT`.

    Attributes:
        loads: KV tokens by worker, [k, workers].
        clock: seconds at which each step began, [k].
        seconds: that each took, [k].
        largest: work of the fullest worker, [k].
    """

    loads: Loads
    clock: Reals
    seconds: Reals
    largest: Reals

    @classmethod
    def of(cls, outcome: Outcome) -> "Excerpt":
        """Those whose idle part is nearest to the whole run's; copies."""
        steps, first = outcome.steps, typical(outcome)
        part = slice(first, min(first + EXCERPT, len(steps.loads)))
        return cls(
            steps.loads[part].copy(),
            steps.clock[part].copy(),
            steps.seconds[part].copy(),
            steps.largest[part].copy(),
        )


def typical(outcome: Outcome) -> int:
    """First of `EXCERPT` steps that stand for the run: of its window, as far as loads were kept."""
    last = len(outcome.steps.loads) - EXCERPT
    start: int = outcome.window.start
    if start >= last:
        return max(last, 0)
    balance = outcome.balance[: last - start + EXCERPT]
    means = np.convolve(balance, np.full(EXCERPT, 1 / EXCERPT), mode="valid")
    if not means.size:
        return start
    return start + int(np.abs(means - outcome.balance.mean()).argmin())


@dataclass(frozen=True, eq=False)
class Seen:
    """Of one contender.

    Attributes:
        lines: of its first seed.
        excerpt: of the same.
        balance: quantiles of mean / largest work over steps at `QUANTILES`, mean over seeds.
        sizes: mean prompt of each class of requests by size, mean over seeds, [classes].
        waits: mean wait of each, seconds.
    """

    lines: Lines
    excerpt: Excerpt
    balance: Reals
    sizes: Reals
    waits: Reals


@dataclass
class Watch:
    """Is shown every outcome, and keeps what pictures need."""

    first: dict[str, tuple[Lines, Excerpt]] = field(default_factory=dict)
    balances: dict[str, list[Reals]] = field(default_factory=dict)
    classes: dict[str, list[tuple[Reals, Reals]]] = field(default_factory=dict)

    def keep(self, contender: Contender, seed: int, outcome: Outcome) -> None:
        """As `compare` hands it out; contenders whose requests all failed are left out."""
        if not outcome.balance.size or not outcome.waits.size:
            return
        label = contender.label
        if label not in self.first:
            self.first[label] = Lines.of(outcome), Excerpt.of(outcome)
        self.balances.setdefault(label, []).append(np.quantile(outcome.balance, QUANTILES))
        self.classes.setdefault(label, []).append(by_size(outcome))

    def seen(self) -> dict[str, Seen]:
        """By label."""
        return {
            label: Seen(*first, _mean(self.balances[label]), *self._classes(label))
            for label, first in self.first.items()
        }

    def _classes(self, label: str) -> tuple[Reals, Reals]:
        sizes, waits = zip(*self.classes[label], strict=True)
        fewest = min(len(one) for one in sizes)
        return _mean([s[:fewest] for s in sizes]), _mean([w[:fewest] for w in waits])


def by_size(outcome: Outcome) -> tuple[Reals, Reals]:
    """Mean prompt and mean wait of `CLASSES` classes of as many requests, small ones first; fewer
    where there are fewer requests."""
    prompts, waits = outcome.workload.prompts[outcome.measured], outcome.waits
    order = np.array_split(np.argsort(prompts, kind="stable"), CLASSES)
    parts = [part for part in order if part.size]
    return (
        np.array([prompts[part].mean() for part in parts]),
        np.array([waits[part].mean() for part in parts]),
    )


def _mean(rows: Sequence[Reals]) -> Reals:
    return np.asarray(np.mean(rows, axis=0), dtype=np.float64)


REFERENCE = "fit"
"""The default policy: differences are to it, where it is among the contenders."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What was simulated, as the first seed has it.

    Attributes:
        workload: its name.
        notes: what reading it dropped, sorted or estimated.
        sampling: what seeds differ in, in words.
        arrivals: how requests came, in words.
        requests: figures of the requests.
        cluster: with the time of a step.
        full_load: KV tokens of a worker whose slots are all taken.
        capacity: requests a second at most.
        rate: requests a second that came; None where they always waited.
    """

    workload: str
    notes: tuple[str, ...]
    sampling: str
    arrivals: str
    requests: Summary
    cluster: Cluster
    full_load: float
    capacity: float
    rate: float | None

    @classmethod
    def of(cls, trial: Trial, sampling: str, arrivals: str) -> "Subject":
        """The first seed's. Raises what drawing raises."""
        workload, scenario = trial.staged(trial.seeds[0])
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
            rate=None if isinstance(scenario.arrivals, Saturated) else requests.rate,
        )


@dataclass(frozen=True)
class Point:
    """One value of what is swept, and what everybody did there."""

    value: float
    results: tuple[Result, ...]


@dataclass(frozen=True)
class Sweep:
    """The same again, over `load` or over `workers`."""

    over: str
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """All of it.

    Attributes:
        subject: what was simulated.
        seeds: a run of each contender for each.
        results: by contender, in the order of tables.
        seen: by label, what pictures are drawn of.
        sweep: None without one.
    """

    subject: Subject
    seeds: tuple[int, ...]
    results: tuple[Result, ...]
    seen: Mapping[str, Seen] = field(default_factory=dict)
    sweep: Sweep | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Of the contenders."""
        return tuple(result.contender.label for result in self.results)

    @property
    def reference(self) -> Result:
        """The default policy, or the first contender where it is not among them."""
        named = {result.contender.label: result for result in self.results}
        return named.get(REFERENCE, self.results[0])
