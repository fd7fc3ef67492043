"""What a plan would bring: imbalance before and after, on the rows that it was planned for."""

from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise import __version__
from equipoise.balancer.formats.arrangement import Arrangement
from equipoise.balancer.formats.statistics import Statistics
from equipoise.report.spread import Reals, linear, lower_bound, mean_known, serve, summed


@dataclass(frozen=True)
class Before:
    """What the plan is compared with: `name` is installed, or linear where nothing is."""

    name: str
    layout: Arrangement

    @classmethod
    def of(cls, statistics: Statistics, installed: Arrangement | None, ranks: int) -> "Before":
        """The installed arrangement, or experts in their order on consecutive ranks."""
        if installed is None:
            return cls("linear", linear(statistics, ranks))
        return cls("installed", installed)


@dataclass(frozen=True)
class Forecast:
    """One plan. Every imbalance is max/mean - 1 of the ranks, (layers,), NaN without rows.

    Attributes:
        layout: what was planned.
        before_name: what it is compared with.
        before: imbalance of that.
        after: imbalance of the plan, with its shares.
        even: imbalance of the plan where copies take even parts.
        bound: no placement in so many slots goes below.
        moves: copies that their rank did not hold.
        layer_moves: the same by layer.
        windows: windows that were summed.
        policy: how it was planned.
        seconds: that planning took.
    """

    layout: Arrangement
    before_name: str
    before: Reals
    after: Reals
    even: Reals
    bound: Reals
    moves: int
    layer_moves: npt.NDArray[np.int64]
    windows: int
    policy: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As plain values; null where a layer had no rows."""
        curves = {self.before_name: self.before} | self.curves
        return {
            "equipoise": __version__,
            "policy": self.policy,
            "ranks": self.layout.ranks,
            "slots": self.layout.slots,
            "experts": self.layout.experts,
            "layers": list(self.layout.layers),
            "windows": self.windows,
            "digest": self.layout.digest,
            "moves": self.moves,
            "slots_total": self.layout.placement.size,
            "plan_seconds": self.seconds,
            "imbalance": {name: plain(mean_known(values)) for name, values in curves.items()},
            "by_layer": {name: [plain(v) for v in values] for name, values in curves.items()}
            | {"moves": self.layer_moves.tolist()},
        }

    @property
    def curves(self) -> dict[str, Reals]:
        """Imbalance of the plan by layer, in three ways."""
        return {"planned": self.after, "even_split": self.even, "bound": self.bound}


def forecast(
    statistics: Statistics,
    layout: Arrangement,
    before: Before,
    *,
    moves: int,
    layer_moves: npt.NDArray[np.int64],
    policy: str,
    seconds: float,
) -> Forecast:
    """Measure a plan on the rows that it was made from, all windows summed."""
    rows = summed(statistics)
    even = Arrangement.even(layout.placement, layout.ranks, layout.layers)
    old, new, halved = (
        serve("", rows, found).by_rank.imbalance for found in (before.layout, layout, even)
    )
    return Forecast(
        layout=layout,
        before_name=before.name,
        before=old,
        after=new,
        even=halved,
        bound=lower_bound(rows, layout.ranks, layout.slots),
        moves=moves,
        layer_moves=layer_moves,
        windows=statistics.windows,
        policy=policy,
        seconds=seconds,
    )


def plain(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return None if isnan(value) else float(value)
