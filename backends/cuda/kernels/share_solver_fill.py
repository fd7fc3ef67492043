"""The share solver's memory layout, and the filling of one expert's bins.

One program solves a layer. Two arrays in the workspace hold what does not fit into its registers:

`water`, int64: six grids of [spare, lanes], then the rests of the rounding [2 * spare], then four
rows of rank loads [lanes]. The first three grids have a row for each expert with several replicas,
the next three one for each wave (`share_solver_sweeps`), and all a column for each rank.
`places`, int32: four lists by such expert or wave [spare], then four by their replicas [2 * spare].

An expert with several replicas is *plural*, its replicas are *entries*; both are numbered in the
order of the table. There are at most `spare` plural experts, since every expert takes one slot, and
at most twice as many entries.

The first filling finds the plural experts, fills their bins, and links them.
"""

import triton
import triton.language as tl

from equipoise.backends.cuda.kernels.table_lookup import find_run
from equipoise.hal import routing

GRIDS, LOADS, TOTALS, LINKS = (tl.constexpr(number) for number in (6, 0, 1, 2))
"""Of an expert's bins, and after them of a wave's: what each holds, what all of its expert hold,
and how they are linked."""
WAVES = tl.constexpr(3)
ALONE, FILLED, SOLVED, EVEN = (tl.constexpr(number) for number in range(4))
"""Rank loads: of experts with one replica; of the others at first, by their shares, evenly."""
EXPERT, FIRST, WAVE, MOST = (tl.constexpr(number) for number in range(4))
"""By plural expert: which, its first entry, its wave. By wave: bins of its largest expert."""
OWNER, COPIES, WHOLE, SHARE = (tl.constexpr(number) for number in range(4))
"""By entry: plural expert, replicas in its bin, share rounded down, share."""
BITS = tl.constexpr(20)
"""Of each number that a link is packed of: next rank of the expert, its bins, those below."""
PART = tl.constexpr((1 << 20) - 1)
EXPERT_CHUNK, CHUNK = tl.constexpr(256), tl.constexpr(64)
"""Experts, and entries, that the program handles at a time."""
SHARE_BITS = tl.constexpr(routing.SHARE_BITS)
ONE = tl.constexpr(routing.SHARE_ONE)


@triton.jit
def grid(
    water: tl.tensor, index: tl.constexpr, SPARE: tl.constexpr, LANES: tl.constexpr
) -> tl.tensor:
    """The start of a grid."""
    return water + index * SPARE * LANES


@triton.jit
def rests(water: tl.tensor, SPARE: tl.constexpr, LANES: tl.constexpr) -> tl.tensor:
    """The start of the rests."""
    return grid(water, GRIDS, SPARE, LANES)


@triton.jit
def levels(
    water: tl.tensor, index: tl.constexpr, SPARE: tl.constexpr, LANES: tl.constexpr
) -> tl.tensor:
    """The start of a row of rank loads."""
    return rests(water, SPARE, LANES) + 2 * SPARE + index * LANES


@triton.jit
def read_levels(
    water: tl.tensor, index: tl.constexpr, SPARE: tl.constexpr, LANES: tl.constexpr
) -> tl.tensor:
    """A row of rank loads, which are sums of atomic additions: read where those act."""
    row = levels(water, index, SPARE, LANES) + tl.arange(0, LANES)
    return tl.load(row, cache_modifier=".cg")


@triton.jit
def by_expert(places: tl.tensor, index: tl.constexpr, SPARE: tl.constexpr) -> tl.tensor:
    """The start of a list by plural expert or wave."""
    return places + index * SPARE


@triton.jit
def by_entry(places: tl.tensor, index: tl.constexpr, SPARE: tl.constexpr) -> tl.tensor:
    """The start of a list by entry."""
    return places + (4 + 2 * index) * SPARE


@triton.jit
def find_entry(
    entry: tl.tensor,
    inside: tl.tensor,
    counts: tl.tensor,
    start: tl.tensor,
    places: tl.tensor,
    SPARE: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Of entries: plural expert, first entry of it, its run in the table, and its tokens, int64."""
    owner = tl.load(by_entry(places, OWNER, SPARE) + entry, mask=inside, other=0)
    expert = tl.load(by_expert(places, EXPERT, SPARE) + owner, mask=inside, other=0)
    base = tl.load(by_expert(places, FIRST, SPARE) + owner, mask=inside, other=0)
    first, copies = find_run(start, expert, inside)
    tokens = tl.load(counts + expert, mask=inside, other=0).to(tl.int64)
    return owner, base, first, copies, tokens


@triton.jit
def even_share(place: tl.tensor, copies: tl.tensor) -> tl.tensor:
    """Of the replica at `place` of a run; the first ones take what the division leaves over."""
    whole = tl.maximum(copies, 1)
    share = ONE // whole
    return share + (share * whole + place < ONE).to(tl.int32)


@triton.jit
def list_plural_experts(
    counts: tl.tensor,
    start: tl.tensor,
    replicas: tl.tensor,
    cumulative: tl.tensor,
    water: tl.tensor,
    places: tl.tensor,
    EXPERTS: tl.constexpr,
    PER_RANK: tl.constexpr,
    SPARE: tl.constexpr,
    LANES: tl.constexpr,
) -> tl.tensor:
    """Settle the experts with one replica and list the others; returns how many those are."""
    plural = tl.full([], 0, tl.int32)
    for begin in tl.static_range(0, EXPERTS, EXPERT_CHUNK):
        expert = begin + tl.arange(0, EXPERT_CHUNK)
        inside = expert < EXPERTS
        first, copies = find_run(start, expert, inside)
        tokens = tl.load(counts + expert, mask=inside, other=0).to(tl.int64)
        alone, several = inside & (copies == 1), inside & (copies > 1)
        rank = tl.load(replicas + first, mask=alone, other=0) // PER_RANK
        level = levels(water, ALONE, SPARE, LANES) + rank
        tl.atomic_add(level, tokens << SHARE_BITS, mask=alone & (tokens > 0), sem="relaxed")
        tl.store(cumulative + first, ONE, mask=alone)
        place = plural + tl.cumsum(several.to(tl.int32), 0) - 1
        listed = several & (place < SPARE)
        tl.store(by_expert(places, EXPERT, SPARE) + place, expert, mask=listed)
        plural += tl.sum(several.to(tl.int32), 0)
    tl.debug_barrier()
    return tl.minimum(plural, SPARE)


@triton.jit
def list_entries(
    plural: tl.tensor,
    start: tl.tensor,
    places: tl.tensor,
    SPARE: tl.constexpr,
    PLURAL: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """List the entries of plural experts; returns how many there are, and of the longest run."""
    owner = tl.arange(0, PLURAL)
    inside = owner < plural
    expert = tl.load(by_expert(places, EXPERT, SPARE) + owner, mask=inside, other=0)
    _, copies = find_run(start, expert, inside)
    base = tl.cumsum(copies, 0) - copies
    tl.store(by_expert(places, FIRST, SPARE) + owner, base, mask=inside)
    longest = tl.max(copies, 0)
    for place in range(longest):
        entry_mask = (place < copies) & (base + place < 2 * SPARE)
        tl.store(by_entry(places, OWNER, SPARE) + base + place, owner, mask=entry_mask)
    tl.debug_barrier()
    return tl.minimum(tl.sum(copies, 0), 2 * SPARE), longest


@triton.jit
def link_bins(
    rank: tl.tensor,
    first: tl.tensor,
    copies: tl.tensor,
    longest: tl.tensor,
    replicas: tl.tensor,
    PER_RANK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Of each entry's bin: replicas, entry that begins it, bins of the expert, bins below, and the
    rank of the next bin, after the last of which comes the first."""
    shared, bins, below = tl.zeros_like(rank), tl.zeros_like(rank), tl.zeros_like(rank)
    before, lowest, onward = rank * 0 - 1, tl.zeros_like(rank), rank * 0 - 1
    begins = tl.zeros_like(rank)
    for place in range(longest):
        inside = place < copies
        other = tl.load(replicas + first + place, mask=inside, other=0) // PER_RANK
        new = inside & (other != before)
        lowest = tl.where(new & (before < 0), other, lowest)
        onward = tl.where(new & (other > rank) & (onward < 0), other, onward)
        begins += (inside & (other < rank)).to(tl.int32)
        shared += (inside & (other == rank)).to(tl.int32)
        bins += new.to(tl.int32)
        below += (new & (other < rank)).to(tl.int32)
        before = tl.where(inside, other, before)
    return shared, begins, bins, below, tl.where(onward < 0, lowest, onward)


@triton.jit
def fill_bins(
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
    """Fill every bin of plural experts for the first time, and write its row if it has several."""
    for begin in range(0, entries, CHUNK):
        entry = begin + tl.arange(0, CHUNK)
        inside = entry < entries
        owner, base, first, copies, tokens = find_entry(entry, inside, counts, start, places, SPARE)
        place = entry - base
        rank = tl.load(replicas + first + place, mask=inside, other=0) // PER_RANK
        shared, begins, bins, below, onward = link_bins(
            rank, first, copies, longest, replicas, PER_RANK
        )
        tl.store(by_entry(places, COPIES, SPARE) + entry, shared, mask=inside)
        total = tokens << SHARE_BITS
        each = total // tl.maximum(copies, 1)
        rest = tl.where(below == 0, total - each * copies, 0)
        load, leads = each * shared + rest, inside & (place == begins) & (tokens > 0)
        level = levels(water, FILLED, SPARE, LANES) + rank
        tl.atomic_add(level, load, mask=leads, sem="relaxed")
        share = tokens * even_share(place, copies)
        level = levels(water, EVEN, SPARE, LANES) + rank
        tl.atomic_add(level, share, mask=inside & (tokens > 0), sem="relaxed")
        at, linked = owner * LANES + rank, leads & (bins > 1)
        link = (below.to(tl.int64) << (2 * BITS)) | (bins.to(tl.int64) << BITS) | onward
        tl.store(grid(water, LOADS, SPARE, LANES) + at, load, mask=linked)
        tl.store(grid(water, TOTALS, SPARE, LANES) + at, total, mask=linked)
        tl.store(grid(water, LINKS, SPARE, LANES) + at, link, mask=linked)
    tl.debug_barrier()
