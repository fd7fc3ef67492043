"""Placements, the shares of replicas, and the imbalance of a load under both."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from equipoise import _native
from equipoise.hal.arguments import INT32_MAX, whole_number
from equipoise.hal.errors import PlacementError
from equipoise.hal.shares import SHARE_ONE as SHARE_ONE
from equipoise.hal.shares import SWEEPS

Placement = npt.NDArray[np.int32]
"""(layers, slots): the expert in each slot."""
Shares = npt.NDArray[np.int32]
"""(layers, slots): the part of its expert's tokens that a slot takes, in units of 1 / 65536."""
Load = npt.NDArray[np.int64]
"""(layers, experts): rows, one per (token, k)."""
BatchCounts = npt.NDArray[np.int32]
"""(batches, layers, experts): rows of each batch of one step, in the order of their ranks."""
RankRows = npt.NDArray[np.int64]
"""(layers, ranks): rows that the experts of each rank compute."""


@dataclass(frozen=True)
class ExpertShape:
    """Numbers of layers, experts, slots and ranks.

    Attributes:
        layers: layers with experts.
        experts: experts per layer, over all ranks.
        slots: slots per layer, over all ranks; at least `experts`, and a multiple of `ranks`.
        ranks: ranks, which divide a layer's slots evenly: slot s is on rank s // slots_per_rank.

    Raises:
        PlacementError: the numbers are inconsistent.
    """

    layers: int
    experts: int
    slots: int
    ranks: int

    def __post_init__(self) -> None:
        for name, count in list(vars(self).items()):
            count = whole_number(name, count, PlacementError, least=1, most=INT32_MAX)
            object.__setattr__(self, name, count)
        if self.slots < self.experts:
            raise PlacementError(f"{self.slots} slots cannot hold {self.experts} experts")
        if self.slots % self.ranks:
            raise PlacementError(
                f"{self.slots} slots do not divide among {self.ranks} ranks: "
                f"take a multiple of {self.ranks}"
            )

    @property
    def slots_per_rank(self) -> int:
        """Slots of each rank, per layer."""
        return self.slots // self.ranks


def initial_placement(shape: ExpertShape) -> Placement:
    """Returns the initial placement: contiguous experts on each rank, then those that follow.

    Slot j of rank r holds expert (r * experts // ranks + j) mod experts. Returns int32 (layers,
    slots), the expert in each slot. Source: the default initial assignment that TensorRT-LLM's
    load-balancer test uses.
    """
    rank, place = np.divmod(np.arange(shape.slots), shape.slots_per_rank)
    row = (rank * shape.experts // shape.ranks + place) % shape.experts
    return np.tile(row.astype(np.int32), (shape.layers, 1))


def check_placement(placement: Placement, shape: ExpertShape) -> None:
    """Raises `PlacementError` unless every expert has a slot in every layer."""
    if placement.shape != (shape.layers, shape.slots) or placement.dtype != np.int32:
        raise PlacementError(
            f"a placement is int32 {(shape.layers, shape.slots)}, "
            f"got {placement.dtype} {placement.shape}"
        )
    if placement.min() < 0 or placement.max() >= shape.experts:
        layer = int(((placement < 0) | (placement >= shape.experts)).any(axis=1).argmax())
        raise PlacementError(f"layer {layer} names an expert outside [0, {shape.experts})")
    has_slot = np.zeros((shape.layers, shape.experts), dtype=np.bool_)
    np.put_along_axis(has_slot, placement.astype(np.int64), True, axis=1)
    if not has_slot.all():
        layer = int((~has_slot).any(axis=1).argmax())
        homeless = np.flatnonzero(~has_slot[layer]).tolist()
        raise PlacementError(f"layer {layer} has no slot for expert(s) {homeless}")


def placement_digest(placement: Placement, shares: Shares) -> str:
    """Hexadecimal digest of a placement and its shares, equal on every machine."""
    state = blake2b(digest_size=16)
    for array in (placement, shares):
        state.update(np.asarray(array.shape, dtype="<i8").tobytes())
        state.update(np.ascontiguousarray(array, dtype="<i4").tobytes())
    return state.hexdigest()


@dataclass(frozen=True)
class Layout:
    """A placement with its shares, installed or proposed.

    Attributes:
        placement: int32 (layers, slots), the expert in each slot.
        shares: int32 (layers, slots).
    """

    placement: Placement
    shares: Shares

    @property
    def digest(self) -> str:
        """Hexadecimal digest, equal on two ranks exactly if the layouts are equal."""
        return placement_digest(self.placement, self.shares)


def even_shares(placement: Placement, experts: int) -> Shares:
    """Returns equal shares for the replicas of an expert; the remainder goes to lower slots."""
    zeros = np.zeros((placement.shape[0], experts), dtype=np.int64)
    return _native.solve_shares(zeros, placement, 1)


def solve_shares(load: Load, placement: Placement, shape: ExpertShape) -> Shares:
    """Returns shares that minimise the largest rank load, by water-filling."""
    return _native.solve_shares(load, placement, shape.ranks, SWEEPS)


def imbalance(load: Load, layout: Layout, shape: ExpertShape) -> npt.NDArray[np.int64]:
    """Returns (max - mean) / mean over ranks, int64 (layers,), in units of 1 / 65536."""
    rows = np.take_along_axis(load, layout.placement.astype(np.int64), axis=1)
    ranks = (rows * layout.shares).reshape(shape.layers, shape.ranks, -1).sum(axis=2)
    total = ranks.sum(axis=1)
    excess: npt.NDArray[np.int64] = ranks.max(axis=1) * shape.ranks - total
    parts: npt.NDArray[np.int64] = excess // np.maximum(total // SHARE_ONE, 1)
    return parts


Ids = npt.NDArray[np.int64]
ABSENT = -1
"""Entry of a map beyond an expert's slots, and of a placement for a slot that holds nothing."""


class LogicalMaps(NamedTuple):
    """Maps from experts to slots, both int64.

    Attributes:
        logical_to_physical: (layers, experts, width), the slots of each expert, ascending, then -1.
        replica_count: (layers, experts), the number of slots of each expert.
    """

    logical_to_physical: Ids
    replica_count: Ids


def logical_maps(placement: Ids | Placement, experts: int, width: int | None = None) -> LogicalMaps:
    """Returns the maps of `placement` (layers, slots), in which -1 is a slot that holds nothing.

    `width` is the largest number of slots of an expert by default.
    """
    layers = placement.shape[0]
    layer, slot = np.nonzero(placement >= 0)
    key = layer * experts + placement[layer, slot].astype(np.int64)
    order = np.argsort(key, kind="stable")
    counts = np.bincount(key, minlength=layers * experts)
    first = np.cumsum(counts) - counts
    copy = np.arange(key.size) - first[key[order]]
    wide = max(int(counts.max()), 1) if width is None else width
    slot_table = np.full((layers * experts, wide), ABSENT, dtype=np.int64)
    slot_table[key[order], copy] = slot[order]
    return LogicalMaps(slot_table.reshape(layers, experts, wide), counts.reshape(layers, experts))


def format_ranges(numbers: list[int]) -> str:
    """Formats ascending numbers as ranges: `3..60, 62`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("..".join(map(str, run)) for run in runs)
