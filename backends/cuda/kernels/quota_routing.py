"""Routing by integer quotas of the batch's own counts.

An element's slot depends on how often its expert occurs before it and in all. In a small batch each
program compares its elements with all others: one launch. In a larger one a first launch counts
each block, a second adds up the blocks before each, and a third compares within blocks only.

Occurrence t goes to the first replica i with floor((cumulative_i * n + dither) / 65536) > t, that
is cumulative_i * n >= (t + 1) * 65536 - dither, that is
cumulative_i > ((t + 1) * 65536 - dither - 1) // n: one division for each element, and then the
search of the hashed routing. It fits in int64 for any batch that int32 can count.
"""

import triton
import triton.language as tl
from torch import Tensor

from equipoise.backends.cuda.kernels.hashing import mix32, salted_state
from equipoise.backends.cuda.kernels.histogram import add_histogram, draw_ticket, publish_totals
from equipoise.backends.cuda.kernels.occurrences import WARPS, count_earlier_in_block, count_equal
from equipoise.backends.cuda.kernels.table_lookup import (
    find_run,
    live_row,
    load_slots,
    longest_run,
    search,
    search_steps,
)
from equipoise.backends.cuda.kernels.workspace import BLOCK, SMALL_BLOCKS, Workspace, bins_of
from equipoise.hal.kernels import Salt, Tables

SMALL = SMALL_BLOCKS * BLOCK
"""Elements of the largest batch that is compared as a whole."""
TILE = 8
"""Experts a program of the second launch: as many as a sector of memory holds."""
ROWS = 256
"""Blocks that it adds up at a time."""


@triton.jit(do_not_specialize=["elements"])
def count_blocks_kernel(
    ids: tl.tensor,
    elements: tl.int32,
    blocks: tl.tensor,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write one block's counts to its row of `blocks`."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + at, mask=at < elements, other=-1)
    inside = (expert >= 0) & (expert < EXPERTS)
    bins = tl.arange(0, BINS)
    histogram = tl.histogram(expert, BINS, mask=inside)
    tl.store(blocks + block * EXPERTS + bins, histogram, mask=bins < EXPERTS)


@triton.jit(do_not_specialize=["number"])
def add_up_kernel(
    blocks: tl.tensor,
    number: tl.int32,
    counts: tl.tensor,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Replace the counts of each block by the sums of the blocks before it; all go to `counts`."""
    expert = tl.program_id(0) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.int32)
    for first in range(0, number, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < number)[:, None] & (expert < EXPERTS)[None, :]
        places = blocks + row[:, None] * EXPERTS + expert[None, :]
        block_counts = tl.load(places, mask=inside, other=0)
        tl.store(places, tl.cumsum(block_counts, 0) - block_counts + total[None, :], mask=inside)
        total += tl.sum(block_counts, 0)
    tl.store(counts + expert, total, mask=expert < EXPERTS)


@triton.jit
def quota_draw(
    expert: tl.tensor, occurrence: tl.tensor, total: tl.tensor, state: tl.tensor
) -> tl.tensor:
    """What to search the cumulative shares with, int32 below 65536."""
    dither = (mix32(expert, state) >> 16).to(tl.int64)
    due = ((occurrence + 1).to(tl.int64) << 16) - dither - 1
    return (due // tl.maximum(total, 1)).to(tl.int32)


@triton.jit(do_not_specialize=["elements", "layer", "state"])
def apportion_small_kernel(
    ids: tl.tensor,
    elements: tl.int32,
    generation: tl.tensor,
    start: tl.tensor,
    replicas: tl.tensor,
    cumulative: tl.tensor,
    layer: tl.int32,
    state: tl.int32,
    slots: tl.tensor,
    counts: tl.tensor,
    totals: tl.tensor,
    LAYERS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    BINS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALONE: tl.constexpr,
) -> None:
    """Route and count one block of a batch that is compared as a whole."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + at, mask=at < elements, other=-1)
    inside = (expert >= 0) & (expert < EXPERTS)
    row = live_row(generation, layer, LAYERS)
    first, copies = find_run(start + row * (EXPERTS + 1), expert, inside)
    histogram = tl.histogram(expert, BINS, mask=inside)
    add_histogram(histogram, counts, totals, EXPERTS, BINS, ALONE)
    here = tl.program_id(0) * BLOCK
    before = count_equal(ids, expert, 0, here, elements)
    total = before + count_equal(ids, expert, here, elements, elements)
    occurrence = before + count_earlier_in_block(ids, expert, at, elements, BLOCK)
    draw = quota_draw(expert, occurrence, total, state)
    place = search(cumulative, first, copies, draw, STEPS)
    slot = load_slots(replicas + row * SLOTS, place, inside, SLOTS)
    last = draw_ticket(totals + BINS, ALONE)
    tl.store(slots + at, slot, mask=at < elements)
    if last:
        publish_totals(counts, totals, EXPERTS, BINS)


@triton.jit(do_not_specialize=["elements", "layer", "state"])
def apportion_kernel(
    ids: tl.tensor,
    elements: tl.int32,
    generation: tl.tensor,
    start: tl.tensor,
    replicas: tl.tensor,
    cumulative: tl.tensor,
    layer: tl.int32,
    state: tl.int32,
    slots: tl.tensor,
    counts: tl.tensor,
    blocks: tl.tensor,
    LAYERS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Route one block after the blocks that are counted."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + at, mask=at < elements, other=-1)
    inside = (expert >= 0) & (expert < EXPERTS)
    row = live_row(generation, layer, LAYERS)
    first, copies = find_run(start + row * (EXPERTS + 1), expert, inside)
    total = tl.load(counts + expert, mask=inside, other=1)
    occurrence = tl.load(blocks + block * EXPERTS + expert, mask=inside, other=0)
    occurrence += count_earlier_in_block(ids, expert, at, elements, BLOCK)
    draw = quota_draw(expert, occurrence, total, state)
    place = search(cumulative, first, copies, draw, STEPS)
    slot = load_slots(replicas + row * SLOTS, place, inside, SLOTS)
    tl.store(slots + at, slot, mask=at < elements)


def route_apportioned(
    ids: Tensor,
    tables: Tables,
    cumulative: Tensor,
    salt: Salt,
    slots: Tensor,
    counts: Tensor,
    workspace: Workspace,
) -> None:
    """Expert ids to slots by quotas: one launch for a small batch, three for a larger one.

    Args:
        ids: int32 [n], expert ids; one outside [0, experts) is padding.
        tables: of all layers.
        cumulative: int32 [slots], the shares to use, in the order of the layer's table.
        salt: of this pass; its step is of no matter.
        slots: int32 [n], overwritten.
        counts: int32 [experts], tokens per expert, overwritten.
        workspace: of this stream.

    Raises:
        ValueError: the batch is larger than what the workspace was made for.
    """
    elements, experts = ids.numel(), tables.experts
    number = max(1, -(-elements // BLOCK))
    if number > workspace.blocks.shape[0]:
        raise ValueError(f"ids: expected at most {workspace.sizes.elements}, got {elements}")
    bins, steps = bins_of(experts), search_steps(longest_run(tables))
    state = salted_state(Salt(salt.rank, salt.layer, 0))
    table = (tables.generation, tables.start, tables.replicas, cumulative, salt.layer, state)
    batch, shape = (ids, elements, *table, slots, counts), (tables.layers, experts, tables.slots)
    if elements <= SMALL:
        sizes = (*shape, bins, steps, BLOCK, number == 1)
        apportion_small_kernel[(number,)](*batch, workspace.totals, *sizes, num_warps=WARPS)
        return
    blocks, tiles = workspace.blocks, -(-experts // TILE)
    count_blocks_kernel[(number,)](ids, elements, blocks, experts, bins, BLOCK, num_warps=WARPS)
    add_up_kernel[(tiles,)](blocks, number, counts, experts, ROWS, TILE, num_warps=WARPS)
    apportion_kernel[(number,)](*batch, blocks, *shape, steps, BLOCK, num_warps=WARPS)
