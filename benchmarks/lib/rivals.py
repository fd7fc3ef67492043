"""Maps of logical experts built one slot at a time, with a few tensor operations for each.

That is how a serving engine builds them when a layer's new placement is installed: for every
physical slot it looks its expert up, writes the slot into the next free column of the expert's row,
and counts. Then the map is widened to a fixed number of columns, so that captured graphs may keep
its address, and written over the one in use. Written again in our words, as the other side of a
comparison.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Load = npt.NDArray[np.int64]
Row = npt.NDArray[np.int32]
SWAPS, ENOUGH = 100, 0.01
"""Of the swift-like rule: at most so many swaps, each to lower the peak by this part."""


def copies_of(load: Load, slots: int) -> npt.NDArray[np.int64]:
    """Every further slot goes to the largest load per copy."""
    copies = np.ones(load.size, dtype=np.int64)
    heap = [(-float(rows), expert) for expert, rows in enumerate(load)]
    heapq.heapify(heap)
    for _ in range(slots - load.size):
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        heapq.heappush(heap, (-load[expert] / copies[expert], expert))
    return copies


def pack_bins(sizes: Sequence[float], bins: int) -> list[list[int]]:
    """Largest first to the least full bin, equally many in each: the items of each bin."""
    room = len(sizes) // bins
    heap: list[tuple[float, int]] = [(0.0, number) for number in range(bins)]
    packing: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fill, number = heapq.heappop(heap)
        packing[number].append(item)
        if len(packing[number]) < room:
            heapq.heappush(heap, (fill + sizes[item], number))
    return packing


def hierarchical(load: Load, slots: int, ranks: int, nodes: int, groups: int) -> Row:
    """Groups of experts to nodes, copies within each node, then ranks."""
    size = load.size // groups
    by_group = load.reshape(groups, size).sum(axis=1).astype(float)
    row: list[int] = []
    for group_ids in pack_bins(by_group.tolist(), nodes):
        experts = np.array([g * size + i for g in group_ids for i in range(size)])
        copies = copies_of(load[experts], slots // nodes)
        replicas = np.repeat(np.arange(experts.size), copies)
        sizes = (load[experts] / copies)[replicas]
        for rank in pack_bins(sizes.tolist(), ranks // nodes):
            row += experts[replicas[rank]].tolist()
    return np.array(row, dtype=np.int32)


def snake(load: Load, slots: int, ranks: int) -> Row:
    """Copies by size are dealt forwards, then backwards."""
    copies = copies_of(load, slots)
    replicas = np.repeat(np.arange(load.size), copies)
    order = replicas[np.argsort(-(load / copies)[replicas], kind="stable")]
    rounds = order.reshape(-1, ranks)
    rounds[1::2] = rounds[1::2, ::-1]
    return np.ascontiguousarray(rounds.T).reshape(-1).astype(np.int32)


def swift(load: Load, installed: Row, ranks: int) -> Row:
    """First copies stay, the others are chosen anew, then single swaps lower the peak."""
    row = installed.reshape(ranks, -1).copy()
    placed_experts: set[int] = set()
    spare = []
    for place in np.ndindex(row.shape):
        expert = int(row[place])
        if expert in placed_experts:
            spare.append(place)
        placed_experts.add(expert)
    copies = copies_of(load, row.size)
    extra = np.repeat(np.arange(load.size), copies - 1)
    size = load / copies
    for place in spare:
        row[place] = -1
    rank_loads = [_rank_load(row, size, rank) for rank in range(ranks)]
    for expert in extra[np.argsort(-size[extra], kind="stable")]:
        free = [p for p in spare if row[p] < 0]
        open_ = [p for p in free if expert not in row[p[0]]] or free
        place = min(open_, key=lambda p: rank_loads[p[0]])
        row[place] = expert
        rank_loads[place[0]] = _rank_load(row, size, place[0])
    _swap(row, size)
    return row.reshape(-1)


def _rank_load(row: Row, size: npt.NDArray[np.float64], rank: int) -> float:
    experts = row[rank]
    return float(size[experts[experts >= 0]].sum())


def _swap(row: Row, size: npt.NDArray[np.float64]) -> None:
    swapped_pairs: set[tuple[int, int]] = set()
    for _ in range(SWAPS):
        rank_loads = size[row].sum(axis=1)
        fullest, emptiest = int(rank_loads.argmax()), int(rank_loads.argmin())
        if (fullest, emptiest) in swapped_pairs:
            return
        gaps = size[row[fullest]][:, None] - size[row[emptiest]][None, :]
        half = (rank_loads[fullest] - rank_loads[emptiest]) / 2
        a, b = np.unravel_index(int(np.abs(gaps - half).argmin()), gaps.shape)
        gain = half - abs(gaps[a, b] - half)
        twice = row[fullest, a] in row[emptiest] or row[emptiest, b] in row[fullest]
        if twice or gain < ENOUGH * rank_loads.mean():
            return
        row[fullest, a], row[emptiest, b] = row[emptiest, b], row[fullest, a]
        swapped_pairs.add((fullest, emptiest))


WIDTH = 1024
"""Columns of the map in use."""


@dataclass(frozen=True)
class InUse:
    """The maps that routing reads: int64 [experts, WIDTH] and [experts]."""

    slots: Tensor
    counts: Tensor

    @staticmethod
    def empty(experts: int) -> "InUse":
        """Nothing mapped."""
        return InUse(
            torch.full((experts, WIDTH), -1, dtype=torch.int64),
            torch.zeros(experts, dtype=torch.int64),
        )


def install(placement: Tensor, in_use: InUse) -> None:
    """Build one layer's maps and write them.

    Args:
        placement: int64 [slots], the expert in each slot.
        in_use: overwritten.
    """
    experts = in_use.counts.numel()
    most = int(torch.bincount(placement, minlength=experts).max())
    slot_map = torch.full((experts, most), -1, dtype=torch.int64)
    counts = torch.zeros(experts, dtype=torch.int64)
    for slot in range(placement.numel()):
        expert = placement[slot]
        if expert.item() < 0:
            continue
        column = counts[expert]
        slot_map[expert, column] = slot
        counts[expert] = column + 1
    padded_map = torch.nn.functional.pad(slot_map, (0, WIDTH - most), value=-1)
    in_use.slots.copy_(padded_map)
    in_use.counts.copy_(counts)
