"""Routing by the hash of each element's place, and counting, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from equipoise.backends.cuda.kernels.hashing import mix32, salted_state
from equipoise.backends.cuda.kernels.histogram import (
    add_histogram,
    draw_ticket,
    launch_config,
    publish_totals,
)
from equipoise.backends.cuda.kernels.table_lookup import (
    find_run,
    live_row,
    load_slots,
    longest_run,
    search,
    search_steps,
)
from equipoise.backends.cuda.kernels.workspace import Workspace, bins_of
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.routing import POSITION_BITS, POSITION_SHARE, window_begin

SEQUENCE = tl.constexpr(salted_state(Salt(0, 0, 0)))
"""The state of mix32 after which places become draws."""
SHIFT = tl.constexpr(32 - POSITION_BITS)
WIDTH = tl.constexpr(POSITION_SHARE)


@triton.jit(do_not_specialize=["elements", "layer", "begin"])
def hash_kernel(
    ids: tl.tensor,
    elements: tl.int32,
    generation: tl.tensor,
    start: tl.tensor,
    replicas: tl.tensor,
    cumulative: tl.tensor,
    layer: tl.int32,
    begin: tl.int32,
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
    """Route and count one block.

    The order of the steps is for the sake of time: the histogram is made while the runs are on
    their way from memory, its additions while the replicas are; the slots are written after the
    ticket, which would otherwise wait for them.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + at, mask=at < elements, other=-1)
    row = live_row(generation, layer, LAYERS)
    inside = (expert >= 0) & (expert < EXPERTS)
    first, copies = find_run(start + row * (EXPERTS + 1), expert, inside)
    histogram = tl.histogram(expert, BINS, mask=inside)
    add_histogram(histogram, counts, totals, EXPERTS, BINS, ALONE)
    sequence = tl.full((1,), SEQUENCE, tl.int32)
    position = mix32(at + begin, sequence) >> SHIFT
    draw = position.to(tl.int32) * WIDTH + WIDTH // 2
    place = search(cumulative + row * SLOTS, first, copies, draw, STEPS)
    slot = load_slots(replicas + row * SLOTS, place, inside, SLOTS)
    last = draw_ticket(totals + BINS, ALONE)
    tl.store(slots + at, slot, mask=at < elements)
    if last:
        publish_totals(counts, totals, EXPERTS, BINS)


def route_hashed(
    ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, workspace: Workspace
) -> None:
    """Expert ids to slots by the live table's shares, in one launch on the current stream.

    Args:
        ids: int32 [n], expert ids; one outside [0, experts) is padding.
        tables: of all layers.
        salt: of this pass; its layer is the one that is routed.
        slots: int32 [n], overwritten.
        counts: int32 [experts], tokens per expert, overwritten.
        workspace: of this stream.
    """
    division = launch_config(ids.numel())
    hash_kernel[(division.programs,)](
        ids,
        ids.numel(),
        tables.generation,
        tables.start,
        tables.replicas,
        tables.cumulative,
        salt.layer,
        window_begin(salt.rank, salt.layer, salt.step),
        slots,
        counts,
        workspace.totals,
        LAYERS=tables.layers,
        EXPERTS=tables.experts,
        SLOTS=tables.slots,
        BINS=bins_of(tables.experts),
        STEPS=search_steps(longest_run(tables)),
        BLOCK=division.block,
        ALONE=division.alone,
        num_warps=division.warps,
    )
