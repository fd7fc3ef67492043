"""What a step costs by the rows of its ranks: by a dead zone, or by the roofline of hardware."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import Placement
from equipoise.report.advice.dead_zone import DeadZone
from equipoise.report.advice.hardware import Roofline
from equipoise.report.placement.spread import Reals
from equipoise.report.replay.engine_model import Parts
from equipoise.report.replay.rank_rows import StepRows


def step_imbalance(rows: StepRows) -> Reals:
    """(steps, layers): max/mean - 1 of the ranks, NaN where a layer had no row."""
    mean = rows.mean(axis=2, dtype=np.float64)
    peak = rows.max(axis=2).astype(np.float64)
    ratio: Reals = np.divide(peak, mean, out=np.full(mean.shape, np.nan), where=mean > 0)
    return ratio - 1


def mean_of_layers(values: Reals) -> Reals:
    """(steps, layers) to (steps,), over the layers that are not NaN; NaN where none is."""
    known = ~np.isnan(values)
    total, count = np.where(known, values, 0.0).sum(axis=1), known.sum(axis=1)
    mean: Reals = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return mean


CHUNK = 1 << 20
"""Values of slots that are in memory at a time."""
ALMOST_ONE = 1.0 - 1e-12


@dataclass(frozen=True, eq=False)
class SlotOdds:
    """Where single steps send their rows.

    Attributes:
        counts: rows of experts, integers (steps, layers, experts).
        placement: the expert in each slot, (layers, slots).
        parts: part of its expert's rows that each slot gets, (layers, slots).
        ranks: a divisor of the slots.
    """

    counts: npt.NDArray[np.int32]
    placement: Placement
    parts: Parts
    ranks: int

    def active(self, batch: float) -> Reals:
        """(steps, layers, ranks): slots of each rank that get a row, expected.

        A slot gets none of n rows with the chance (1 - batch * part)^n.
        """
        layers, slots = self.placement.shape
        missed = np.log1p(-np.minimum(self.parts.astype(np.float64) * batch, ALMOST_ONE))
        experts = self.placement.astype(np.int64)[None]
        active = np.empty((len(self.counts), layers, self.ranks))
        size = max(1, CHUNK // (layers * slots))
        for first in range(0, len(self.counts), size):
            rows = np.take_along_axis(self.counts[first : first + size], experts, axis=2)
            chances = -np.expm1(rows * missed)
            by_rank = chances.reshape(len(rows), layers, self.ranks, -1)
            active[first : first + size] = by_rank.sum(axis=3)
        return active


class StepPrice(Protocol):
    """Time of a step."""

    @property
    def in_seconds(self) -> bool:
        """Whether it is seconds of experts alone; else a step on balanced ranks is 1."""
        ...

    @property
    def source(self) -> str:
        """What it rests on, for people."""
        ...

    def steps(self, rows: StepRows, odds: SlotOdds) -> Reals:
        """(steps,): time, NaN for a step without rows.

        Args:
            rows: of the ranks, (steps, layers, ranks).
            odds: of slots, in the same steps.
        """
        ...


@dataclass(frozen=True)
class DeadZonePrice:
    """A hinge in max/mean of the ranks of each layer, mean over layers.

    Attributes:
        dead_zone: its knee and slope.
    """

    dead_zone: DeadZone
    in_seconds: bool = False

    @property
    def source(self) -> str:
        """Knee, slope and where they come from."""
        zone = self.dead_zone
        return (
            f"a step takes equally long up to {zone.knee - 1:.3f} of imbalance, then "
            f"{zone.slope:.3f} of it longer for each 1.0 more ({zone.source})"
        )

    def steps(self, rows: StepRows, odds: SlotOdds) -> Reals:
        """By the imbalance of each layer: ranks wait for one another in every one."""
        return mean_of_layers(self.dead_zone.factor(step_imbalance(rows) + 1.0))


@dataclass(frozen=True)
class RooflinePrice:
    """Each layer takes as long as its slowest rank by the roofline.

    Attributes:
        roofline: of experts on the hardware.
        batch: part of the recorded rows that a step has, where the KV cache bounds it.
    """

    roofline: Roofline
    batch: float = 1.0
    in_seconds: bool = True

    @property
    def source(self) -> str:
        """Of what it is."""
        return f"the roofline of experts on {self.roofline.hardware.name}"

    def steps(self, rows: StepRows, odds: SlotOdds) -> Reals:
        """Sum over layers."""
        roofline = self.roofline
        reading = (
            odds.active(self.batch) * roofline.expert.size / roofline.hardware.bytes_per_second
        )
        rate = roofline.hardware.operations_per_second(roofline.expert.precision)
        row_seconds = self.batch * roofline.expert.operations_per_row / rate
        seconds = np.maximum(reading, rows.astype(np.float64) * row_seconds).max(axis=2)
        has_rows: npt.NDArray[np.bool_] = rows.max(axis=2) > 0
        total: Reals = np.where(has_rows, seconds, 0.0).sum(axis=1)
        return np.where(has_rows.any(axis=1), total, np.nan)
