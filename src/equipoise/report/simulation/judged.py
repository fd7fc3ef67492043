"""Which router is best at what, and which cannot be told from it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from equipoise.balancer.requests.comparison import Interval, Result, interval
from equipoise.report.simulation.columns import COLUMNS, Better, Column
from equipoise.report.simulation.simulated import Simulated


@dataclass(frozen=True)
class Judged:
    """Of one column.

    Attributes:
        column: which.
        best: label of the contender with the best mean.
        alike: labels of those whose difference to it, paired by seed, has a 95 % confidence
            interval that includes 0; empty with one seed, where there are none.
    """

    column: Column
    best: str
    alike: tuple[str, ...]


def judge(results: Sequence[Result]) -> tuple[Judged, ...]:
    """Every column that has a best: not those in which all are equal, or nobody has a figure."""
    found = (_judged(column, results) for column in COLUMNS if column.better is not Better.NEITHER)
    return tuple(judged for judged in found if judged is not None)


def paired(result: Result, other: Result, figure: str) -> Interval:
    """Of the difference, seed by seed, in the figure's own unit."""
    pairs = zip(result.figures, other.figures, strict=True)
    return interval([getattr(a, figure) - getattr(b, figure) for a, b in pairs])


def alike_lines(found: Simulated, judged: Sequence[Judged]) -> Iterator[str]:
    """What cannot be told apart, a line for each column, and one for those without a winner."""
    others = len(found.results) - 1
    if not judged:
        yield "no policy is better than another at anything" if others else "one policy: no best"
        return
    none = [one.column.head for one in judged if len(one.alike) == others]
    some = [one for one in judged if 0 < len(one.alike) < others]
    if not none and not some:
        yield "every policy can be told from the best of every column (paired by seed, 95 %)"
        return
    if some:
        yield "cannot be told from the best of the column (paired by seed, 95 %):"
    for one in some:
        yield f"  {one.column.head}: {', '.join(one.alike)}"
    if none:
        yield f"no policy can be told from the best (paired by seed, 95 %): {', '.join(none)}"


def _judged(column: Column, results: Sequence[Result]) -> Judged | None:
    means = {r.contender.label: r.interval(column.figure).mean for r in results}
    known = {label: mean for label, mean in means.items() if mean == mean}
    if len(set(known.values())) < 2:
        return None
    choose = max if column.better is Better.MORE else min
    label = choose(known, key=lambda one: known[one])
    best = next(r for r in results if r.contender.label == label)
    others = (r for r in results if r is not best and r.contender.label in known)
    alike = (r for r in others if _includes_zero(paired(r, best, column.figure)))
    return Judged(column, label, tuple(r.contender.label for r in alike))


def _includes_zero(difference: Interval) -> bool:
    return difference.low <= 0 <= difference.high
