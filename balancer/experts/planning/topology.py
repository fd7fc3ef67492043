"""The ranks that a plan is for: capacities, nodes, and the loss that it has to survive."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import SHARE_ONE, ExpertShape, Placement
from equipoise.balancer.experts.planning.inputs import MAX_LAYER_ROWS
from equipoise.hal.errors import PlacementError

MAX_CAPACITY_RATIO = 1024
"""Maximum ratio of capacities: a smaller rank is better left out."""


@dataclass(frozen=True)
class RankTopology:
    """The ranks of a plan.

    Attributes:
        shape: numbers of layers, experts, slots and ranks.
        capacity: int32 (ranks,), in 1 / 65536 of the mean rank.
        nodes: number of nodes, with equally many ranks.
        survive: loss to survive: 0 none, 1 of a rank, 2 of a node.
    """

    shape: ExpertShape
    capacity: npt.NDArray[np.int32]
    nodes: int
    survive: int

    @property
    def _slots_lost_together(self) -> int:
        """Number of slots that one loss takes."""
        return self.shape.slots // (self.nodes if self.survive == 2 else self.shape.ranks)

    def under_replicated(self, placement: Placement) -> npt.NDArray[np.int64]:
        """Returns int64 [n, 2]: (layer, expert) that the configured loss would take."""
        if not self.survive:
            return np.zeros((0, 2), dtype=np.int64)
        shape = self.shape
        domains = np.broadcast_to(
            np.arange(shape.slots) // self._slots_lost_together, placement.shape
        )
        at = np.arange(shape.layers)[:, None], placement
        first = np.full((shape.layers, shape.experts), shape.ranks)
        last = np.full_like(first, -1)
        np.minimum.at(first, at, domains)
        np.maximum.at(last, at, domains)
        at_risk: npt.NDArray[np.int64] = np.argwhere(first == last)
        return at_risk

    def check_survival(self, placement: Placement) -> None:
        """Raises `PlacementError` if the configured loss would take an expert."""
        alone, kind = self.under_replicated(placement), "rank" if self.survive == 1 else "node"
        if alone.size:
            layer, expert = alone[0].tolist()
            raise PlacementError(
                f"survive={self.survive}: layer {layer} has expert {expert} on one {kind} only; "
                "the policy `connected` plans otherwise"
            )


def topology(
    shape: ExpertShape, nodes: int, survive: int, capacities: Sequence[float] | None
) -> RankTopology:
    """Builds a topology, and checks its numbers. Raises `PlacementError`."""
    if nodes < 1 or shape.ranks % nodes:
        raise PlacementError(f"{shape.ranks} ranks do not divide among {nodes} nodes")
    if survive not in (0, 1, 2):
        raise PlacementError(f"survive must be 0, 1 or 2, got {survive}")
    if survive and shape.slots < 2 * shape.experts:
        raise PlacementError(
            f"survive={survive} needs two slots an expert: {2 * shape.experts}, not {shape.slots}"
        )
    if survive > min(1, shape.ranks - 1) + min(1, nodes - 1):
        raise PlacementError(
            f"survive={survive} needs more than {shape.ranks} ranks, {nodes} nodes"
        )
    return RankTopology(shape, _capacity(capacities, shape.ranks), nodes, survive)


def max_layer_rows(capacity: npt.NDArray[np.int32]) -> int:
    """Returns the most rows of a layer that fit into 64 bits, scaled to the smallest rank."""
    return MAX_LAYER_ROWS * min(int(capacity.min()), SHARE_ONE) // SHARE_ONE


def max_survivable(shape: ExpertShape, nodes: int, survive: int) -> int:
    """Returns the largest loss, up to `survive`, that slots, ranks and nodes allow to survive."""
    enough = shape.slots >= 2 * shape.experts
    if survive == 2 and enough and nodes > 1:
        return 2
    return min(survive, 1) if enough and shape.ranks > 1 else 0


def _capacity(capacities: Sequence[float] | None, ranks: int) -> npt.NDArray[np.int32]:
    if capacities is None:
        return np.full(ranks, SHARE_ONE, dtype=np.int32)
    try:
        ratios = np.asarray(capacities, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise PlacementError(f"capacities must be {ranks} positive numbers") from None
    if ratios.shape != (ranks,) or not np.isfinite(ratios).all() or ratios.min() <= 0:
        raise PlacementError(f"capacities must be {ranks} positive numbers")
    if ratios.max() > MAX_CAPACITY_RATIO * ratios.min():
        raise PlacementError(
            f"capacities must be within a factor of {MAX_CAPACITY_RATIO}, got {ratios.min():g} to "
            f"{ratios.max():g}"
        )
    parts = np.maximum(np.rint(ratios / ratios.mean() * SHARE_ONE), 1).astype(np.int32)
    capacity: npt.NDArray[np.int32] = parts
    return capacity
