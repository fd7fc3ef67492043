"""An arrangement: which expert sits in which slot of which rank, and what part each copy takes."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    ExpertShape,
    Placement,
    Shares,
    even_shares,
    placement_digest,
)
from equipoise.balancer.formats.statistics import check_layers
from equipoise.hal.errors import PlacementError


class LayerNumbering(StrEnum):
    """What the numbers of layers mean."""

    MODEL = "model"
    """The model's own, of layers with experts; those between are dense."""
    EVERY_LAYER = "every"
    """The model's own, of every layer: a file that has a row for dense ones too."""
    UNKNOWN = "unknown"
    """0, 1, ... of the layers in a file that does not tell: perhaps those with experts only."""


@dataclass(frozen=True, eq=False)
class Arrangement:
    """What a file of a placement says. Raises `PlacementError` that names layer and value.

    Attributes:
        placement: int32 (layers, slots), the expert in each slot; slots of a rank are neighbours.
        shares: int32 (layers, slots), the part of its expert that a slot takes, in 1 / 65536.
        ranks: slots divide among so many.
        layers: the model's number of each layer, ascending; 0, 1, ... where none are given.
        source: where it is from, for people.
        numbering: what `layers` are.
    """

    placement: Placement
    shares: Shares
    ranks: int
    layers: tuple[int, ...] = ()
    source: str = ""
    numbering: LayerNumbering = LayerNumbering.MODEL

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _check_placement(self.placement, self.layers))
        ExpertShape(len(self.layers), self.experts, self.slots, self.ranks)
        _check_shares(self)

    @classmethod
    def with_even_shares(
        cls, placement: Placement, ranks: int, layers: tuple[int, ...] = (), origin: str = ""
    ) -> "Arrangement":
        """One whose copies of an expert take the same part each."""
        layers = _check_placement(placement, layers)
        shares = even_shares(placement, int(placement.max()) + 1)
        return cls(placement, shares, ranks, layers, origin)

    @property
    def experts(self) -> int:
        """How many experts a layer has: each has a slot."""
        return int(self.placement.max()) + 1

    @property
    def slots(self) -> int:
        """Slots of all ranks, per layer."""
        return int(self.placement.shape[1])

    @property
    def digest(self) -> str:
        """Of placement and shares, as that of a plan."""
        return placement_digest(self.placement, self.shares)

    @property
    def is_even(self) -> bool:
        """Whether all copies of an expert take the same part, but for rounding."""
        even = even_shares(self.placement, self.experts)
        return bool((np.abs(even.astype(np.int64) - self.shares) <= 1).all())

    def same(self, other: "Arrangement") -> bool:
        """Whether all but the origin is equal."""
        return (
            np.array_equal(self.placement, other.placement)
            and np.array_equal(self.shares, other.shares)
            and (self.ranks, self.layers) == (other.ranks, other.layers)
        )


def _check_placement(placement: Placement, layers: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of its layers, given or not."""
    if placement.ndim != 2 or 0 in placement.shape:
        raise PlacementError(
            f"a placement is (layers, slots), none of them 0, not {placement.shape}"
        )
    layers = layers or tuple(range(placement.shape[0]))
    check_layers(layers, placement.shape[0])
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
        homeless = np.setdiff1d(experts, row)
        if homeless.size:
            raise PlacementError(
                f"layer {layer} has no slot for expert {homeless[0]}"
                + (f" and {homeless.size - 1} more" if homeless.size > 1 else "")
            )


def _check_shares(arrangement: Arrangement) -> None:
    shares, placement = arrangement.shares, arrangement.placement
    if shares.shape != placement.shape or shares.dtype != np.int32:
        raise PlacementError(
            f"shares are int32 {placement.shape}, got {shares.dtype} {shares.shape}"
        )
    for layer, row, held in zip(arrangement.layers, shares, placement, strict=True):
        for slot in np.flatnonzero((row < 0) | (row > SHARE_ONE))[:1].tolist():
            raise PlacementError(
                f"layer {layer}, slot {slot}: share {row[slot]} is not 0 to {SHARE_ONE}"
            )
        whole = np.zeros(arrangement.experts, dtype=np.int64)
        np.add.at(whole, held, row)
        for expert in np.flatnonzero(whole != SHARE_ONE)[:1].tolist():
            raise PlacementError(
                f"layer {layer}: shares of expert {expert} sum to {whole[expert]}, not {SHARE_ONE}"
            )
