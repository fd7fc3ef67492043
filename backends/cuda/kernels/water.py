"""Where the share solver keeps its numbers, and how its device functions find them.

One program solves a layer. Two arrays in the workspace hold what does not fit into its registers:

`water`, int64: six grids of [spare, lanes], then the rests of the rounding [2 * spare], then four
rows of rank loads [lanes]. The first three grids have a row for each expert with several replicas,
the next three one for each wave (`waves`), and all a column for each rank.
`places`, int32: four lists by such expert or wave [spare], then four by their replicas [2 * spare].

An expert with several replicas is *plural*, its replicas are *entries*; both are numbered in the
order of the table. There are at most `spare` plural experts, since every expert takes one slot, and
at most twice as many entries.
"""

import triton
import triton.language as tl

from equipoise.backends.cuda.kernels.live import find_run
from equipoise.hal import routing

GRIDS, LOADS, TOTALS, LINKS = (tl.constexpr(number) for number in (6, 0, 1, 2))
"""Of an expert's bins, and behind them of a wave's: what each holds, what all of its expert hold,
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
