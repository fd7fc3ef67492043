"""How evenly rows spread over ranks and slots: the figures of Table 1 of TensorRT-LLM's blog 4.

Of every layer a matrix (windows, units), where a unit is a rank or a slot, and of that the mean
over windows of its rows' mean, sample standard deviation, and max/mean - 1. A window in which a
layer had no rows is left out.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import SHARE_ONE, ExpertShape, initial_placement
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.balancer.formats.statistics import ExpertStatistics, LayerNumbering
from equipoise.hal.errors import PlacementError

Reals = npt.NDArray[np.float64]
PEAK = 0.99
"""Quantile over windows that stands for the worst: the largest of many is an accident."""


@dataclass(frozen=True)
class LoadSpread:
    """Each float64 (layers,), NaN where a layer had no rows.

    Attributes:
        mean: rows of a unit.
        std: sample standard deviation of the units.
        imbalance: max/mean - 1.
    """

    mean: Reals
    std: Reals
    imbalance: Reals

    @property
    def average(self) -> tuple[float, float, float]:
        """Mean, std and imbalance, each averaged over the layers that had rows."""
        return mean_known(self.mean), mean_known(self.std), mean_known(self.imbalance)

    @property
    def worst(self) -> int:
        """Place of the layer with the largest imbalance."""
        return int(np.nan_to_num(self.imbalance, nan=-1.0).argmax())


@dataclass(frozen=True)
class LayoutLoad:
    """Statistics as an arrangement would serve them.

    Attributes:
        name: of the arrangement, for people.
        slots: of all ranks.
        by_rank: spread over ranks.
        by_slot: spread over slots.
        rank_rows: float64 (layers, ranks), summed over windows.
        rank_peaks: float64 (layers, ranks), 99th percentile over windows of the rank's rows over
            the mean rank's; NaN where the layer had no rows.
        window_imbalance: float64 (layers, windows), max/mean - 1 of the ranks; NaN without rows.
    """

    name: str
    slots: int
    by_rank: LoadSpread
    by_slot: LoadSpread
    rank_rows: Reals
    rank_peaks: Reals
    window_imbalance: Reals

    @property
    def by_window(self) -> Reals:
        """(windows,): mean over the layers that had rows in the window; NaN where none had."""
        return np.array([mean_known(layers) for layers in self.window_imbalance.T])

    def quantile_over_windows(self, part: float) -> Reals:
        """(layers,): of the imbalance; NaN where a layer had no rows."""
        known = (layer[~np.isnan(layer)] for layer in self.window_imbalance)
        return np.array([np.quantile(layer, part) if layer.size else np.nan for layer in known])


def layout_load(name: str, statistics: ExpertStatistics, layout: ExpertPlacement) -> LayoutLoad:
    """Raises `PlacementError` where the arrangement is of other layers or experts."""
    rows = layout_rows(statistics, layout)
    part = replica_shares(layout)
    by_rank, by_slot, summed, peaks, by_window = [], [], [], [], []
    # Layer by layer: all slots of all windows of all layers may be more than memory.
    for place, row in enumerate(rows):
        slots = statistics.counts[:, place, layout.placement[row]] * part[row]
        ranks = slots.reshape(statistics.windows, layout.ranks, -1).sum(axis=2)
        by_rank.append(layer_spread(ranks))
        by_slot.append(layer_spread(slots))
        summed.append(ranks.sum(axis=0))
        peaks.append(peak_load(ranks))
        by_window.append(window_imbalance(ranks))
    return LayoutLoad(
        name,
        layout.slots,
        _spread(by_rank),
        _spread(by_slot),
        np.stack(summed),
        np.stack(peaks),
        np.stack(by_window),
    )


def window_imbalance(rows: Reals) -> Reals:
    """max/mean - 1 of one layer's units in each window, from (windows, units); NaN without rows."""
    mean = rows.mean(axis=1)
    ratio = np.divide(rows.max(axis=1), mean, out=np.full(len(rows), np.nan), where=mean > 0)
    return np.asarray(ratio - 1)


def peak_load(rows: Reals) -> Reals:
    """(units,): 99th percentile of a unit's rows over the mean unit's; NaN without rows."""
    rows = rows[rows.sum(axis=1) > 0]
    if not rows.size:
        return np.full(rows.shape[1], np.nan)
    return np.asarray(np.quantile(rows / rows.mean(axis=1, keepdims=True), PEAK, axis=0))


def layer_spread(rows: Reals) -> tuple[float, float, float]:
    """Mean, std and imbalance of one layer's (windows, units); NaN where it had no rows."""
    rows = rows[rows.sum(axis=1) > 0]
    if not rows.size:
        return np.nan, np.nan, np.nan
    mean = rows.mean(axis=1)
    std = rows.std(axis=1, ddof=1).mean() if rows.shape[1] > 1 else 0.0
    return float(mean.mean()), float(std), float(window_imbalance(rows).mean())


def sum_windows(statistics: ExpertStatistics) -> ExpertStatistics:
    """One window: the rows of all of them."""
    return ExpertStatistics(statistics.counts.sum(axis=0, keepdims=True), statistics.layers)


def linear(statistics: ExpertStatistics, ranks: int) -> ExpertPlacement:
    """Experts in their order on consecutive ranks, in as few slots as can be.

    Where ranks do not divide experts, the last slots of some ranks hold second copies. Raises
    `PlacementError`.
    """
    slots = -(-statistics.experts // ranks) * ranks
    shape = ExpertShape(len(statistics.layers), statistics.experts, slots, ranks)
    return ExpertPlacement.with_even_shares(initial_placement(shape), ranks, statistics.layers)


def replica_shares(layout: ExpertPlacement) -> Reals:
    """(layers, slots): the part of its expert that each slot takes; exact where all are even."""
    if not layout.is_even:
        return layout.shares / SHARE_ONE
    parts = np.empty(layout.placement.shape)
    for row, experts in enumerate(layout.placement):
        parts[row] = 1 / np.bincount(experts)[experts]
    return parts


def layout_rows(statistics: ExpertStatistics, layout: ExpertPlacement) -> list[int]:
    """Which row of the arrangement is each layer of the statistics. Raises `PlacementError`."""
    if layout.experts != statistics.experts:
        raise PlacementError(
            f"places {layout.experts} experts, and the statistics are of {statistics.experts}"
        )
    # A file that numbers its layers from 0 perhaps counts those with experts only; then statistics
    # of as many layers are of the same ones.
    by_position = layout.numbering is LayerNumbering.UNKNOWN and len(layout.layers) == len(
        statistics.layers
    )
    numbers = statistics.layers if by_position else layout.layers
    row_of_layer = {layer: row for row, layer in enumerate(numbers)}
    for layer in statistics.layers:
        if layer not in row_of_layer:
            raise PlacementError(f"has no layer {layer}, which the statistics have")
    return [row_of_layer[layer] for layer in statistics.layers]


def select_layers(layout: ExpertPlacement, statistics: ExpertStatistics) -> ExpertPlacement:
    """The arrangement of just the layers of the statistics. Raises `PlacementError`."""
    rows = layout_rows(statistics, layout)
    return replace(
        layout,
        placement=layout.placement[rows],
        shares=layout.shares[rows],
        layers=statistics.layers,
    )


def lower_bound(statistics: ExpertStatistics, ranks: int, slots: int) -> Reals:
    """(layers,): the imbalance that no placement can go below, NaN where a layer had no rows.

    No rank may have more than t rows only if every expert has its rows / t copies, rounded up, and
    those are at most the slots. The least such t is found by halving.
    """
    load = statistics.counts.sum(axis=0).astype(np.float64)
    mean = load.sum(axis=1) / ranks
    low, high = mean.copy(), np.maximum(load.max(axis=1), mean)
    for _ in range(60):
        middle = np.maximum((low + high) / 2, np.finfo(float).tiny)
        copies = np.maximum(np.ceil(load / middle[:, None] - 1e-9), 1)
        fits = copies.sum(axis=1) <= slots
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    # The mean itself may do, which halving comes near to and does not reach.
    bound = np.where(high <= mean * (1 + 1e-9), mean, low)
    ratio: Reals = np.divide(bound, mean, out=np.full_like(mean, np.nan), where=mean > 0)
    return ratio - 1


def mean_known(values: Reals) -> float:
    """Mean of the values that are known; NaN where none is."""
    numbers = values[~np.isnan(values)]
    return float(numbers.mean()) if numbers.size else float("nan")


def _spread(rows: list[tuple[float, float, float]]) -> LoadSpread:
    mean, std, imbalance = np.array(rows, dtype=np.float64).T
    return LoadSpread(mean, std, imbalance)
