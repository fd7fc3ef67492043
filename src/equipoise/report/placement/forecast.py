"""Imbalance before and after a plan, on the rows that it was made from, and the table of `plan`.

The table is 80 columns wide.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise import __version__
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.balancer.formats.statistics import ExpertStatistics
from equipoise.report.placement.spread import Reals, layout_load, linear, lower_bound, mean_known
from equipoise.report.terminal import ColourMode, TextStyle, styled
from equipoise.report.text import format_number, format_size, json_float, pluralize


@dataclass(frozen=True)
class Baseline:
    """What the plan is compared with: `name` is installed, or linear where nothing is."""

    name: str
    layout: ExpertPlacement

    @classmethod
    def of(
        cls, statistics: ExpertStatistics, installed: ExpertPlacement | None, ranks: int
    ) -> "Baseline":
        """The installed arrangement, or experts in their order on consecutive ranks."""
        if installed is None:
            return cls("linear", linear(statistics, ranks))
        return cls("installed", installed)


@dataclass(frozen=True)
class ForecastOptions:
    """What a plan was asked for, as far as its figures depend on it.

    Attributes:
        policy: how it was planned.
        objective: what is to be equal: tokens, or active_experts.
        capacities: of the ranks, in any unit; None for equal ones.
        expert_bytes: weights of one expert in one layer; None where unknown.
        sigma: standard deviations over windows that a rank's load was counted with.
    """

    policy: str
    objective: str = "tokens"
    capacities: tuple[float, ...] | None = None
    expert_bytes: int | None = None
    sigma: float = 0.0

    def planned_counts(self, statistics: ExpertStatistics) -> ExpertStatistics:
        """One window: rows, or windows in which an expert had any."""
        counts = statistics.counts
        if self.objective == "active_experts":
            counts = (counts > 0).astype(np.int64)
        return ExpertStatistics(counts.sum(axis=0, keepdims=True), statistics.layers)

    def imbalance(self, rows: Reals) -> Reals:
        """(layers,): max/mean - 1 of (layers, ranks) for what a rank can take, NaN without any."""
        if self.capacities is not None:
            rows = rows / (np.array(self.capacities) / np.mean(self.capacities))
            mean = (rows * self.capacities).sum(axis=1) / np.sum(self.capacities)
        else:
            mean = rows.mean(axis=1)
        peak = rows.max(axis=1)
        ratio: Reals = np.divide(peak, mean, out=np.full_like(mean, np.nan), where=mean > 0)
        return ratio - 1

    def bound(self, rows: ExpertStatistics, ranks: int, slots: int) -> Reals:
        """(layers,): no placement goes below; unknown where ranks differ."""
        if self.capacities is not None:
            return np.full(len(rows.layers), np.nan)
        return lower_bound(rows, ranks, slots)


@dataclass(frozen=True)
class Forecast:
    """One plan. Every imbalance is max/mean - 1 of the ranks, (layers,), NaN without rows.

    Where ranks differ it is of what each has for what it can take.

    Attributes:
        layout: what was planned.
        baseline_name: what it is compared with.
        before: imbalance of that.
        after: imbalance of the plan, with its shares.
        even: imbalance of the plan where copies take even parts.
        bound: no placement in so many slots goes below.
        moves: copies that their rank did not hold.
        layer_moves: the same by layer.
        windows: windows that were summed.
        options: what the plan was asked for.
        seconds: that planning took.
    """

    layout: ExpertPlacement
    baseline_name: str
    before: Reals
    after: Reals
    even: Reals
    bound: Reals
    moves: int
    layer_moves: npt.NDArray[np.int64]
    windows: int
    options: ForecastOptions
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As plain values; null where a layer had no rows."""
        curves = {self.baseline_name: self.before} | self.curves
        return {
            "equipoise": __version__,
            "policy": self.options.policy,
            "objective": self.options.objective,
            "capacities": self.options.capacities,
            "ranks": self.layout.ranks,
            "slots": self.layout.slots,
            "experts": self.layout.experts,
            "layers": list(self.layout.layers),
            "windows": self.windows,
            "sigma": self.options.sigma,
            "digest": self.layout.digest,
            "moves": self.moves,
            "bytes_moved": self.bytes_moved,
            "slots_total": self.layout.placement.size,
            "plan_seconds": self.seconds,
            "imbalance": {name: json_float(mean_known(values)) for name, values in curves.items()},
            "by_layer": {name: [json_float(v) for v in values] for name, values in curves.items()}
            | {"moves": self.layer_moves.tolist()},
        }

    @property
    def bytes_moved(self) -> int | None:
        """Of all copies that move; None where the size of an expert is unknown."""
        size = self.options.expert_bytes
        return None if size is None else size * self.moves

    @property
    def curves(self) -> dict[str, Reals]:
        """Imbalance of the plan by layer, in three ways."""
        return {"planned": self.after, "even_split": self.even, "bound": self.bound}


def forecast(
    statistics: ExpertStatistics,
    layout: ExpertPlacement,
    before: Baseline,
    asked: ForecastOptions,
    *,
    moves: int,
    layer_moves: npt.NDArray[np.int64],
    seconds: float,
) -> Forecast:
    """Measure a plan on the rows that it was made from, all windows summed."""
    rows = asked.planned_counts(statistics)
    even = ExpertPlacement.with_even_shares(layout.placement, layout.ranks, layout.layers)
    old, new, halved = (
        asked.imbalance(layout_load("", rows, candidate).rank_rows)
        for candidate in (before.layout, layout, even)
    )
    return Forecast(
        layout=layout,
        baseline_name=before.name,
        before=old,
        after=new,
        even=halved,
        bound=asked.bound(rows, layout.ranks, layout.slots),
        moves=moves,
        layer_moves=layer_moves,
        windows=statistics.windows,
        options=asked,
        seconds=seconds,
    )


WIDTHS = 14, 12, 12, 12
COLUMNS = "", "imbalance", "worst", "in layer"
NAMES = {"even_split": "  split evenly", "bound": "lower bound"}


def render(forecast: Forecast, colours: ColourMode) -> str:
    """The whole table; its last line says what has to move."""
    lines = [
        styled(_title(forecast), TextStyle.BOLD, colours),
        styled(_source(forecast), TextStyle.DIM, colours),
        "",
        styled(_aligned(COLUMNS), TextStyle.DIM, colours),
        _row(forecast, forecast.baseline_name, forecast.before),
    ]
    for name, values in forecast.curves.items():
        row = _row(forecast, NAMES.get(name, name), values)
        lines.append(styled(row, TextStyle.BOLD, colours) if name == "planned" else row)
    return "\n".join([*lines, "", _moves(forecast)])


def _title(forecast: Forecast) -> str:
    layout = forecast.layout
    return (
        f"{pluralize(len(layout.layers), 'layer')} of {pluralize(layout.experts, 'expert')} "
        f"in {pluralize(layout.slots, 'slot')} on {pluralize(layout.ranks, 'rank')}"
    )


def _source(forecast: Forecast) -> str:
    windows = pluralize(forecast.windows, "window")
    options = forecast.options
    fresh = options.policy == "incremental" and forecast.baseline_name == "linear"
    policy = "connected, as nothing is installed" if fresh else options.policy
    lines = [f"{windows}; policy {policy}; planned in {forecast.seconds:.3f} s"]
    if forecast.windows > 1:
        lines.append("figures are of all windows summed")
        if options.sigma:
            lines.append(
                f"sigma {options.sigma:g}: planned for the mean load of a rank "
                "and so many standard deviations"
            )
    if options.objective != "tokens":
        lines.append("figures are of experts that have any rows in a window, not of rows")
    if options.capacities is not None:
        least, most = min(options.capacities), max(options.capacities)
        lines.append(f"capacities {least:g} to {most:g}: figures are for what a rank can take")
    return "\n".join(lines)


def _row(forecast: Forecast, name: str, values: Reals) -> str:
    worst = int(np.nan_to_num(values, nan=-1.0).argmax())
    layer = str(forecast.layout.layers[worst])
    return _aligned(
        (name, format_number(mean_known(values)), format_number(float(values[worst])), layer)
    )


def _aligned(texts: tuple[str, ...]) -> str:
    first = f"{texts[0]:<{WIDTHS[0]}}"
    rest = zip(texts[1:], WIDTHS[1:], strict=True)
    return (first + "".join(f" {text:>{width - 1}}" for text, width in rest)).rstrip()


def _moves(forecast: Forecast) -> str:
    total = forecast.layout.placement.size
    size = forecast.options.expert_bytes
    if forecast.baseline_name == "linear":
        return f"nothing installed: {pluralize(total, 'slot')} to fill{_weight(size, total)}"
    busy = int((forecast.layer_moves > 0).sum())
    share = forecast.moves / total
    return (
        f"copies to move: {forecast.moves:,} = {share:.2%} of {total:,} slots, in {busy} of "
        f"{len(forecast.layer_moves)} layers{_weight(size, forecast.moves)}"
    )


def _weight(size: int | None, copies: int) -> str:
    return "" if size is None else f"\n{format_size(size * copies)} of weights"
