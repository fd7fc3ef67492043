"""Assigns replicas to ranks: largest first, to the least loaded rank with a free slot.

This is TensorRT-LLM's doPlacement, in integers: a rank's load is in 1 / 65536 of a row, each
replica rounded down, as in the native core, so that both come to the same placement.
"""

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush

from equipoise.balancer.experts.placement import SHARE_ONE


def pack_by_load(load: Sequence[int], copies: Sequence[int], ranks: int) -> list[list[int]]:
    """Returns the experts of each rank in order of its slots; `copies` counts replicas by expert.

    Replicas are taken by load descending, then expert ascending; of equal ranks, the lower one.
    """
    sizes = {expert: Fraction(load[expert], count) for expert, count in enumerate(copies)}
    items = [expert for expert, count in enumerate(copies) for _ in range(count)]
    items.sort(key=lambda expert: (-sizes[expert], expert))
    by_rank: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    for expert in items:
        rank_load, rank = heappop(loads)
        by_rank[rank].append(expert)
        if len(by_rank[rank]) < len(items) // ranks:
            heappush(loads, (rank_load + load[expert] * SHARE_ONE // copies[expert], rank))
    return by_rank
