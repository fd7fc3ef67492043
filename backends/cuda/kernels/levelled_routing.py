"""Routing that divides a batch so that all ranks get as many of its rows.

A small batch is one launch: each program counts all of it, levels the counts by itself, and routes
its own block. Programs wait for none, and what they do alike they do at the same time. Of a larger
batch blocks are counted and added up as for quotas (`quota_routing`), then one program levels, and
a last launch routes.
"""

import triton
import triton.language as tl
from torch import Tensor

from equipoise.backends.cuda.kernels.hashing import salted_state
from equipoise.backends.cuda.kernels.levelling import (
    ENTRIES_OF_A_WARP,
    MAX_ENTRIES,
    NARROW,
    level,
)
from equipoise.backends.cuda.kernels.occurrences import WARPS, count_earlier_in_block
from equipoise.backends.cuda.kernels.quota_routing import (
    ROWS,
    SMALL,
    TILE,
    add_up_kernel,
    count_blocks_kernel,
)
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
from equipoise.hal.levelled_routing import SWEEPS_ALONE, SWEEPS_OF_GROUP, GroupCounts

MANY_ENTRIES = 1024
"""From so many on a program that levels has twice the warps, so that nothing spills."""


def level_shape(entries: int) -> tuple[int, int]:
    """Warps of a program that levels, and how many of them have all entries each."""
    warps = WARPS if entries < MANY_ENTRIES else 2 * WARPS
    return warps, warps if entries <= ENTRIES_OF_A_WARP else 1


@triton.jit
def load_block(
    ids: tl.tensor, elements: tl.tensor, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Places of this program's elements, their experts, and whether those are experts."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + at, mask=at < elements, other=-1)
    return at, expert, (expert >= 0) & (expert < EXPERTS)


@triton.jit
def count_until(
    ids: tl.tensor,
    until: tl.tensor,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """Counts of the first elements of a batch of up to WHOLE."""
    at = tl.arange(0, WHOLE)
    expert = tl.load(ids + at, mask=at < until, other=-1)
    return tl.histogram(expert, BINS, mask=(expert >= 0) & (expert < EXPERTS))


@triton.jit(do_not_specialize=["elements", "layer", "state"])
def level_small_kernel(
    ids: tl.tensor,
    elements: tl.int32,
    generation: tl.tensor,
    start: tl.tensor,
    replicas: tl.tensor,
    layer: tl.int32,
    state: tl.int32,
    total: tl.tensor,
    before: tl.tensor,
    slots: tl.tensor,
    counts: tl.tensor,
    slot_loads: tl.tensor,
    places: tl.tensor,
    LAYERS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    PER_RANK: tl.constexpr,
    BINS: tl.constexpr,
    ENTRIES: tl.constexpr,
    WARP_COPIES: tl.constexpr,
    GROUPED: tl.constexpr,
    SWEEPS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Level a batch of up to WHOLE elements, and route one block of it."""
    program = tl.program_id(0)
    row = live_row(generation, layer, LAYERS)
    start += row * (EXPERTS + 1)
    replicas += row * SLOTS
    slot_loads += program * SLOTS
    places += program * (2 * SLOTS + 2 * ENTRIES)
    bins = tl.arange(0, BINS)
    rows = count_until(ids, elements, EXPERTS, BINS, WHOLE)
    tl.store(counts + bins, rows, mask=(bins < EXPERTS) & (program == 0))
    if GROUPED:
        rows = tl.load(total + bins, mask=bins < EXPERTS, other=0)
    level(
        rows, start, replicas, state, slot_loads, places,
        EXPERTS, SLOTS, PER_RANK, BINS, ENTRIES, WARP_COPIES, GROUPED, SWEEPS,
    )  # fmt: skip
    at, expert, inside = load_block(ids, elements, EXPERTS, BLOCK)
    first, copies = find_run(start, expert, inside)
    earlier = count_until(ids, tl.minimum(program * BLOCK, elements), EXPERTS, BINS, WHOLE)
    occurrence = tl.gather(earlier, tl.where(inside, expert, 0), 0)
    if GROUPED:
        occurrence += tl.load(before + expert, mask=inside, other=0)
    occurrence += count_earlier_in_block(ids, expert, at, elements, BLOCK)
    place = search(places, first, copies, occurrence, STEPS)
    slot = load_slots(replicas, place, inside, SLOTS)
    tl.store(slots + at, slot, mask=at < elements)


@triton.jit(do_not_specialize=["layer", "state"])
def level_kernel(
    total: tl.tensor,
    generation: tl.tensor,
    start: tl.tensor,
    replicas: tl.tensor,
    layer: tl.int32,
    state: tl.int32,
    slot_loads: tl.tensor,
    places: tl.tensor,
    LAYERS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    PER_RANK: tl.constexpr,
    BINS: tl.constexpr,
    ENTRIES: tl.constexpr,
    WARP_COPIES: tl.constexpr,
    WIDE: tl.constexpr,
    SWEEPS: tl.constexpr,
) -> None:
    """Level counts, in one program."""
    row = live_row(generation, layer, LAYERS)
    bins = tl.arange(0, BINS)
    rows = tl.load(total + bins, mask=bins < EXPERTS, other=0)
    level(
        rows, start + row * (EXPERTS + 1), replicas + row * SLOTS, state, slot_loads, places,
        EXPERTS, SLOTS, PER_RANK, BINS, ENTRIES, WARP_COPIES, WIDE, SWEEPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["elements", "layer"])
def route_levelled_kernel(
    ids: tl.tensor,
    elements: tl.int32,
    generation: tl.tensor,
    start: tl.tensor,
    replicas: tl.tensor,
    layer: tl.int32,
    before: tl.tensor,
    slots: tl.tensor,
    blocks: tl.tensor,
    places: tl.tensor,
    LAYERS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPED: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Route one block after the blocks that are counted."""
    at, expert, inside = load_block(ids, elements, EXPERTS, BLOCK)
    row = live_row(generation, layer, LAYERS)
    first, copies = find_run(start + row * (EXPERTS + 1), expert, inside)
    occurrence = tl.load(blocks + tl.program_id(0) * EXPERTS + expert, mask=inside, other=0)
    if GROUPED:
        occurrence += tl.load(before + expert, mask=inside, other=0)
    occurrence += count_earlier_in_block(ids, expert, at, elements, BLOCK)
    place = search(places, first, copies, occurrence, STEPS)
    slot = load_slots(replicas + row * SLOTS, place, inside, SLOTS)
    tl.store(slots + at, slot, mask=at < elements)


def route_levelled(
    ids: Tensor,
    tables: Tables,
    salt: Salt,
    group: GroupCounts | None,
    slots: Tensor,
    counts: Tensor,
    workspace: Workspace,
) -> None:
    """Expert ids to slots, level over the ranks: one launch for a small batch, else four.

    Args:
        ids: int32 [n], expert ids; one outside [0, experts) is padding.
        tables: of all layers; their shares are not read.
        salt: of this pass; its step is of no matter.
        group: int32 [experts] each, the counts of the ranks that divide their rows together.
        slots: int32 [n], overwritten.
        counts: int32 [experts], the batch's own tokens per expert, overwritten.
        workspace: of this stream.

    Raises:
        ValueError: the workspace was made for smaller batches, or for other tables.
    """
    elements, experts, sizes = ids.numel(), tables.experts, workspace.sizes
    number, entries = max(1, -(-elements // BLOCK)), sizes.entries
    if number > workspace.blocks.shape[0]:
        raise ValueError(f"ids: expected at most {sizes.elements}, got {elements}")
    if (sizes.experts, sizes.slots, sizes.ranks) != (experts, tables.slots, tables.ranks):
        raise ValueError(f"tables: expected those of {sizes}, got others")
    if entries > MAX_ENTRIES:
        raise ValueError(f"tables: expected at most {MAX_ENTRIES} replicas, got {entries}")
    table = (tables.generation, tables.start, tables.replicas, salt.layer)
    state, grouped = salted_state(Salt(salt.rank, salt.layer, 0)), group is not None
    # Without a group `before` is not read.
    total, before = (counts, counts) if group is None else (group.total, group.before)
    memory = (workspace.slot_loads, workspace.slot_places)
    bins, steps = bins_of(experts), search_steps(longest_run(tables))
    warps, copies = level_shape(entries)
    shape = (tables.layers, experts, tables.slots)
    lanes = (tables.slots // tables.ranks, bins, entries, copies)
    sweeps = SWEEPS_OF_GROUP if grouped else SWEEPS_ALONE
    if elements <= SMALL:
        operands = (ids, elements, *table, state, total, before, slots, counts, *memory)
        division = (steps, BLOCK, SMALL_BLOCKS * BLOCK)
        level_small_kernel[(number,)](
            *operands, *shape, *lanes, grouped, sweeps, *division, num_warps=warps
        )
        return
    blocks, tiles = workspace.blocks, -(-experts // TILE)
    count_blocks_kernel[(number,)](ids, elements, blocks, experts, bins, BLOCK, num_warps=WARPS)
    add_up_kernel[(tiles,)](blocks, number, counts, experts, ROWS, TILE, num_warps=WARPS)
    wide = grouped or elements > NARROW
    level_kernel[(1,)](total, *table, state, *memory, *shape, *lanes, wide, sweeps, num_warps=warps)
    route_levelled_kernel[(number,)](
        ids, elements, *table, before, slots, blocks, workspace.slot_places,
        *shape, grouped, steps, BLOCK, num_warps=WARPS,
    )  # fmt: skip
