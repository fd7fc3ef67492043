"""Checks of what a slot store is given; for backends to share.

Every check comes before any side effect, and raises `SlotError` (clause A8).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.hal.errors import SlotError
from equipoise.hal.slots import Segment, SlotLayout


def known(numbers: Sequence[int], limit: int, what: str) -> tuple[int, ...]:
    """The numbers, each of which is in [0, limit)."""
    for number in numbers:
        if not 0 <= number < limit:
            raise SlotError(f"{what} {number} is not in [0, {limit})")
    return tuple(numbers)


def check_packed(layout: SlotLayout, blob: Tensor, count: int) -> None:
    """A blob that holds so many slots, back to back."""
    size = layout.slot_bytes
    shaped = blob.dtype == torch.uint8 and blob.shape == (count * size,)
    if not shaped or not blob.is_contiguous():
        raise SlotError(
            f"a blob of {count} slots is contiguous uint8 [{count * size}], "
            f"got {blob.dtype} {list(blob.shape)} of strides {blob.stride()}"
        )


def source_segments(layout: SlotLayout, source: Sequence[Tensor]) -> list[Segment]:
    """The tensors of a source as segments that match the slots' descriptor."""
    wanted = layout.descriptor
    named = zip(wanted, source, strict=False)
    segments = [Segment(due.name, tensor, due.format) for due, tensor in named]
    types = tuple(segment.type for segment in segments)
    if len(source) != len(wanted) or types != wanted:
        raise SlotError(f"a source is {types}, the slots are {wanted}")
    return segments


def check_sums(out: Tensor, count: int) -> None:
    """Room for so many checksums."""
    if out.dtype != torch.int64 or out.shape != (count,):
        raise SlotError(
            f"checksums of {count} slots are int64 [{count}], got {out.dtype} {list(out.shape)}"
        )
