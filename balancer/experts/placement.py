"""Which expert sits in which slot."""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from equipoise.hal.errors import PlacementError

SHARE_ONE = 1 << 16
"""A whole expert, in units of shares."""
Placement = npt.NDArray[np.int32]
"""(layers, slots): the expert in each slot."""
Shares = npt.NDArray[np.int32]
"""(layers, slots): the part of its expert's tokens that a slot takes, in units of 1 / 65536."""
Load = npt.NDArray[np.int64]
"""(layers, experts): rows, one per (token, k)."""


@dataclass(frozen=True)
class Shape:
    """How many of everything. Raises `PlacementError` when the numbers cannot fit together."""

    layers: int
    experts: int
    slots: int
    ranks: int

    def __post_init__(self) -> None:
        for name, count in vars(self).items():
            if count < 1:
                raise PlacementError(f"{name} must be at least 1, got {count}")
        if self.slots < self.experts:
            raise PlacementError(f"{self.slots} slots cannot hold {self.experts} experts")
        if self.slots % self.ranks:
            raise PlacementError(f"{self.slots} slots do not divide among {self.ranks} ranks")

    @property
    def slots_per_rank(self) -> int:
        """Slots of each rank, per layer."""
        return self.slots // self.ranks


def contiguous(shape: Shape) -> Placement:
    """The start layout: slot j of rank r holds expert (r * experts // ranks + j) mod experts.

    Source: the default initial assignment that TensorRT-LLM's load-balancer test uses.
    """
    rank, place = np.divmod(np.arange(shape.slots), shape.slots_per_rank)
    row = (rank * shape.experts // shape.ranks + place) % shape.experts
    return np.tile(row.astype(np.int32), (shape.layers, 1))


def check(placement: Placement, shape: Shape) -> None:
    """Raise `PlacementError` unless every expert has a slot in every layer."""
    if placement.shape != (shape.layers, shape.slots) or placement.dtype != np.int32:
        raise PlacementError(
            f"a placement is int32 {(shape.layers, shape.slots)}, "
            f"got {placement.dtype} {placement.shape}"
        )
    if placement.min() < 0 or placement.max() >= shape.experts:
        layer = int(((placement < 0) | (placement >= shape.experts)).any(axis=1).argmax())
        raise PlacementError(f"layer {layer} names an expert outside [0, {shape.experts})")
    held = np.zeros((shape.layers, shape.experts), dtype=np.bool_)
    np.put_along_axis(held, placement.astype(np.int64), True, axis=1)
    if not held.all():
        layer = int((~held).any(axis=1).argmax())
        homeless = np.flatnonzero(~held[layer]).tolist()
        raise PlacementError(f"layer {layer} has no slot for expert(s) {homeless}")


def digest(placement: Placement, shares: Shares) -> str:
    """Hexadecimal digest of a placement and its shares, equal on every machine."""
    state = blake2b(digest_size=16)
    for array in (placement, shares):
        state.update(np.asarray(array.shape, dtype="<i8").tobytes())
        state.update(np.ascontiguousarray(array, dtype="<i4").tobytes())
    return state.hexdigest()
