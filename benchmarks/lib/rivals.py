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


def packed(sizes: Sequence[float], bins: int) -> list[list[int]]:
    """Largest first to the least full bin, equally many in each: the items of each bin."""
    room = len(sizes) // bins
    heap: list[tuple[float, int]] = [(0.0, number) for number in range(bins)]
    found: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        full, number = heapq.heappop(heap)
        found[number].append(item)
        if len(found[number]) < room:
            heapq.heappush(heap, (full + sizes[item], number))
    return found


def hierarchical(load: Load, slots: int, ranks: int, nodes: int, groups: int) -> Row:
    """Groups of experts to nodes, copies within each node, then ranks."""
    size = load.size // groups
    by_group = load.reshape(groups, size).sum(axis=1).astype(float)
    row: list[int] = []
    for held in packed(by_group.tolist(), nodes):
        experts = np.array([g * size + i for g in held for i in range(size)])
        copies = copies_of(load[experts], slots // nodes)
        replicas = np.repeat(np.arange(experts.size), copies)
        sizes = (load[experts] / copies)[replicas]
        for rank in packed(sizes.tolist(), ranks // nodes):
            row += experts[replicas[rank]].tolist()
    return np.array(row, dtype=np.int32)


def snake(load: Load, slots: int, ranks: int) -> Row:
    """Copies by size are dealt forwards, then backwards."""
    copies = copies_of(load, slots)
    replicas = np.repeat(np.arange(load.size), copies)
    order = replicas[np.argsort(-(load / copies)[replicas], kind="stable")]
    dealt = order.reshape(-1, ranks)
    dealt[1::2] = dealt[1::2, ::-1]
    return np.ascontiguousarray(dealt.T).reshape(-1).astype(np.int32)


def swift(load: Load, installed: Row, ranks: int) -> Row:
    """First copies stay, the others are chosen anew, then single swaps lower the peak."""
    row = installed.reshape(ranks, -1).copy()
    seen: set[int] = set()
    spare = []
    for place in np.ndindex(row.shape):
        expert = int(row[place])
        if expert in seen:
            spare.append(place)
        seen.add(expert)
    copies = copies_of(load, row.size)
    extra = np.repeat(np.arange(load.size), copies - 1)
    size = load / copies
    for place in spare:
        row[place] = -1
    full = [_full(row, size, rank) for rank in range(ranks)]
    for expert in extra[np.argsort(-size[extra], kind="stable")]:
        free = [p for p in spare if row[p] < 0]
        open_ = [p for p in free if expert not in row[p[0]]] or free
        place = min(open_, key=lambda p: full[p[0]])
        row[place] = expert
        full[place[0]] = _full(row, size, place[0])
    _swap(row, size)
    return row.reshape(-1)


def _full(row: Row, size: npt.NDArray[np.float64], rank: int) -> float:
    held = row[rank]
    return float(size[held[held >= 0]].sum())


def _swap(row: Row, size: npt.NDArray[np.float64]) -> None:
    moved: set[tuple[int, int]] = set()
    for _ in range(SWAPS):
        full = size[row].sum(axis=1)
        worst, best = int(full.argmax()), int(full.argmin())
        if (worst, best) in moved:
            return
        gaps = size[row[worst]][:, None] - size[row[best]][None, :]
        half = (full[worst] - full[best]) / 2
        a, b = np.unravel_index(int(np.abs(gaps - half).argmin()), gaps.shape)
        gain = half - abs(gaps[a, b] - half)
        twice = row[worst, a] in row[best] or row[best, b] in row[worst]
        if twice or gain < ENOUGH * full.mean():
            return
        row[worst, a], row[best, b] = row[best, b], row[worst, a]
        moved.add((worst, best))


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
    found = torch.full((experts, most), -1, dtype=torch.int64)
    counts = torch.zeros(experts, dtype=torch.int64)
    for slot in range(placement.numel()):
        expert = placement[slot]
        if expert.item() < 0:
            continue
        column = counts[expert]
        found[expert, column] = slot
        counts[expert] = column + 1
    wide = torch.nn.functional.pad(found, (0, WIDTH - most), value=-1)
    in_use.slots.copy_(wide)
    in_use.counts.copy_(counts)
