"""Tokens per expert."""

import triton
import triton.language as tl
from torch import Tensor

from equipoise.backends.cuda.kernels.histogram import (
    add_histogram,
    draw_ticket,
    launch_config,
    publish_totals,
)
from equipoise.backends.cuda.kernels.workspace import Workspace, bins_of


@triton.jit(do_not_specialize=["elements"])
def count_kernel(
    ids: tl.tensor,
    elements: tl.int32,
    counts: tl.tensor,
    totals: tl.tensor,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALONE: tl.constexpr,
) -> None:
    """Count one block."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + at, mask=at < elements, other=-1)
    inside = (expert >= 0) & (expert < EXPERTS)
    histogram = tl.histogram(expert, BINS, mask=inside)
    add_histogram(histogram, counts, totals, EXPERTS, BINS, ALONE)
    if draw_ticket(totals + BINS, ALONE):
        publish_totals(counts, totals, EXPERTS, BINS)


def count(ids: Tensor, counts: Tensor, workspace: Workspace) -> None:
    """Tokens per expert, in one launch on the current stream.

    Args:
        ids: int32 [n], expert ids; one outside [0, experts) is padding.
        counts: int32 [experts], overwritten.
        workspace: of this stream.
    """
    division, experts = launch_config(ids.numel()), counts.numel()
    count_kernel[(division.programs,)](
        ids,
        ids.numel(),
        counts,
        workspace.totals,
        EXPERTS=experts,
        BINS=bins_of(experts),
        BLOCK=division.block,
        ALONE=division.alone,
        num_warps=division.warps,
    )
