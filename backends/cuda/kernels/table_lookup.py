"""Reading routing tables on the device: which set is live, and which entry of a run is meant.

The tables of `equipoise.hal.kernels.Tables` are two sets of rows, [2, layers, ...]. A program reads
the generation word once and takes every row from the set `word & 1` (clause G1).
"""

import triton
import triton.language as tl

from equipoise.hal.kernels import Tables

WAYS = 4
"""Parts that a step of the search divides a run into."""


def longest_run(tables: Tables) -> int:
    """Entries that a run can have at most, since every expert has one."""
    return tables.slots - tables.experts + 1


def search_steps(longest: int) -> int:
    """Steps that `search` needs for runs of up to `longest` entries."""
    steps = 0
    while longest > 1:
        longest = -(-longest // WAYS)
        steps += 1
    return steps


@triton.jit
def live_row(generation: tl.tensor, layer: tl.tensor, LAYERS: tl.constexpr) -> tl.tensor:
    """Number of the layer's live row among the 2 * LAYERS rows of a table, int64."""
    word = tl.load(generation + layer)
    return (word & 1) * LAYERS + layer


@triton.jit
def find_run(start: tl.tensor, expert: tl.tensor, inside: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Where each expert's run begins in its table, and its length; 0 and 0 where not `inside`."""
    first = tl.load(start + expert, mask=inside, other=0)
    after = tl.load(start + expert + 1, mask=inside, other=0)
    return first, after - first


@triton.jit
def search(
    ends: tl.tensor, first: tl.tensor, copies: tl.tensor, draw: tl.tensor, STEPS: tl.constexpr
) -> tl.tensor:
    """Place of the first of the entries [first, first + copies) of `ends` that is above `draw`.

    The last entry is above every draw, so it is never read: an expert with one replica costs no
    load. A step asks three places at once, so that a run of up to four entries is one wait for
    memory, and one of up to sixteen is two. Where there are no copies the answer is `first`.
    """
    span = copies
    for _ in tl.static_range(STEPS):
        stride = (span + 3) // 4
        ends_before = tl.zeros_like(first)
        for part in tl.static_range(1, 4):
            probe = part * stride - 1
            probe_mask = (probe >= 0) & (probe < span - 1)
            end = tl.load(ends + first + probe, mask=probe_mask, other=0x7FFFFFFF)
            ends_before += (end <= draw).to(tl.int32)
        first += ends_before * stride
        span = tl.minimum(stride, span - ends_before * stride)
    return first


@triton.jit
def load_slots(
    replicas: tl.tensor, place: tl.tensor, inside: tl.tensor, SLOTS: tl.constexpr
) -> tl.tensor:
    """Slots at `place`, int32; the invalid one where not `inside`.

    The place is held within the table: before the first commit runs have no length.
    """
    safe_place = tl.minimum(place, SLOTS - 1)
    return tl.load(replicas + safe_place, mask=inside, other=SLOTS)
