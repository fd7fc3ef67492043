"""Copies of bytes on a GPU, many in few launches, and their checksums.

Copies within the device go through one kernel for all of them: a slot consists of several segments,
some of a few bytes, and a launch per copy would cost as much as moving a small expert. Copies from
page-locked host memory go to a copy engine, in chunks: the engine is shared with the batch that the
model's step uploads, which would otherwise wait for a whole expert.
"""

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Protocol

import torch
from torch import Tensor

from equipoise.backends.devices.memory import copy
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.errors import Unsupported
from equipoise.hal.slots import Segment
from equipoise.hal.stream import Stream

COPY_CHUNK = 4 << 20
"""Maximum bytes of one copy between host and device: some 80 microseconds on a PCIe 5 link, the
longest that the model's own copies wait for it."""
WIDTHS = (torch.int32, torch.int16, torch.uint8)
"""Element types of a copy, widest first: the widest that addresses and sizes allow is used. Of four
bytes at most: a thread moves four elements at once and a block 65,536, so that with eight there are
too few blocks to fill a GPU (docs/design/cuda-backend.md)."""
Pair = tuple[Tensor, Tensor]
"""Where to, and from where: as many bytes, as uint8 or wider elements."""


class ChecksumParts(Protocol):
    """Launches on a stream, which is current."""

    def __call__(self, parts: Sequence[Tensor], out: Tensor, stream: Stream) -> None:
        """`equipoise.hal.checksum` of parts back to back, uint8 [n] each, into `out`, int64 [1]."""
        ...


class CudaByteOps:
    """Copies and checksums of one device."""

    def __init__(self, checksum_parts: ChecksumParts) -> None:
        self._checksum_parts = checksum_parts

    def view(self, segment: Segment) -> Tensor:
        """The segment's bytes. Raises `Unsupported` for a private format."""
        if segment.format is not SlotFormat.STRIDED:
            raise Unsupported(f"segment {segment.name!r}: CUDA has no {segment.format} format")
        return segment.bytes

    def words(self, part: Tensor) -> Tensor:
        """Viewed as elements of the widest type that fits."""
        return part.view(_width(part))

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy pairs within the device first, in one launch per width; then those from or to the
        host."""
        pairs = [pair for pair in pairs if pair[0].numel()]
        if _repeats(pairs):  # one kernel would write them in any order; the last must win
            for to, source in pairs:
                copy(to, source)
            return
        near = [pair for pair in pairs if pair[0].device == pair[1].device]
        for group in _by_width(near):
            into, out_of = zip(*group, strict=True)
            torch._foreach_copy_(into, out_of)  # pyright: ignore[reportPrivateImportUsage]
        for to, source in (pair for pair in pairs if pair[0].device != pair[1].device):
            to, source = to.view(torch.uint8), source.view(torch.uint8)
            for part, source_part in zip(
                torch.split(to, COPY_CHUNK), torch.split(source, COPY_CHUNK), strict=True
            ):
                copy(part, source_part)

    def checksum_parts(self, parts: Sequence[Tensor], out: Tensor, stream: Stream) -> None:
        """Checksum of all parts, in place."""
        self._checksum_parts(parts, out.view(1), stream)


def _repeats(pairs: Sequence[Pair]) -> bool:
    """Whether two of them write to the same place."""
    places = [to.data_ptr() for to, _ in pairs]
    return len(set(places)) < len(places)


def _by_width(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """The pairs grouped by the widest element type that fits each, and viewed as that.

    Two of one wide type are taken as they are: to find out how wide they may be costs the host as
    much as the launch.
    """
    by_width: dict[torch.dtype, list[Pair]] = {}
    for to, source in pairs:
        width = to.dtype
        if width is torch.uint8 or source.dtype is not width:
            to, source = to.view(torch.uint8), source.view(torch.uint8)
            width = _width(to, source)
            to, source = to.view(width), source.view(width)
        by_width.setdefault(width, []).append((to, source))
    return (by_width[width] for width in WIDTHS if width in by_width)


def _width(*parts: Tensor) -> torch.dtype:
    places = [(p.numel(), p.storage_offset(), p.data_ptr()) for p in parts]
    together = gcd(*(number for place in places for number in place))
    return next(width for width in WIDTHS if together % width.itemsize == 0)
