"""Where each expert's weights and checksums lie in a pool's memory, and that memory as tensors."""

import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from equipoise import _native
from equipoise.balancer.experts.transfer.copy_threads import CACHE_LINE
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.checksum import MASK64, as_int64
from equipoise.hal.errors import ExpertPoolError, Unsupported
from equipoise.hal.slots import SegmentType

CHECKSUM_BYTES = 8
"""Bytes of a checksum."""


def round_up(nbytes: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-nbytes // unit) * unit


@dataclass(frozen=True)
class PoolLayout:
    """A page for the header, a table of checksums, then expert by expert within layer by layer.

    An expert begins at a page, so that a rank that reserves its own touches no other's memory; a
    segment begins at a cache line, so that copies of it are cut where a line begins.

    Attributes:
        descriptor: segments of an expert, as a slot has them.
        layers: how many.
        experts: of each layer.
    """

    descriptor: tuple[SegmentType, ...]
    layers: int
    experts: int

    def __post_init__(self) -> None:
        if self.layers < 1 or self.experts < 1 or not self.descriptor:
            raise ExpertPoolError(
                f"no pool of {self.layers} layers of {self.experts} experts with "
                f"{len(self.descriptor)} segments"
            )
        for segment in self.descriptor:
            if segment.format is not SlotFormat.STRIDED:
                # What a device's own format stores, host memory cannot say as a tensor.
                raise Unsupported(f"segment {segment.name!r}: no private format in host memory")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each segment begins within its expert."""
        offsets, at = [], 0
        for segment in self.descriptor:
            offsets.append(at)
            at += round_up(segment.nbytes, CACHE_LINE)
        return tuple(offsets)

    @cached_property
    def expert_bytes(self) -> int:
        """From the first byte of an expert to behind its last."""
        return self.offsets[-1] + self.descriptor[-1].nbytes

    @cached_property
    def stride(self) -> int:
        """From one expert to the next."""
        return max(mmap.PAGESIZE, round_up(self.expert_bytes, mmap.PAGESIZE))

    @property
    def checksums_offset(self) -> int:
        """Where the table of checksums begins, int64 [layers, experts]."""
        return mmap.PAGESIZE

    @cached_property
    def experts_offset(self) -> int:
        """Where the first expert begins: behind all that is about the pool itself."""
        return self.checksums_offset + round_up(
            self.layers * self.experts * CHECKSUM_BYTES, mmap.PAGESIZE
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.experts_offset + self.layers * self.experts * self.stride

    def expert_index(self, layer: int, expert: int) -> int:
        """Which of all experts it is. Raises `ExpertPoolError`."""
        if not (0 <= layer < self.layers and 0 <= expert < self.experts):
            raise ExpertPoolError(
                f"no expert {expert} of layer {layer} in a pool of {self.layers} layers "
                f"of {self.experts} experts"
            )
        return layer * self.experts + expert

    def expert_offset(self, layer: int, expert: int) -> int:
        """Where an expert begins. Raises `ExpertPoolError`."""
        return self.experts_offset + self.expert_index(layer, expert) * self.stride

    def values(self) -> dict[str, str]:
        """What has to be the same on all ranks that share the memory."""
        segments = [f"{part.name!r} {part.dtype} {part.shape}" for part in self.descriptor]
        return {
            "layers": str(self.layers),
            "experts": str(self.experts),
            "segments": ", ".join(segments),
            "page and line": f"{mmap.PAGESIZE} and {CACHE_LINE} bytes",
        }

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that are equal for equal layouts on equal machines."""
        return hashlib.sha256(repr(self.values()).encode()).digest()


class PoolContents:
    """What stands where in `data`, uint8 [layout.total]."""

    def __init__(self, layout: PoolLayout, data: Tensor) -> None:
        self._layout = layout
        self._data: Tensor | None = data
        count = layout.layers * layout.experts
        self._checksums: Tensor | None = data[
            layout.checksums_offset : layout.checksums_offset + count * CHECKSUM_BYTES
        ].view(torch.int64)

    def view(self, layer: int, expert: int) -> tuple[Tensor, ...]:
        """An expert's segments, in place. Raises `ExpertPoolError`."""
        at, data, segments = self._layout.expert_offset(layer, expert), self._data, []
        if data is None:
            raise ExpertPoolError("the pool's memory was let go")
        for segment, offset in zip(self._layout.descriptor, self._layout.offsets, strict=True):
            part = data[at + offset : at + offset + segment.nbytes]
            segments.append(part.view(segment.dtype).reshape(segment.shape))
        return tuple(segments)

    def write(self, layer: int, expert: int, tensors: Sequence[Tensor]) -> None:
        """Copy an expert's segments in, and note the checksum of what they are copied from.

        Raises:
            ExpertPoolError: before any effect, if they are not what the layout says.
        """
        places, sums = self.view(layer, expert), self._mapped_checksums()
        self.check(tensors)
        sources = [tensor.detach().cpu().contiguous() for tensor in tensors]
        for place, source in zip(places, sources, strict=True):
            place.copy_(source)
        number = self._layout.expert_index(layer, expert)
        sums[number] = as_int64(checksum_of(sources))

    def checksum(self, layer: int, expert: int) -> int:
        """The checksum of what was written."""
        return int(self._mapped_checksums()[self._layout.expert_index(layer, expert)]) & MASK64

    def verify(self, layer: int, expert: int) -> bool:
        """Whether an expert's bytes still have the checksum that was noted."""
        return checksum_of(self.view(layer, expert)) == self.checksum(layer, expert)

    def release(self) -> None:
        """Hold the memory no longer; whoever writes by then writes on, to what nobody reads."""
        self._data = self._checksums = None

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise `ExpertPoolError` unless they are what the layout says."""
        tensor_specs = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        segment_specs = [(segment.shape, segment.dtype) for segment in self._layout.descriptor]
        if tensor_specs != segment_specs:
            raise ExpertPoolError(
                f"tensors are {tensor_specs}, the descriptor says {segment_specs}"
            )

    def _mapped_checksums(self) -> Tensor:
        if self._checksums is None:
            raise ExpertPoolError("the pool's memory was let go")
        return self._checksums


def checksum_of(tensors: Sequence[Tensor]) -> int:
    """Checksum of contiguous host tensors back to back, as a slot store has it of a slot."""
    parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    return _native.checksum(parts[0] if len(parts) == 1 else torch.cat(parts))
