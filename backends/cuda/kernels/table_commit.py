"""Installing new tables: the idle set of each changed layer, then its generation word."""

import triton
import triton.language as tl
from torch import Tensor

from equipoise.hal.kernels import Tables

BLOCK = 1024
WARPS = 8


@triton.jit
def copy_row(
    source: tl.tensor, target: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Copy WIDTH int32."""
    for first in tl.static_range(0, WIDTH, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < WIDTH), mask=at < WIDTH)


@triton.jit
def commit_kernel(
    rows: tl.tensor,
    generation: tl.tensor,
    start: tl.tensor,
    replicas: tl.tensor,
    cumulative: tl.tensor,
    LAYERS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Install one layer.

    The word comes last (clause G2): the barrier orders all threads' stores before what its thread
    does next, and a release at device scope carries them along. Kernels of ours read the word by a
    plain load: a stream or an event orders them after this one, or before. A reader that nothing
    orders needs an acquire, and then sees the whole of the new set with the new word.
    """
    row = rows + tl.program_id(0) * (1 + EXPERTS + 1 + 2 * SLOTS)
    layer = tl.load(row)
    word = tl.load(generation + layer) + 1
    idle = (word & 1) * LAYERS + layer
    copy_row(row + 1, start + idle * (EXPERTS + 1), EXPERTS + 1, BLOCK)
    copy_row(row + EXPERTS + 2, replicas + idle * SLOTS, SLOTS, BLOCK)
    copy_row(row + EXPERTS + 2 + SLOTS, cumulative + idle * SLOTS, SLOTS, BLOCK)
    tl.debug_barrier()
    tl.atomic_xchg(generation + layer, word, sem="release")


def commit_tables(rows: Tensor, tables: Tables) -> None:
    """Install tables in one launch on the current stream, a program for each changed layer.

    Args:
        rows: int32 [changed layers, 1 + (experts + 1) + slots + slots], on the device: the number
            of the layer, each one once, then its `start`, `replicas` and `cumulative`.
        tables: of all layers.
    """
    if rows.shape[0] == 0:
        return
    commit_kernel[(rows.shape[0],)](
        rows,
        tables.generation,
        tables.start,
        tables.replicas,
        tables.cumulative,
        LAYERS=tables.layers,
        EXPERTS=tables.experts,
        SLOTS=tables.slots,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
