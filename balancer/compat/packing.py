"""Copies whose numbers are given, dealt by size to the least loaded rank that has a free slot.

The rule that TensorRT-LLM's doPlacement publishes, in integers: a rank's load is in 1 / 65536 of a
row, each copy rounded down, as the native core has it.
"""

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush

from equipoise.balancer.experts.placement import SHARE_ONE


def pack_by_load(load: Sequence[int], copies: Sequence[int], ranks: int) -> list[list[int]]:
    """Experts of each rank, in the order of its slots, for the copies of each expert.

    By load per copy descending, then expert ascending; ties of ranks to the lower one.
    """
    sizes = {expert: Fraction(load[expert], count) for expert, count in enumerate(copies)}
    items = [expert for expert, count in enumerate(copies) for _ in range(count)]
    items.sort(key=lambda expert: (-sizes[expert], expert))
    held: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0, rank) for rank in range(ranks)]
    heapify(least)
    for expert in items:
        full, rank = heappop(least)
        held[rank].append(expert)
        if len(held[rank]) < len(items) // ranks:
            heappush(least, (full + load[expert] * SHARE_ONE // copies[expert], rank))
    return held
