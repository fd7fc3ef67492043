"""What routing and counting on a CUDA device is measured against: other ways to do the like.

`hash_and_count` is vLLM 0.33's kernel `eplb_map_to_physical_and_record`, written again from what it
computes: element j is of row t = j // top_k; it goes to replica ((t * 2654435769) mod 2**32) mod
max(copies, 1) of its expert, by a matrix of replicas; an id that is no expert gives -1; and the
load of the replica is counted by one atomic addition for each element, if the row is not behind the
batch and the replica is a slot. Blocks of 256, one launch. It adds to the load, and clears nothing.

`torch_hash_and_count` is the same in plain operators of torch that may stand in a captured graph:
no size depends on a value.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

KNUTH32 = 2654435769
KNUTH_32 = tl.constexpr(KNUTH32)
BLOCK = 256


@triton.jit(do_not_specialize=["elements", "top_k"])
def hash_and_count_kernel(
    ids: tl.tensor,
    elements: tl.int32,
    replicas: tl.tensor,
    copies: tl.tensor,
    load: tl.tensor,
    rows: tl.tensor,
    top_k: tl.int32,
    out: tl.tensor,
    EXPERTS: tl.constexpr,
    MOST: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One block of elements."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < elements
    expert = tl.load(ids + at, mask=there, other=-1)
    is_expert = there & (expert >= 0) & (expert < EXPERTS)
    row = at // top_k
    copy_count = tl.load(copies + expert, mask=is_expert, other=1)
    turn = row.to(tl.uint32) * KNUTH_32 % tl.maximum(copy_count, 1).to(tl.uint32)
    place = replicas + expert * MOST + turn.to(tl.int32)
    slot = tl.load(place, mask=is_expert, other=-1)
    tl.store(out + at, slot, mask=there)
    is_counted = is_expert & (row < tl.load(rows)) & (slot >= 0) & (slot < SLOTS)
    tl.atomic_add(load + slot, 1, mask=is_counted, sem="relaxed")


def hash_and_count(
    ids: Tensor,
    replicas: Tensor,
    copies: Tensor,
    load: Tensor,
    rows: Tensor,
    top_k: int,
    out: Tensor,
) -> None:
    """Route by the hash of rows and count, in one launch on the current stream.

    Args:
        ids: int32 [n], expert ids; one outside the experts is padding.
        replicas: int32 [experts, most], the slots of each expert; what fills a row up is not read.
        copies: int32 [experts], how many there are.
        load: int32 [slots], added to.
        rows: int32 [1], how many rows are counted.
        top_k: elements a row.
        out: int32 [n], overwritten; -1 for padding.
    """
    programs = -(-ids.numel() // BLOCK)
    if programs == 0:
        return
    hash_and_count_kernel[(programs,)](
        ids,
        ids.numel(),
        replicas,
        copies,
        load,
        rows,
        top_k,
        out,
        EXPERTS=replicas.shape[0],
        MOST=replicas.shape[1],
        SLOTS=load.numel(),
        BLOCK=BLOCK,
        num_warps=4,
    )


def torch_hash_and_count(
    ids: Tensor,
    replicas: Tensor,
    copies: Tensor,
    load: Tensor,
    rows: Tensor,
    top_k: int,
    out: Tensor,
) -> None:
    """The same, operator by operator; arguments as `hash_and_count`."""
    experts, slots = replicas.shape[0], load.numel()
    row = torch.arange(ids.numel(), device=ids.device) // top_k
    is_expert = (ids >= 0) & (ids < experts)
    expert = torch.where(is_expert, ids, 0).long()
    turn = ((row * KNUTH32) & 0xFFFFFFFF) % copies[expert].clamp(min=1)
    slot = torch.where(is_expert, replicas[expert, turn], -1)
    out.copy_(slot)
    is_counted = is_expert & (row < rows) & (slot >= 0) & (slot < slots)
    load.scatter_add_(0, torch.where(is_counted, slot, 0).long(), is_counted.int())
