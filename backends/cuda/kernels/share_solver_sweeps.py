"""The sweeps of the share solver: experts that share no rank are refilled together.

The contract refills experts one after the other. A refill reads and writes the loads of its
expert's own ranks and nothing else, so two experts without a common rank may be refilled in either
order, or at once, with the same result to the bit. A *wave* is a set of such experts, and an
expert's wave is the first after those of all earlier experts that it shares a rank with. That
keeps the order wherever it matters. At 256 experts and 288 slots on 32 ranks some thirty plural
experts make about five waves.

Within a wave a rank belongs to one expert at most. So a lane stands for a rank: it holds the rank's
load, and the bin of whatever expert the wave has there. The bins of an expert are linked in a
circle, round which numbers are handed on. Nothing is sorted: with O the loads of other experts, a
bin is under water if D = sum over the expert's bins of max(0, O - O') is below its total, and rises
to hold (total + sum over bins under water of (O' - O)) // how many those are; the remainder goes
one unit each to those of the lowest ranks. Of two bins, a and b, of lower and higher rank, that is
a' = min(max(a + (L_b - L_a + 1 >> 1), 0), total) with L the loads of the ranks, own bins included.
"""

import triton
import triton.language as tl

from equipoise.backends.cuda.kernels.share_solver_fill import (
    BITS,
    LINKS,
    LOADS,
    MOST,
    PART,
    TOTALS,
    WAVE,
    WAVES,
    by_expert,
    grid,
)


@triton.jit
def make_waves(
    plural: tl.tensor,
    water: tl.tensor,
    places: tl.tensor,
    SPARE: tl.constexpr,
    LANES: tl.constexpr,
) -> tl.tensor:
    """Move the rows of experts to those of their waves; returns how many waves there are.

    What is left behind of an expert's links is zero, for the next solution.
    """
    lane = tl.arange(0, LANES)
    depth, waves = tl.zeros([LANES], tl.int32), tl.full([], 0, tl.int32)
    for owner in range(plural):
        row = grid(water, LINKS, SPARE, LANES) + owner * LANES + lane
        link = tl.load(row)
        has_link = link > 0
        wave = tl.max(tl.where(has_link, depth + 1, 0), 0)
        tl.store(by_expert(places, WAVE, SPARE) + owner, wave - 1)
        tl.store(row, tl.zeros_like(link), mask=has_link)
        write_mask = has_link | (tl.zeros_like(depth) + wave > waves)
        move_row(owner, wave - 1, link, write_mask, water, SPARE, LANES)
        depth = tl.where(has_link, wave, depth)
        waves = tl.maximum(waves, wave)
    tl.debug_barrier()
    for wave in range(waves):
        link = tl.load(grid(water, WAVES + LINKS, SPARE, LANES) + wave * LANES + lane)
        most = tl.max(((link >> BITS) & PART).to(tl.int32), 0)
        tl.store(by_expert(places, MOST, SPARE) + wave, most)
    return waves


@triton.jit
def move_row(
    owner: tl.tensor,
    wave: tl.tensor,
    link: tl.tensor,
    written: tl.tensor,
    water: tl.tensor,
    SPARE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Write an expert's bins to a wave; zeros too where it begins."""
    lane = tl.arange(0, LANES)
    at, to = owner * LANES + lane, wave * LANES + lane
    has_link = link > 0
    load = tl.load(grid(water, LOADS, SPARE, LANES) + at, mask=has_link, other=0)
    total = tl.load(grid(water, TOTALS, SPARE, LANES) + at, mask=has_link, other=0)
    tl.store(grid(water, WAVES + LOADS, SPARE, LANES) + to, load, mask=written)
    tl.store(grid(water, WAVES + TOTALS, SPARE, LANES) + to, total, mask=written)
    tl.store(grid(water, WAVES + LINKS, SPARE, LANES) + to, link, mask=written)


@triton.jit
def refill_pairs(
    level: tl.tensor, load: tl.tensor, total: tl.tensor, link: tl.tensor, LANES: tl.constexpr
) -> tl.tensor:
    """The new loads of bins of which every expert has two."""
    onward = (link & PART).to(tl.int32)
    other_level = tl.gather(level, onward, 0)
    first = (tl.arange(0, LANES) < onward).to(tl.int64)
    return tl.minimum(tl.maximum(load + ((other_level - level + first) >> 1), 0), total)


@triton.jit
def refill_bins(
    level: tl.tensor,
    load: tl.tensor,
    total: tl.tensor,
    link: tl.tensor,
    most: tl.tensor,
) -> tl.tensor:
    """The new loads of bins of which no expert has more than `most`."""
    below, bins = (link >> (2 * BITS)).to(tl.int32), ((link >> BITS) & PART).to(tl.int32)
    onward, other_loads = (link & PART).to(tl.int32), level - load
    passing, depth = other_loads, tl.zeros_like(load)
    for turn in range(1, most):
        passing = tl.gather(passing, onward, 0)
        depth += tl.where(turn < bins, tl.maximum(other_loads - passing, 0), 0)
    wet = depth < total
    passing, under = other_loads, wet.to(tl.int32)
    volume, width, lower = total, under, tl.zeros_like(under)
    for turn in range(1, most):
        passing, under = tl.gather(passing, onward, 0), tl.gather(under, onward, 0)
        is_under = (turn < bins) & (under > 0)
        volume += tl.where(is_under, passing - other_loads, 0)
        width += is_under.to(tl.int32)
        lower += (is_under & (below + turn >= bins)).to(tl.int32)
    divisor = tl.maximum(width, 1)
    height = volume // divisor
    rest = volume - height * divisor
    return tl.where(wet, height + (lower < rest).to(tl.int64), 0)


@triton.jit
def read_wave(
    wave: tl.tensor,
    water: tl.tensor,
    places: tl.tensor,
    SPARE: tl.constexpr,
    LANES: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Bins of its largest expert; of each rank's bin the link, the load and its expert's total."""
    at = wave * LANES + tl.arange(0, LANES)
    most = tl.load(by_expert(places, MOST, SPARE) + wave)
    link = tl.load(grid(water, WAVES + LINKS, SPARE, LANES) + at)
    load = tl.load(grid(water, WAVES + LOADS, SPARE, LANES) + at)
    total = tl.load(grid(water, WAVES + TOTALS, SPARE, LANES) + at)
    return most, link, load, total


@triton.jit
def sweep_waves(
    level: tl.tensor,
    waves: tl.tensor,
    water: tl.tensor,
    places: tl.tensor,
    SWEEPS: tl.constexpr,
    SPARE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Refill wave after wave, until a sweep changes nothing or it was the last."""
    lane = tl.arange(0, LANES)
    sweep, moving = tl.full([], 0, tl.int32), tl.full([], 1, tl.int32)
    while (sweep < SWEEPS) & (moving > 0):
        # What a thread stored in the sweep before may be another's to load.
        tl.debug_barrier()
        changed = tl.zeros([LANES], tl.int32)
        most, link, load, total = read_wave(0, water, places, SPARE, LANES)
        for wave in range(waves):
            # Under way while this wave is refilled; after the last one it is read for nothing.
            onward = tl.minimum(wave + 1, waves - 1)
            most_ahead, link_ahead, load_ahead, total_ahead = read_wave(
                onward, water, places, SPARE, LANES
            )
            if most == 2:
                new_load = refill_pairs(level, load, total, link, LANES)
            else:
                new_load = refill_bins(level, load, total, link, most)
            new_load = tl.where(link > 0, new_load, load)
            tl.store(grid(water, WAVES + LOADS, SPARE, LANES) + wave * LANES + lane, new_load)
            level += new_load - load
            changed |= (new_load != load).to(tl.int32)
            most, link, load, total = most_ahead, link_ahead, load_ahead, total_ahead
        moving = tl.max(changed, 0)
        sweep += 1
    tl.debug_barrier()
