"""Columns of a comparison of policies: figure, unit, which direction is better, best policy.

Also which policies cannot be distinguished from the best, paired by seed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique
from math import floor, isnan, log10

from equipoise.balancer.requests.policy_comparison import Interval, PolicyResult, interval
from equipoise.report.simulation.result import SimulationResult

MAX_DECIMALS = 4
SHORT = 0.5
"""Seconds: a column of less is shown in milliseconds."""


@unique
class Better(Enum):
    """Which values win."""

    LESS = "less"
    MORE = "more"
    NEITHER = "neither"


@dataclass(frozen=True)
class FigureColumn:
    """A figure as tables show it.

    Attributes:
        figure: name of a field of `Figures`.
        head: what it is called.
        unit: of what is shown.
        scale: from the figure to that unit.
        better: which values win.
        about: in a sentence.
    """

    figure: str
    head: str
    unit: str
    scale: float
    better: Better
    about: str

    def fitted(self, results: Iterable[PolicyResult]) -> "FigureColumn":
        """The same in milliseconds, where it is in seconds and all means are short."""
        means = [result.interval(self.figure).mean for result in results]
        if self.unit != "s" or not any(mean > 0 for mean in means):
            return self
        short = max(mean for mean in means if mean > 0) < SHORT
        return replace(self, unit="ms", scale=self.scale * 1e3) if short else self

    def decimals(self, results: Iterable[PolicyResult]) -> int:
        """So many that the largest value of the column shows three digits, the smallest two."""
        means = [abs(result.interval(self.figure).mean * self.scale) for result in results]
        sizes = [floor(log10(size)) for size in means if size > 0]
        if not sizes:
            return 0
        return min(max(2 - max(sizes), 1 - min(sizes), 0), MAX_DECIMALS)

    def cell(self, value: Interval, decimals: int) -> str:
        """Mean, and after it the half width where there is one and a policy can be best."""
        mean, half = value.mean * self.scale, value.half * self.scale
        if isnan(mean):
            return "-"
        if isnan(half) or self.better is Better.NEITHER:
            return f"{mean:z,.{decimals}f}"
        if mean == half == 0:
            return "0"
        return f"{mean:z,.{decimals}f} \u00b1{half:z,.{decimals}f}"


_LESS, _MORE, _NEITHER = Better.LESS, Better.MORE, Better.NEITHER
COLUMNS = (
    FigureColumn("imbalance", "imbalance", "k tokens", 1e-3, _LESS,
           "tokens that could have been read while workers waited at the barrier"),
    FigureColumn("idle", "idle", "%", 1e2, _LESS, "of the time for reading, waited at the barrier"),
    FigureColumn("throughput", "throughput", "tokens/s", 1.0, _MORE, "tokens made"),
    FigureColumn("bound", "bound", "tokens/s", 1.0, _NEITHER,
           "tokens made, had every step's work been spread evenly"),
    FigureColumn("gap", "gap", "%", 1e2, _LESS, "how far throughput is below its bound"),
    FigureColumn("tpot_mean", "TPOT", "ms", 1e3, _LESS,
           "time per output token, mean over requests"),
    FigureColumn("tpot_p95", "TPOT P95", "ms", 1e3, _LESS, "its 95th percentile"),
    FigureColumn("tpot_p99", "TPOT P99", "ms", 1e3, _LESS, "its 99th percentile"),
    FigureColumn("ttft_mean", "TTFT", "s", 1.0, _LESS, "from arrival to the first token"),
    FigureColumn("ttft_p99", "TTFT P99", "s", 1.0, _LESS, "its 99th percentile"),
    FigureColumn("e2e_p99", "E2E P99", "s", 1.0, _LESS,
           "from arrival to the last token, 99th percentile"),
    FigureColumn("wait_mean", "wait", "s", 1.0, _LESS, "from arrival to a slot"),
    FigureColumn("wait_p99", "wait P99", "s", 1.0, _LESS, "its 99th percentile"),
    FigureColumn("wait_max", "longest wait", "s", 1.0, _LESS, "of any request"),
    FigureColumn("failed", "failed", "%", 1e2, _LESS, "of the requests"),
    FigureColumn("fairness", "fairness", "Jain", 1.0, _MORE,
           "Jain's index of the waits of small and large requests"),
    FigureColumn("occupancy", "slots taken", "%", 1e2, _NEITHER, "of all"),
)  # fmt: skip
"""In the order of tables. Not among them, but in the figures: `preempted` and `steps`."""
REPORT_ONLY = "bound", "tpot_p95", "wait_mean"
"""For which a terminal has no room."""
BY_FIGURE = {column.figure: column for column in COLUMNS}


@dataclass(frozen=True)
class ColumnBest:
    """Of one column.

    Attributes:
        column: which.
        best: label of the contender with the best mean.
        indistinguishable: labels of those with a difference to it, paired by seed, of which the
            95 % confidence interval includes 0; empty with one seed, where there are none.
    """

    column: FigureColumn
    best: str
    indistinguishable: tuple[str, ...]


def best_of_columns(results: Sequence[PolicyResult]) -> tuple[ColumnBest, ...]:
    """Every column that has a best: not those in which all are equal, or no policy has a figure."""
    bests = (
        _best_of_column(column, results)
        for column in COLUMNS
        if column.better is not Better.NEITHER
    )
    return tuple(best for best in bests if best is not None)


def paired_difference(result: PolicyResult, other: PolicyResult, figure: str) -> Interval:
    """Of the difference, seed by seed, in the figure's own unit."""
    pairs = zip(result.metrics, other.metrics, strict=True)
    return interval([getattr(a, figure) - getattr(b, figure) for a, b in pairs])


def indistinguishable_lines(
    comparison: SimulationResult, best: Sequence[ColumnBest]
) -> Iterator[str]:
    """What cannot be told apart, a line for each column, and one for those without a winner."""
    other_count = len(comparison.results) - 1
    if not best:
        yield (
            "no policy is better than another at anything" if other_count else "one policy: no best"
        )
        return
    none = [one.column.head for one in best if len(one.indistinguishable) == other_count]
    some = [one for one in best if 0 < len(one.indistinguishable) < other_count]
    if not none and not some:
        yield "every policy can be told from the best of every column (paired by seed, 95 %)"
        return
    if some:
        yield "cannot be told from the best of the column (paired by seed, 95 %):"
    for one in some:
        yield f"  {one.column.head}: {', '.join(one.indistinguishable)}"
    if none:
        yield f"no policy can be told from the best (paired by seed, 95 %): {', '.join(none)}"


def _best_of_column(column: FigureColumn, results: Sequence[PolicyResult]) -> ColumnBest | None:
    means = {r.named_policy.label: r.interval(column.figure).mean for r in results}
    finite_means = {label: mean for label, mean in means.items() if mean == mean}
    if len(set(finite_means.values())) < 2:
        return None
    choose = max if column.better is Better.MORE else min
    label = choose(finite_means, key=lambda one: finite_means[one])
    best = next(r for r in results if r.named_policy.label == label)
    other_results = (r for r in results if r is not best and r.named_policy.label in finite_means)
    alike = (r for r in other_results if _includes_zero(paired_difference(r, best, column.figure)))
    return ColumnBest(column, label, tuple(r.named_policy.label for r in alike))


def _includes_zero(difference: Interval) -> bool:
    return difference.low <= 0 <= difference.high
