"""The content of a placement file: experts by slot, shares, ranks, layer numbers."""

from dataclasses import dataclass, replace

import numpy as np

from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    ExpertShape,
    Placement,
    Shares,
    even_shares,
    placement_digest,
)
from equipoise.balancer.formats.statistics import LayerNumbering, layer_numbers
from equipoise.hal.arguments import check_type
from equipoise.hal.errors import PlacementError


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """A placement with its shares, as read from or written to a file.

    Raises `PlacementError` that names layer and value.

    Attributes:
        placement: int32 (layers, slots), the expert in each slot; slots of a rank are neighbours.
        shares: int32 (layers, slots), share of its expert's rows that a slot takes, in 1 / 65536.
        ranks: number of ranks, which divides the number of slots.
        layers: the model's number of each layer, ascending; 0, 1, ... by default.
        source: format and path, for messages.
        numbering: which layers `layers` numbers.
    """

    placement: Placement
    shares: Shares
    ranks: int
    layers: tuple[int, ...] = ()
    source: str = ""
    numbering: LayerNumbering = LayerNumbering.MODEL

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _check_placement(self.placement, self.layers))
        shape = ExpertShape(len(self.layers), self.experts, self.slots, self.ranks)
        object.__setattr__(self, "ranks", shape.ranks)
        _check_shares(self)

    @classmethod
    def with_even_shares(
        cls, placement: Placement, ranks: int, layers: tuple[int, ...] = (), source: str = ""
    ) -> "ExpertPlacement":
        """Builds one in which all replicas of an expert have the same share."""
        layers = _check_placement(placement, layers)
        shares = even_shares(placement, int(placement.max()) + 1)
        return cls(placement, shares, ranks, layers, source)

    @property
    def experts(self) -> int:
        """Number of experts per layer."""
        return int(self.placement.max()) + 1

    @property
    def slots(self) -> int:
        """Number of slots per layer, over all ranks."""
        return int(self.placement.shape[1])

    @property
    def digest(self) -> str:
        """Digest of placement and shares, the same as that of a plan."""
        return placement_digest(self.placement, self.shares)

    @property
    def is_even(self) -> bool:
        """Whether all replicas of an expert have the same share, up to rounding."""
        even = even_shares(self.placement, self.experts)
        # 65,536 does not divide by every number of replicas: shares of one expert may differ by 1.
        return bool((np.abs(even.astype(np.int64) - self.shares) <= 1).all())

    def with_layers_of(self, other: "ExpertPlacement") -> "ExpertPlacement":
        """Returns the layers of both, in their order. Raises `PlacementError` if they share one."""
        layers = self.layers + other.layers
        order = np.argsort(layers)
        return replace(
            self,
            placement=np.concatenate([self.placement, other.placement])[order],
            shares=np.concatenate([self.shares, other.shares])[order],
            layers=tuple(layers[row] for row in order),
        )

    def same(self, other: "ExpertPlacement") -> bool:
        """Returns whether placement, shares, ranks and layers are equal; ignores `source`."""
        return (
            np.array_equal(self.placement, other.placement)
            and np.array_equal(self.shares, other.shares)
            and (self.ranks, self.layers) == (other.ranks, other.layers)
        )


def _check_placement(placement: Placement, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Checks a placement; returns its layer numbers, 0, 1, ... by default."""
    check_type("placement", placement, np.ndarray, PlacementError)
    if placement.ndim != 2 or 0 in placement.shape:
        raise PlacementError(
            f"a placement is (layers, slots), none of them 0, not {placement.shape}"
        )
    layers = layer_numbers(layers, placement.shape[0])
    _check_experts(placement, layers)
    return layers


def _check_experts(placement: Placement, layers: tuple[int, ...]) -> None:
    if placement.dtype != np.int32:
        raise PlacementError(f"a placement is int32, not {placement.dtype}")
    slots = placement.shape[1]
    wrong = np.argwhere((placement < 0) | (placement >= slots))
    if wrong.size:
        row, slot = wrong[0].tolist()
        raise PlacementError(
            f"layer {layers[row]}, slot {slot}: expert {placement[row, slot]} is unknown: "
            f"{slots} slots hold experts 0 to {slots - 1} at most"
        )
    experts = np.arange(int(placement.max()) + 1)
    for layer, row in zip(layers, placement, strict=True):
        missing = np.setdiff1d(experts, row)
        if missing.size:
            raise PlacementError(
                f"layer {layer} has no slot for expert {missing[0]}"
                + (f" and {missing.size - 1} more" if missing.size > 1 else "")
            )


def _check_shares(placement: ExpertPlacement) -> None:
    shares, experts_by_slot = placement.shares, placement.placement
    check_type("shares", shares, np.ndarray, PlacementError)
    if shares.shape != experts_by_slot.shape or shares.dtype != np.int32:
        raise PlacementError(
            f"shares are int32 {experts_by_slot.shape}, got {shares.dtype} {shares.shape}"
        )
    for layer, row, experts in zip(placement.layers, shares, experts_by_slot, strict=True):
        for slot in np.flatnonzero((row < 0) | (row > SHARE_ONE))[:1].tolist():
            raise PlacementError(
                f"layer {layer}, slot {slot}: share {row[slot]} is not 0 to {SHARE_ONE}"
            )
        total = np.zeros(placement.experts, dtype=np.int64)
        np.add.at(total, experts, row)
        for expert in np.flatnonzero(total != SHARE_ONE)[:1].tolist():
            raise PlacementError(
                f"layer {layer}: shares of expert {expert} sum to {total[expert]}, not {SHARE_ONE}"
            )
