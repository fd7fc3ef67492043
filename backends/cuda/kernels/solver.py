"""Shares that level the rank loads, by water-filling, in one launch of one program.

The values are those of `equipoise.hal.routing.solve_cumulative`, bit for bit: the same integers in
the same order, except where order is of no matter (`waves`).

**Range.** All in int64. With N tokens of a layer in all, B bins of an expert and C entries of a run
at most, rank loads stay below N * 2**16, the depth of a bin below B * N * 2**16, a product of the
rounding below N * C**2 / 4. N <= 2**37 and B, C <= 1024 keep every one below 2**63; a batch of
16,384 tokens by 8 on each of 1,024 ranks is N = 2**27.

**One warp up to 256 ranks**: a lane is a rank, its load stays in a register, and what lanes tell
each other goes by shuffles. More warps have to meet after every wave. But a thread of one warp
holds ranks / 32 bins: compiled for sm_90, 512 lanes take 255 registers and spill 752 bytes. So
each warp has 256 lanes at most, and 235 registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from equipoise.backends.cuda.kernels.live import live_row
from equipoise.backends.cuda.kernels.water import ALONE, FILLED, levels, read_levels
from equipoise.backends.cuda.kernels.water_filling import fill_bins, list_entries, sort_experts
from equipoise.backends.cuda.kernels.water_rounding import write_shares
from equipoise.backends.cuda.kernels.waves import make_waves, sweep_waves
from equipoise.backends.cuda.kernels.workspace import LANES, Workspace, power_of_two
from equipoise.hal.kernels import Tables
from equipoise.hal.routing import SWEEPS

LANES_OF_A_WARP = 256
"""At most, so that nothing spills."""


def warps(lanes: int) -> int:
    """How many warps solve a layer."""
    return max(1, lanes // LANES_OF_A_WARP)


@triton.jit(do_not_specialize=["layer"])
def solve_kernel(
    counts: tl.tensor,
    generation: tl.tensor,
    start: tl.tensor,
    replicas: tl.tensor,
    layer: tl.int32,
    cumulative: tl.tensor,
    water: tl.tensor,
    places: tl.tensor,
    LAYERS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    PER_RANK: tl.constexpr,
    SWEEPS: tl.constexpr,
    SPARE: tl.constexpr,
    PLURAL: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Solve one layer; leaves the rank loads zero."""
    row = live_row(generation, layer, LAYERS)
    start += row * (EXPERTS + 1)
    replicas += row * SLOTS
    plural = sort_experts(
        counts, start, replicas, cumulative, water, places, EXPERTS, PER_RANK, SPARE, LANES
    )
    entries, longest = list_entries(plural, start, places, SPARE, PLURAL)
    fill_bins(entries, longest, counts, start, replicas, water, places, PER_RANK, SPARE, LANES)
    waves = make_waves(plural, water, places, SPARE, LANES)
    level = read_levels(water, ALONE, SPARE, LANES) + read_levels(water, FILLED, SPARE, LANES)
    sweep_waves(level, waves, water, places, SWEEPS, SPARE, LANES)
    write_shares(
        entries, longest, counts, start, replicas, cumulative, water, places,
        PER_RANK, SPARE, LANES,
    )  # fmt: skip
    tl.debug_barrier()
    for index in tl.static_range(4):
        rank = tl.arange(0, LANES)
        tl.store(levels(water, index, SPARE, LANES) + rank, tl.zeros([LANES], tl.int64))


def solve_shares(
    counts: Tensor, tables: Tables, layer: int, cumulative: Tensor, workspace: Workspace
) -> None:
    """Solve one layer's shares, in one launch on the current stream.

    Args:
        counts: tokens per expert, int32 or int64 [experts], none negative.
        tables: of all layers; their shares are not read.
        layer: that is solved.
        cumulative: int32 [slots], overwritten, in the order of the layer's live table. Before the
            first commit there is no such order, and it is left as it is.
        workspace: of this stream.

    Raises:
        ValueError: the workspace was made for other tables.
    """
    sizes = workspace.sizes
    if (sizes.experts, sizes.slots, sizes.ranks) != (tables.experts, tables.slots, tables.ranks):
        raise ValueError(f"tables: expected those of {sizes}, got others")
    solve_kernel[(1,)](
        counts,
        tables.generation,
        tables.start,
        tables.replicas,
        layer,
        cumulative,
        workspace.water,
        workspace.places,
        LAYERS=tables.layers,
        EXPERTS=tables.experts,
        SLOTS=tables.slots,
        PER_RANK=tables.slots // tables.ranks,
        SWEEPS=SWEEPS,
        SPARE=sizes.spare,
        PLURAL=max(LANES, power_of_two(sizes.spare)),
        LANES=sizes.lanes,
        num_warps=warps(sizes.lanes),
    )
