"""Dividing rows among the replicas of each expert so that all ranks get as many of them.

One program levels a layer, with the values of `equipoise.hal.levelled_routing` bit for bit. Only
experts with several replicas matter, which are called *plural*, and their replicas *entries*,
numbered in the order of the table. A lane is an entry: it holds what the replica takes, and stands
for the pair that the replica is the first of. So pairs come in the order of their lanes.

**Order.** The contract takes one pair after the other. An exchange reads and writes two replicas
and the loads of their two ranks, so two pairs without a common rank may exchange in either order,
or at once, with the same result to the bit. (A replica is on one rank: two pairs of one replica
have that in common.) What is left of the order is that each rank takes part in its own pairs in
their order, again and again. So the load of a rank travels, round and round, from one pair of that
rank to the next. A pair that has the loads of both its ranks exchanges and hands them on; all pairs
that can do so in one *turn*. It never stops early: of the exchanges that are due, the first one in
the contract's order has both loads. Sweeps overlap, which waves of independent pairs would not:
eight sweeps along a chain of 32 ranks are 45 turns, and would be 248 waves.

Pairs within a rank move nothing, and are left out.

**Where things are.** In a turn everything is in registers, and lanes read each other's by gathers
from lanes that were found before. In a warp that has all lanes a gather is shuffles; otherwise it
goes through shared memory, with barriers. Up to `ENTRIES_OF_A_WARP` entries every warp has all of
them, and all warps do the same. Memory holds what is looked up by rank: slots of a rank stand in a
row, and so do what they take (`loads`) and which pairs they belong to (`codes`).

**Range.** int32 is enough up to `NARROW` rows: all loads together are at most 2**30.
"""

import triton
import triton.language as tl

from equipoise.backends.cuda.kernels.hashing import mix32
from equipoise.backends.cuda.kernels.table_lookup import find_run
from equipoise.hal import levelled_routing

NARROW = 1 << 22
"""Rows of the largest batch that is levelled in int32."""
FRACTION_BITS = tl.constexpr(levelled_routing.FRACTION_BITS)
TURNS = tl.constexpr(8)
"""Turns between two looks at whether all is done; a look takes about as long as two turns."""
SIDE_BITS, SIDE = tl.constexpr(16), tl.constexpr(0xFFFF)
"""Of each of the two codes of a slot."""
MAX_ENTRIES = 1 << 14
"""So many have codes that fit."""
ENTRIES_OF_A_WARP = 128
"""At most: a gather within a warp takes four times the shuffles for twice the entries."""


@triton.jit
def find_single(
    start: tl.tensor, replicas: tl.tensor, EXPERTS: tl.constexpr, BINS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The slots of experts with one replica, and how many replicas each expert has."""
    expert = tl.arange(0, BINS)
    first, copies = find_run(start, expert, expert < EXPERTS)
    return tl.load(replicas + first, mask=copies == 1, other=0), copies


@triton.jit
def list_entries(
    total: tl.tensor,
    copies: tl.tensor,
    entries: tl.tensor,
    BINS: tl.constexpr,
    ENTRIES: tl.constexpr,
) -> tl.tensor:
    """List of each entry its expert with its place in the run, and its rows; returns how many."""
    listed = tl.where(copies > 1, copies, 0)
    base = tl.cumsum(listed, 0) - listed
    for place in range(tl.max(listed, 0)):
        fits = (place < listed) & (base + place < ENTRIES)
        tl.store(entries + base + place, place * BINS + tl.arange(0, BINS), mask=fits)
        tl.store(entries + ENTRIES + base + place, total, mask=fits)
    return tl.minimum(tl.sum(listed, 0), ENTRIES)


@triton.jit
def read_entries(
    entry: tl.tensor,
    inside: tl.tensor,
    entries: tl.tensor,
    start: tl.tensor,
    BINS: tl.constexpr,
    ENTRIES: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Of entries: expert, its rows, place in its run, where the run begins, and its length."""
    listed = tl.load(entries + entry, mask=inside, other=0)
    rows = tl.load(entries + ENTRIES + entry, mask=inside, other=0)
    first, copies = find_run(start, listed % BINS, inside)
    return listed % BINS, rows, listed // BINS, first, copies


@triton.jit
def store_codes(
    entry: tl.tensor,
    slot: tl.tensor,
    inside: tl.tensor,
    linked: tl.tensor,
    back: tl.tensor,
    codes: tl.tensor,
) -> None:
    """By slot: the code of the pair that it is first of, and of the one that it is second of.

    The code of a pair is twice its number, and for its second replica one more; here a further one
    more, so that 0 is none. Codes of one rank are in the order of pairs, since no pair is within a
    rank.
    """
    second = gather(linked.to(tl.int32), back) > 0
    as_first = tl.where(linked, 2 * entry + 1, 0)
    as_second = tl.where(second, 2 * back + 2, 0)
    tl.store(codes + slot, as_first | (as_second << SIDE_BITS), mask=inside)


@triton.jit
def find_source(
    home: tl.tensor,
    code: tl.tensor,
    linked: tl.tensor,
    codes: tl.tensor,
    PER_RANK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Which code each one's rank comes from, in a circle; and whether it is the rank's first."""
    before, last = tl.full(code.shape, -1, tl.int32), tl.full(code.shape, -1, tl.int32)
    for place in range(PER_RANK):
        both = tl.load(codes + home * PER_RANK + place, mask=linked, other=0)
        for side in tl.static_range(2):
            other = ((both >> (side * SIDE_BITS)) & SIDE) - 1
            last = tl.maximum(last, other)
            before = tl.maximum(before, tl.where(other < code, other, -1))
    return tl.where(before < 0, tl.maximum(last, 0), before), before < 0


@triton.jit
def begin_levels(
    home: tl.tensor,
    begins: tl.tensor,
    loads: tl.tensor,
    PER_RANK: tl.constexpr,
    TYPE: tl.constexpr,
) -> tl.tensor:
    """The loads of ranks where these begin; -1, which no load is, elsewhere."""
    load = tl.zeros(home.shape, tl.int64)
    for place in range(PER_RANK):
        load += tl.load(loads + home * PER_RANK + place, mask=begins, other=0)
    return tl.where(begins, load, -1).to(TYPE)


@triton.jit
def gather(values: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Those at the indices, along the last axis."""
    return tl.gather(values, index, len(index.shape) - 1)


@triton.jit
def hand_on(first: tl.tensor, second: tl.tensor, source: tl.tensor) -> tl.tensor:
    """What the source of each one hands on, as the first or as the second of its pair."""
    pair = source >> 1
    return tl.where((source & 1) == 0, gather(first, pair), gather(second, pair))


@triton.jit
def exchange(
    load: tl.tensor,
    first_level: tl.tensor,
    second_level: tl.tensor,
    linked: tl.tensor,
    onward: tl.tensor,
    back: tl.tensor,
    first_source: tl.tensor,
    second_source: tl.tensor,
    SWEEPS: tl.constexpr,
    IN_ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
) -> tl.tensor:
    """What the entries take after the sweeps of all pairs.

    Levels are the loads of the ranks of a pair's first and second replica while they are with the
    pair, and -1 otherwise.
    """
    due = tl.where(linked, SWEEPS, 0)
    left, rounds = tl.max(due), tl.full([], 0, tl.int32)
    # In every turn at least one pair exchanges, so that the bound is never met.
    while (left > 0) & (rounds * TURNS < ENTRIES * SWEEPS):
        for _ in range(TURNS):
            ready = (first_level >= 0) & (second_level >= 0) & (due > 0)
            difference = first_level - second_level
            if IN_ROWS:
                # Rounded towards zero.
                wanted = (difference + (difference < 0).to(difference.dtype)) >> 1
            else:
                wanted = difference - (difference >> 2)
            moved = tl.maximum(tl.minimum(wanted, load), -gather(load, onward))
            moved = tl.where(ready, moved, 0)
            load += gather(moved, back) - moved
            first = tl.where(ready, first_level - moved, -1)
            second = tl.where(ready, second_level + moved, -1)
            first_level = tl.where(ready, -1, first_level)
            second_level = tl.where(ready, -1, second_level)
            first_level = tl.maximum(first_level, hand_on(first, second, first_source))
            second_level = tl.maximum(second_level, hand_on(first, second, second_source))
            due -= ready.to(tl.int32)
        left = tl.max(due)
        rounds += 1
    return load


@triton.jit
def even_load(
    rows: tl.tensor, place: tl.tensor, copies: tl.tensor, TYPE: tl.constexpr
) -> tl.tensor:
    """What a replica begins with; divided in int32, which holds no product of rows."""
    whole = rows // copies
    parts = (rows - whole * copies) << FRACTION_BITS
    each = parts // copies
    remainder = tl.where(place == 0, parts - each * copies, 0)
    return (whole.to(TYPE) << FRACTION_BITS) + each + remainder


@triton.jit
def sums_of_runs(values: tl.tensor, base: tl.tensor) -> tl.tensor:
    """Inclusive sums along the run of each entry, which begins at `base`."""
    sums = tl.cumsum(values, len(values.shape) - 1)
    return sums - gather(sums - values, base)


@triton.jit
def level(
    total: tl.tensor,
    start: tl.tensor,
    replicas: tl.tensor,
    state: tl.tensor,
    loads: tl.tensor,
    places: tl.tensor,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    PER_RANK: tl.constexpr,
    BINS: tl.constexpr,
    ENTRIES: tl.constexpr,
    WARP_COPIES: tl.constexpr,
    WIDE: tl.constexpr,
    SWEEPS: tl.constexpr,
) -> None:
    """Write to `places` where the quota of each replica of plural experts ends.

    Args:
        total: int32 [BINS], rows by expert.
        start: the layer's live row.
        replicas: the layer's live row.
        state: of the hash.
        loads: int64 [SLOTS], overwritten by what each slot takes.
        places: int32 [2 * SLOTS + 2 * ENTRIES], overwritten by ends in the order of the table, then
            codes by slot, then expert and place of each entry, and rows of each entry.
        EXPERTS: logical experts.
        SLOTS: physical slots.
        PER_RANK: slots of a rank.
        BINS: length of `total`.
        ENTRIES: at least as many as there are.
        WARP_COPIES: how many warps have all entries each; 1 where warps share them.
        WIDE: whether there may be more than NARROW rows.
        SWEEPS: of the contract, before the one in whole rows.
    """
    TYPE: tl.constexpr = tl.int64 if WIDE else tl.int32
    codes, entries = places + SLOTS, places + 2 * SLOTS
    single, copies = find_single(start, replicas, EXPERTS, BINS)
    tl.store(loads + single, total.to(tl.int64) << FRACTION_BITS, mask=copies == 1)
    tl.store(codes + single, tl.zeros_like(single), mask=copies == 1)
    number = list_entries(total, copies, entries, BINS, ENTRIES)
    tl.debug_barrier()
    entry = tl.arange(0, ENTRIES)
    if WARP_COPIES > 1:
        entry = tl.broadcast_to(entry[None, :], [WARP_COPIES, ENTRIES])
    inside = entry < number
    expert, rows, place, first, copies = read_entries(entry, inside, entries, start, BINS, ENTRIES)
    base, last = entry - place, place == copies - 1
    onward = tl.where(last, base, tl.where(inside, entry + 1, entry))
    back = tl.where(inside & (place == 0), entry + copies - 1, tl.where(inside, entry - 1, entry))
    slot = tl.load(replicas + first + place, mask=inside, other=0)
    home = slot // PER_RANK
    other_home = gather(home, onward)
    # A ring of two is one pair.
    linked = inside & (home != other_home) & ((copies > 2) | (place == 0))
    load = even_load(rows, place, tl.maximum(copies, 1), TYPE)
    tl.store(loads + slot, load.to(tl.int64), mask=inside)
    store_codes(entry, slot, inside, linked, back, codes)
    tl.debug_barrier()
    first_source, begins = find_source(home, 2 * entry, linked, codes, PER_RANK)
    second_source, other_begins = find_source(other_home, 2 * entry + 1, linked, codes, PER_RANK)
    begins, other_begins = linked & begins, linked & other_begins
    load = exchange(
        load,
        begin_levels(home, begins, loads, PER_RANK, TYPE),
        begin_levels(other_home, other_begins, loads, PER_RANK, TYPE),
        linked, onward, back, first_source, second_source, SWEEPS, False, ENTRIES,
    )  # fmt: skip
    # Read once more: held in registers meanwhile, some of it would spill.
    expert, rows, place, first, copies = read_entries(entry, inside, entries, start, BINS, ENTRIES)
    base, last = entry - place, place == copies - 1
    dither = (mix32(expert, state) >> (32 - FRACTION_BITS)).to(TYPE)
    end = (sums_of_runs(load, base) + dither) >> FRACTION_BITS
    end = tl.where(last, rows.to(TYPE), end)
    load = end - tl.where(place > 0, gather(end, back), 0)
    # After the last thread has read the loads in parts of rows.
    tl.debug_barrier()
    single, copies = find_single(start, replicas, EXPERTS, BINS)
    whole = tl.load(loads + single, mask=copies == 1, other=0) >> FRACTION_BITS
    tl.store(loads + single, whole, mask=copies == 1)
    slot = tl.load(replicas + first + place, mask=inside, other=0)
    home = slot // PER_RANK
    other_home = gather(home, onward)
    tl.store(loads + slot, load.to(tl.int64), mask=inside)
    tl.debug_barrier()
    load = exchange(
        load,
        begin_levels(home, begins, loads, PER_RANK, TYPE),
        begin_levels(other_home, other_begins, loads, PER_RANK, TYPE),
        linked, onward, back, first_source, second_source, 1, True, ENTRIES,
    )  # fmt: skip
    tl.store(places + first + place, sums_of_runs(load, base).to(tl.int32), mask=inside)
    tl.debug_barrier()
