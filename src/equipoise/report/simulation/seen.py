"""What pictures need of the outcomes of runs, and no more: outcomes of big runs are large."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from equipoise.balancer.requests.comparison import Contender
from equipoise.balancer.requests.outcome import Outcome, Reals

TRAJECTORY = 4000
"""Steps of which the load of every worker is drawn."""
QUANTILES = np.linspace(0.0, 1.0, 201)
CLASSES = 10
"""Of requests by size, as for the figure of fairness."""
Loads = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Trace:
    """The first steps of one run; k <= `TRAJECTORY`.

    Attributes:
        loads: KV tokens by worker, [k, workers].
        clock: seconds at which each step began, [k].
        seconds: that each took, [k].
        largest: work of the fullest worker, [k].
        warm: first step that figures are taken of.
    """

    loads: Loads
    clock: Reals
    seconds: Reals
    largest: Reals
    warm: int

    @classmethod
    def of(cls, outcome: Outcome) -> "Trace":
        """Copies: the outcome can go."""
        steps, kept = outcome.steps, len(outcome.steps.loads)
        return cls(
            steps.loads.copy(),
            steps.clock[:kept].copy(),
            steps.seconds[:kept].copy(),
            steps.largest[:kept].copy(),
            outcome.window.start,
        )


@dataclass(frozen=True, eq=False)
class Seen:
    """Of one contender.

    Attributes:
        trace: of its first seed.
        balance: quantiles of mean / largest work over steps at `QUANTILES`, mean over seeds.
        sizes: mean prompt of each class of requests by size, mean over seeds, [classes].
        waits: mean wait of each, seconds.
    """

    trace: Trace
    balance: Reals
    sizes: Reals
    waits: Reals


@dataclass
class Watch:
    """Is shown every outcome, and keeps what pictures need."""

    first: dict[str, Trace] = field(default_factory=dict)
    balances: dict[str, list[Reals]] = field(default_factory=dict)
    classes: dict[str, list[tuple[Reals, Reals]]] = field(default_factory=dict)

    def keep(self, contender: Contender, seed: int, outcome: Outcome) -> None:
        """As `compare` hands it out; contenders whose requests all failed are left out."""
        if not outcome.balance.size or not outcome.waits.size:
            return
        label = contender.label
        if label not in self.first:
            self.first[label] = Trace.of(outcome)
        self.balances.setdefault(label, []).append(np.quantile(outcome.balance, QUANTILES))
        self.classes.setdefault(label, []).append(by_size(outcome))

    def seen(self) -> dict[str, Seen]:
        """By label."""
        return {
            label: Seen(trace, _mean(self.balances[label]), *self._classes(label))
            for label, trace in self.first.items()
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
