"""What `equipoise simulate` has found."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from equipoise.balancer.requests.cluster import Cluster
from equipoise.balancer.requests.comparison import Result, Trial
from equipoise.balancer.requests.simulation import Saturated
from equipoise.balancer.requests.summary import Summary
from equipoise.report.simulation.seen import Seen

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
