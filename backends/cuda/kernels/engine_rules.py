"""Routing by other engines' published rules, and counting, in one launch (clause G8)."""

import triton
import triton.language as tl
from torch import Tensor

from equipoise.backends.cuda.kernels.histogram import (
    add_histogram,
    draw_ticket,
    launch_config,
    publish_totals,
)
from equipoise.backends.cuda.kernels.occurrences import WARPS, count_earlier_in_block, count_equal
from equipoise.backends.cuda.kernels.table_lookup import find_run, live_row, load_slots
from equipoise.backends.cuda.kernels.workspace import BLOCK, Workspace, bins_of
from equipoise.hal import routing_rules
from equipoise.hal.kernels import Tables
from equipoise.hal.routing_rules import KNUTH32, BlockTurns, ReplicaRule, RowHash

KNUTH_32 = tl.constexpr(KNUTH32)
TURNS = routing_rules.BLOCK
"""Elements of the rule's own blocks, over which several programs divide."""
LARGEST_OFFSET = (1 << 31) - 1


@triton.jit
def slot_of_turn(
    start: tl.tensor, replicas: tl.tensor, expert: tl.tensor, turn: tl.tensor, SLOTS: tl.constexpr
) -> tl.tensor:
    """The slot of each element, whose turn is uint32; of padding, for which `expert` is below 0."""
    inside = expert >= 0
    first, copies = find_run(start, expert, inside)
    # A table that was never committed has runs of no length.
    entry = turn % tl.maximum(copies, 1).to(tl.uint32)
    return load_slots(replicas, first + entry.to(tl.int32), inside, SLOTS)


@triton.jit(do_not_specialize=["elements", "layer", "top_k"])
def row_hash_kernel(
    ids: tl.tensor,
    elements: tl.int32,
    generation: tl.tensor,
    start: tl.tensor,
    replicas: tl.tensor,
    layer: tl.int32,
    top_k: tl.int32,
    rows: tl.tensor,
    slots: tl.tensor,
    counts: tl.tensor,
    totals: tl.tensor,
    LAYERS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALONE: tl.constexpr,
) -> None:
    """Route and count one block by the hash of each element's row."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + at, mask=at < elements, other=-1)
    expert = tl.where(expert < EXPERTS, expert, -1)
    row = live_row(generation, layer, LAYERS)
    token = at // top_k
    is_counted = (expert >= 0) & (token < tl.load(rows))
    histogram = tl.histogram(expert, BINS, mask=is_counted)
    add_histogram(histogram, counts, totals, EXPERTS, BINS, ALONE)
    turn = token.to(tl.uint32, bitcast=True) * KNUTH_32
    slot = slot_of_turn(start + row * (EXPERTS + 1), replicas + row * SLOTS, expert, turn, SLOTS)
    last = draw_ticket(totals + BINS, ALONE)
    tl.store(slots + at, slot, mask=at < elements)
    if last:
        publish_totals(counts, totals, EXPERTS, BINS)


@triton.jit(do_not_specialize=["elements", "layer", "offset"])
def block_turns_kernel(
    ids: tl.tensor,
    elements: tl.int32,
    generation: tl.tensor,
    start: tl.tensor,
    replicas: tl.tensor,
    layer: tl.int32,
    offset: tl.int32,
    slots: tl.tensor,
    counts: tl.tensor,
    totals: tl.tensor,
    LAYERS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    BINS: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALONE: tl.constexpr,
) -> None:
    """Route and count one block, a part of the rule's block of TURNS elements."""
    here = tl.program_id(0) * BLOCK
    at = here + tl.arange(0, BLOCK)
    expert = tl.load(ids + at, mask=at < elements, other=-1)
    expert = tl.where(expert < EXPERTS, expert, -1)
    row = live_row(generation, layer, LAYERS)
    histogram = tl.histogram(expert, BINS, mask=expert >= 0)
    add_histogram(histogram, counts, totals, EXPERTS, BINS, ALONE)
    turns = here // TURNS
    earlier = count_equal(ids, expert, turns * TURNS, here, elements)
    earlier += count_earlier_in_block(ids, expert, at, elements, BLOCK)
    # Unsigned, so that no offset of int32 overflows.
    turn = (earlier + turns).to(tl.uint32) + offset.to(tl.uint32)
    slot = slot_of_turn(start + row * (EXPERTS + 1), replicas + row * SLOTS, expert, turn, SLOTS)
    last = draw_ticket(totals + BINS, ALONE)
    tl.store(slots + at, slot, mask=at < elements)
    if last:
        publish_totals(counts, totals, EXPERTS, BINS)


def route_by_rule(
    rule: ReplicaRule,
    ids: Tensor,
    tables: Tables,
    layer: int,
    slots: Tensor,
    counts: Tensor,
    workspace: Workspace,
) -> None:
    """Expert ids to slots by a published rule, in one launch on the current stream.

    Args:
        rule: whose, with what it needs.
        ids: int32 [n], expert ids; one outside [0, experts) is padding.
        tables: of all layers; their shares are not read.
        layer: that is routed.
        slots: int32 [n], overwritten.
        counts: int32 [experts], tokens per expert as the rule counts them, overwritten.
        workspace: of this stream.

    Raises:
        ValueError: turns begin after 2**31 - 1.
    """
    batch = (ids, ids.numel(), tables.generation, tables.start, tables.replicas, layer)
    result = (slots, counts, workspace.totals)
    sizes = (tables.layers, tables.experts, tables.slots, bins_of(tables.experts))
    match rule:
        case RowHash(top_k, rows):
            by = launch_config(ids.numel())
            row_hash_kernel[(by.programs,)](
                *batch, top_k, rows, *result, *sizes, by.block, by.alone, num_warps=by.warps
            )
        case BlockTurns(offset):
            if offset > LARGEST_OFFSET:
                raise ValueError(f"offset: expected at most {LARGEST_OFFSET}, got {offset}")
            number = max(1, -(-ids.numel() // BLOCK))
            block_turns_kernel[(number,)](
                *batch, offset, *result, *sizes, TURNS, BLOCK, number == 1, num_warps=WARPS
            )
