"""How other engines choose a replica: their published rules in words, and a reference.

Both rules know only lists: the run of an expert in the routing table, n entries long, its slots
ascending. They divide evenly and read no shares. Integers throughout, so a kernel of any backend
returns these values bit for bit (clause G8). The batch is a matrix of rows, one a token, flattened
row by row; element j is expert e. An id outside [0, experts) is routed to the invalid slot
(= slots) and not counted, whatever the engine itself writes there.

**Row hash**: vLLM 0.33, `eplb_map_to_physical_and_record`. Element j is in row t = j // top_k
and goes to entry ((t * 2654435769) mod 2**32) mod n of its run. Only the first `rows` rows are
counted: the rest is what fills a batch up to the size of a captured graph.

**Block turns**: TensorRT-LLM, `moe_load_balance_routing`. Element j is in block b = j // 1024.
Let o be the number of earlier elements of the same block and the same expert: it goes to entry
(o + b + offset) mod n. The offset is the rank where attention is data-parallel, else 0. Where there
are as many slots as experts every n is 1, so that their simpler kernel for that case, which knows
no offset, is the same rule. (Their kernel takes at most 1024 experts and 32767 slots.)
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from equipoise.hal.routing import MASK32, RoutingTable, count_experts

KNUTH32 = 2654435769
"""2**32 / golden ratio: vLLM's multiplier."""
BLOCK = 1024
"""Elements of one of TensorRT-LLM's blocks."""


@dataclass(frozen=True, eq=False)
class RowHash:
    """vLLM's rule. Raises `ValueError` when `top_k` is below 1.

    Attributes:
        top_k: elements a row.
        rows: int32 [1], on the device: how many rows are counted; read when the stream comes to
            it, so that a captured graph follows it.
    """

    top_k: int
    rows: Tensor

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k: expected at least 1, got {self.top_k}")


@dataclass(frozen=True)
class BlockTurns:
    """TensorRT-LLM's rule. Raises `ValueError` for an offset below 0.

    Attributes:
        offset: where the turns begin.
    """

    offset: int

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise ValueError(f"offset: expected at least 0, got {self.offset}")


ReplicaRule: TypeAlias = RowHash | BlockTurns


def route_by_rule(ids: Tensor, table: RoutingTable, rule: ReplicaRule) -> tuple[Tensor, Tensor]:
    """Route by a published rule.

    Args:
        ids: int32 [n], expert ids.
        table: of this layer; its shares are not read.
        rule: one of the published rules, with its parameters.

    Returns:
        Slots, int32 [n]; tokens per expert, int32 [experts].
    """
    match rule:
        case RowHash():
            return route_by_row_hash(ids, table, rule)
        case BlockTurns():
            return route_by_block_turns(ids, table, rule)


def route_by_row_hash(ids: Tensor, table: RoutingTable, rule: RowHash) -> tuple[Tensor, Tensor]:
    """Route by the hash of each row; arguments and result as `route_by_rule`."""
    rows = torch.arange(ids.numel(), device=ids.device) // rule.top_k
    slots = _take(ids, table, (rows * KNUTH32) & MASK32)
    return slots, count_experts(ids[rows < rule.rows], table.experts)


def route_by_block_turns(
    ids: Tensor, table: RoutingTable, rule: BlockTurns
) -> tuple[Tensor, Tensor]:
    """Route by turns within blocks; arguments and result as `route_by_rule`."""
    blocks = torch.split(ids, BLOCK)
    turns = [_earlier(block) + number for number, block in enumerate(blocks)]
    slots = _take(ids, table, torch.cat(turns) + rule.offset)
    return slots, count_experts(ids, table.experts)


def _earlier(block: Tensor) -> Tensor:
    """How many elements before each are equal to it, int64 [n]; compares all pairs."""
    return (block[:, None] == block[None, :]).tril(-1).sum(1)


def _take(ids: Tensor, table: RoutingTable, turns: Tensor) -> Tensor:
    """Of each element's run the entry that its turn, int64 [n], comes to."""
    inside = (ids >= 0) & (ids < table.experts)
    kinds = torch.where(inside, ids, 0).long()
    # A table that was never committed has runs of no length.
    copies = table.start.diff().clamp(min=1)[kinds]
    slots = table.replicas[table.start[kinds] + turns % copies]
    return torch.where(inside, slots, table.slots).int()
