"""The rule that DeepSeek, TensorRT-LLM, vLLM and SGLang publish, slowly, in our own words."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def copies_of(load: Sequence[int], slots: int) -> list[int]:
    """One each; each further slot to the largest load per copy, ties to the larger id."""
    if sum(load) == 0:
        return [slots // len(load) + (e < slots % len(load)) for e in range(len(load))]
    copies = [1] * len(load)
    for _ in range(slots - len(load)):
        largest = max(range(len(load)), key=lambda e: (Fraction(load[e], copies[e]), e))
        copies[largest] += 1
    return copies


def ranks_of(load: Sequence[int], copies: Sequence[int], ranks: int) -> list[list[int]]:
    """By size, ties to the lower id, each copy to the least loaded rank with a free slot.

    A rank's load is in 1 / 65536 of a row, each copy rounded down.
    """
    experts_by_rank: list[list[int]] = [[] for _ in range(ranks)]
    full = [0] * ranks
    size = [Fraction(n, c) for n, c in zip(load, copies, strict=True)]
    for expert in sorted(range(len(load)), key=lambda e: (-size[e], e)):
        for _ in range(copies[expert]):
            free = [r for r in range(ranks) if len(experts_by_rank[r]) < sum(copies) // ranks]
            rank = min(free, key=lambda r: (full[r], r))
            experts_by_rank[rank].append(expert)
            full[rank] += load[expert] * 65536 // copies[expert]
    return experts_by_rank


def published(load: Ints, slots: int, ranks: int) -> Ints:
    """(layers, slots) for (layers, experts)."""
    rows = [ranks_of(row, copies_of(row, slots), ranks) for row in load.tolist()]
    return np.array(rows, dtype=np.int64).reshape(len(load), slots)


def rank_loads(row: Sequence[int], load: Sequence[int], ranks: int) -> list[Fraction]:
    """Under an even split, for one layer."""
    size = len(row) // ranks
    counts = {expert: list(row).count(expert) for expert in set(row)}
    return [
        sum((Fraction(load[e], counts[e]) for e in row[r * size : (r + 1) * size]), Fraction(0))
        for r in range(ranks)
    ]


def is_double(row: Sequence[int], ranks: int) -> bool:
    """Whether a rank has an expert twice."""
    size = len(row) // ranks
    return any(len(set(row[r * size : (r + 1) * size])) < size for r in range(ranks))
