"""The share solver: shares that level the rank loads, by water-filling, in one program.

The result is rounded to shares by largest remainder; without loads all shares are even.

The values are those of `equipoise.hal.routing.solve_cumulative`, bit for bit: the same integers in
the same order, except where order does not matter (`share_solver_sweeps`).

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

from equipoise.backends.cuda.kernels.share_solver_fill import (
    ALONE,
    CHUNK,
    COPIES,
    EVEN,
    FILLED,
    LOADS,
    ONE,
    SHARE,
    SHARE_BITS,
    SOLVED,
    WAVE,
    WAVES,
    WHOLE,
    by_entry,
    by_expert,
    even_share,
    fill_bins,
    find_entry,
    grid,
    levels,
    list_entries,
    list_plural_experts,
    read_levels,
    rests,
)
from equipoise.backends.cuda.kernels.share_solver_sweeps import make_waves, sweep_waves
from equipoise.backends.cuda.kernels.table_lookup import live_row
from equipoise.backends.cuda.kernels.workspace import LANES, Workspace, power_of_two
from equipoise.hal.kernels import Tables
from equipoise.hal.routing import SWEEPS


@triton.jit
def round_down(
    entries: tl.tensor,
    counts: tl.tensor,
    start: tl.tensor,
    replicas: tl.tensor,
    water: tl.tensor,
    places: tl.tensor,
    PER_RANK: tl.constexpr,
    SPARE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Divide each bin by the tokens and by its replicas; keep what is left over."""
    for begin in range(0, entries, CHUNK):
        entry = begin + tl.arange(0, CHUNK)
        inside = entry < entries
        owner, base, first, _, tokens = find_entry(entry, inside, counts, start, places, SPARE)
        rank = tl.load(replicas + first + entry - base, mask=inside, other=0) // PER_RANK
        wave = tl.load(by_expert(places, WAVE, SPARE) + owner, mask=inside, other=-1)
        shared = tl.load(by_entry(places, COPIES, SPARE) + entry, mask=inside, other=1)
        # An expert in no wave has one bin, with all of its tokens.
        bins = grid(water, WAVES + LOADS, SPARE, LANES) + wave * LANES + rank
        load = tl.load(bins, mask=wave >= 0, other=0)
        load = tl.where(wave >= 0, load, tokens << SHARE_BITS)
        divisor = tl.maximum(tokens * shared, 1)
        share = load // divisor
        tl.store(by_entry(places, WHOLE, SPARE) + entry, share.to(tl.int32), mask=inside)
        tl.store(rests(water, SPARE, LANES) + entry, load - share * divisor, mask=inside)
    tl.debug_barrier()


@triton.jit
def line_up(
    place: tl.tensor,
    base: tl.tensor,
    copies: tl.tensor,
    shared: tl.tensor,
    rest: tl.tensor,
    longest: tl.tensor,
    water: tl.tensor,
    places: tl.tensor,
    SPARE: tl.constexpr,
    LANES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """What the shares of each entry's expert lack, and how many rests go before the entry's.

    A rest is a fraction of tokens * replicas of the bin; two of one expert compare by
    rest * replicas of the other's bin, which is below tokens * (longest run)**2 / 4.
    """
    missing, ahead = tl.zeros_like(place) + ONE, tl.zeros_like(place)
    for other in range(longest):
        at, there = base + other, other < copies
        missing -= tl.load(by_entry(places, WHOLE, SPARE) + at, mask=there, other=0)
        with_it = tl.load(by_entry(places, COPIES, SPARE) + at, mask=there, other=1)
        other_rest = tl.load(rests(water, SPARE, LANES) + at, mask=there, other=0) * shared
        own_rest = rest * with_it
        earlier = (other_rest > own_rest) | ((other_rest == own_rest) & (other < place))
        ahead += (there & earlier).to(tl.int32)
    return missing, ahead


@triton.jit
def hand_out(
    entries: tl.tensor,
    longest: tl.tensor,
    counts: tl.tensor,
    start: tl.tensor,
    replicas: tl.tensor,
    water: tl.tensor,
    places: tl.tensor,
    PER_RANK: tl.constexpr,
    SPARE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Give what the shares of an expert lack to the largest rests, one unit each."""
    for begin in range(0, entries, CHUNK):
        entry = begin + tl.arange(0, CHUNK)
        inside = entry < entries
        _, base, first, copies, tokens = find_entry(entry, inside, counts, start, places, SPARE)
        place = entry - base
        shared = tl.load(by_entry(places, COPIES, SPARE) + entry, mask=inside, other=1)
        share = tl.load(by_entry(places, WHOLE, SPARE) + entry, mask=inside, other=0)
        rest = tl.load(rests(water, SPARE, LANES) + entry, mask=inside, other=0)
        missing, ahead = line_up(
            place, base, copies, shared, rest, longest, water, places, SPARE, LANES
        )
        share += (ahead < missing).to(tl.int32)
        share = tl.where(tokens > 0, share, even_share(place, copies))
        tl.store(by_entry(places, SHARE, SPARE) + entry, share, mask=inside)
        rank = tl.load(replicas + first + place, mask=inside, other=0) // PER_RANK
        level = levels(water, SOLVED, SPARE, LANES) + rank
        tl.atomic_add(level, tokens * share, mask=inside & (tokens > 0), sem="relaxed")
    tl.debug_barrier()


@triton.jit
def write_sums(
    evenly: tl.tensor,
    entries: tl.tensor,
    longest: tl.tensor,
    counts: tl.tensor,
    start: tl.tensor,
    cumulative: tl.tensor,
    places: tl.tensor,
    SPARE: tl.constexpr,
) -> None:
    """Write the inclusive sums of the solved shares, or of even ones, along each run."""
    for begin in range(0, entries, CHUNK):
        entry = begin + tl.arange(0, CHUNK)
        inside = entry < entries
        _, base, first, copies, _ = find_entry(entry, inside, counts, start, places, SPARE)
        place, sum = entry - base, tl.zeros_like(entry)
        for other in range(longest):
            there = inside & (other <= place)
            share = tl.load(by_entry(places, SHARE, SPARE) + base + other, mask=there, other=0)
            even = even_share(other, copies)
            sum += tl.where(there, tl.where(evenly, even, share), 0)
        tl.store(cumulative + first + place, sum, mask=inside)


@triton.jit
def worst(
    water: tl.tensor, index: tl.constexpr, SPARE: tl.constexpr, LANES: tl.constexpr
) -> tl.tensor:
    """The largest rank load by one way to share."""
    alone = read_levels(water, ALONE, SPARE, LANES)
    return tl.max(alone + read_levels(water, index, SPARE, LANES), 0)


@triton.jit
def write_shares(
    entries: tl.tensor,
    longest: tl.tensor,
    counts: tl.tensor,
    start: tl.tensor,
    replicas: tl.tensor,
    cumulative: tl.tensor,
    water: tl.tensor,
    places: tl.tensor,
    PER_RANK: tl.constexpr,
    SPARE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Round the bins of plural experts, and write what is better: their shares or even ones."""
    round_down(entries, counts, start, replicas, water, places, PER_RANK, SPARE, LANES)
    hand_out(entries, longest, counts, start, replicas, water, places, PER_RANK, SPARE, LANES)
    evenly = worst(water, SOLVED, SPARE, LANES) > worst(water, EVEN, SPARE, LANES)
    write_sums(evenly, entries, longest, counts, start, cumulative, places, SPARE)


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
    plural = list_plural_experts(
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
