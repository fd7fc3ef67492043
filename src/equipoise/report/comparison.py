"""Recorded rows as linear experts would serve them, and as a placement would."""

from dataclasses import dataclass
from typing import Any

from equipoise import __version__
from equipoise.balancer.formats.arrangement import Arrangement
from equipoise.balancer.formats.statistics import Statistics
from equipoise.report.forecast import plain
from equipoise.report.spread import Served, Spread, linear, serve

FIGURES = "mean", "std", "imbalance"


@dataclass(frozen=True)
class Comparison:
    """The same statistics, served in one way or two; linear first."""

    statistics: Statistics
    ranks: int
    served: tuple[Served, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain values; null where a layer had no rows."""
        return {
            "equipoise": __version__,
            "ranks": self.ranks,
            "experts": self.statistics.experts,
            "windows": self.statistics.windows,
            "layers": list(self.statistics.layers),
            "served": {
                found.name: {
                    "slots": found.slots,
                    "by_rank": _figures(found.by_rank),
                    "by_slot": _figures(found.by_slot),
                }
                for found in self.served
            },
        }


def compare(statistics: Statistics, placement: Arrangement | None, ranks: int) -> Comparison:
    """Raises `PlacementError` where the placement is of other layers or experts."""
    served = [serve("linear", statistics, linear(statistics, ranks))]
    if placement is not None:
        served.append(serve("placement", statistics, placement))
    return Comparison(statistics, ranks, tuple(served))


def _figures(spread: Spread) -> dict[str, Any]:
    columns = spread.mean, spread.std, spread.imbalance
    return {
        "average": {n: plain(v) for n, v in zip(FIGURES, spread.average, strict=True)},
        "layers": {n: [plain(v) for v in c] for n, c in zip(FIGURES, columns, strict=True)},
    }
