"""Numbering the occurrences of each expert, in the order of the batch.

An element is compared with those before it, a few at a time and all elements of a block at once:
no sort, no table of experts, and the answer does not depend on the order in which threads come.
Pairs grow with the square of what is compared, so it is done within one block, or within batches of
a few; blocks before it are better counted (`quota_routing`).
"""

import triton
import triton.language as tl

WARPS = 4
"""Of a program, for a block of `workspace.BLOCK`."""
CHUNK = tl.constexpr(32)
"""Elements that all of the block are compared with at a time, by every thread for its own."""


@triton.jit
def load_chunk(ids: tl.tensor, first: tl.tensor, elements: tl.tensor) -> tuple[tl.tensor, ...]:
    """Experts and places of a chunk, as a column; after the batch there is no expert."""
    at = first + tl.arange(0, CHUNK)
    return tl.load(ids + at, mask=at < elements, other=-1)[:, None], at[:, None]


@triton.jit
def count_equal(
    ids: tl.tensor, expert: tl.tensor, since: tl.tensor, until: tl.tensor, elements: tl.tensor
) -> tl.tensor:
    """How many of the elements [since, until), whole chunks, are equal to each of `expert`."""
    matches = tl.zeros_like(expert)
    for first in range(since, until, CHUNK):
        other_ids, _ = load_chunk(ids, first, elements)
        matches += tl.sum((other_ids == expert[None, :]).to(tl.int32), 0)
    return matches


@triton.jit
def count_earlier_in_block(
    ids: tl.tensor, expert: tl.tensor, at: tl.tensor, elements: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """How many earlier elements of this program's block are equal to each of `expert`."""
    matches = tl.zeros_like(expert)
    first = tl.program_id(0) * BLOCK
    for chunk in range(first, first + BLOCK, CHUNK):
        other_ids, place = load_chunk(ids, chunk, elements)
        equal = (other_ids == expert[None, :]) & (place < at[None, :])
        matches += tl.sum(equal.to(tl.int32), 0)
    return matches
