"""Counts experts in the launch that routes them, without a launch that clears the counts first.

A batch of one block is counted by its program alone. Otherwise every program adds the histogram of
its block to totals in the workspace, then takes a ticket; whoever draws the last one moves the
totals to the result and leaves zeros, which is how the next launch on the stream finds them.

**Order.** The additions are relaxed: only their sum matters. What must hold is that the last
program sees all of them, and the pattern is that of a grid barrier. (1) All threads of a program
have issued their additions when they leave the barrier of the block, which orders them before
whatever the thread of the ticket does next. (2) The ticket's addition is a release and an acquire
at device scope, and releases are cumulative: it carries along what its thread has observed across
the barrier. Every ticket joins one chain of read-modify-write operations, so the thread that draws
the last one acquires what all others released. (3) The second barrier, by which the ticket's value
reaches the block's other threads, carries that on to them. (4) They read with atomic exchanges,
which act where the additions did, in the device's second cache: nothing stale of a first cache can
be seen. What the last program leaves behind, zeros by exchange and by store, is ordered before the
next launch by the end of this one.
"""

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class LaunchConfig:
    """Launch configuration of a batch.

    Attributes:
        block: elements a program, a power of two.
        warps: of a program.
        programs: how many.
    """

    block: int
    warps: int
    programs: int

    @property
    def alone(self) -> bool:
        """Whether one program has it all."""
        return self.programs == 1


BATCHES = ((256, 256, 4), (512, 512, 8), (1024, 128, 4), (32_768, 256, 8))
"""Batches of up to so many elements: elements of a program, and its warps. One program has a small
batch to itself, since the tickets cost more than the others would save; a batch of a few thousand
goes to many, whose searches wait for memory at once. Measured: docs/design/cuda-backend.md."""
LARGE_BATCH = (512, 8)
"""The same for larger ones: adding a histogram costs fewer additions than there are elements."""


def launch_config(elements: int) -> LaunchConfig:
    """Programs for a batch of `elements`; an empty one has a program too, which clears counts."""
    fitting = ((block, warps) for most, block, warps in BATCHES if elements <= most)
    block, warps = next(fitting, LARGE_BATCH)
    return LaunchConfig(block, warps, max(1, -(-elements // block)))


@triton.jit
def add_histogram(
    block_counts: tl.tensor,
    counts: tl.tensor,
    totals: tl.tensor,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ALONE: tl.constexpr,
) -> None:
    """A block's histogram: to the result if ALONE, else it is added to the totals."""
    bins = tl.arange(0, BINS)
    if ALONE:
        tl.store(counts + bins, block_counts, mask=bins < EXPERTS)
    else:
        some = (bins < EXPERTS) & (block_counts > 0)
        tl.atomic_add(totals + bins, block_counts, mask=some, sem="relaxed")


@triton.jit
def draw_ticket(ticket: tl.tensor, ALONE: tl.constexpr) -> tl.tensor:
    """Whether this program is the last; what all others added before is then seen by it."""
    if ALONE:
        return False
    # Every thread's additions come before the ticket, which one thread draws.
    tl.debug_barrier()
    number = tl.atomic_add(ticket, 1, sem="acq_rel")
    return number == tl.num_programs(0) - 1


@triton.jit
def publish_totals(
    counts: tl.tensor,
    totals: tl.tensor,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """By the last program: the totals to the result, zeros in their place and in the ticket's."""
    bins = tl.arange(0, BINS)
    inside = bins < EXPERTS
    sums = tl.atomic_xchg(totals + bins, tl.zeros_like(bins), mask=inside, sem="relaxed")
    tl.store(counts + bins, sums, mask=inside)
    tl.store(totals + BINS, 0)
