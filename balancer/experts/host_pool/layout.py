"""Layout of experts and checksums in a pool's memory, and access to them as tensors."""

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
"""Size of a checksum in bytes."""


def round_up(nbytes: int, unit: int) -> int:
    """Rounds up to a multiple of `unit`."""
    return -(-nbytes // unit) * unit


@dataclass(frozen=True)
class PoolLayout:
    """Layout of a pool: one page of header, a table of checksums, then experts, layer by layer.

    An expert begins at a page, so that a rank that reserves its own experts touches no other's
    memory; a segment begins at a cache line, so that copies of it are cut at lines.

    Attributes:
        descriptor: segment types of an expert, the same as those of a slot.
        layers: number of layers.
        experts: experts per layer.
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
                # Host memory cannot represent as a tensor what a private format stores.
                raise Unsupported(f"segment {segment.name!r}: no private format in host memory")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each segment within its expert."""
        offsets, at = [], 0
        for segment in self.descriptor:
            offsets.append(at)
            at += round_up(segment.nbytes, CACHE_LINE)
        return tuple(offsets)

    @cached_property
    def expert_bytes(self) -> int:
        """Size of an expert in bytes, from its first to its last byte."""
        return self.offsets[-1] + self.descriptor[-1].nbytes

    @cached_property
    def stride(self) -> int:
        """Bytes from the start of one expert to that of the next."""
        return max(mmap.PAGESIZE, round_up(self.expert_bytes, mmap.PAGESIZE))

    @property
    def checksums_offset(self) -> int:
        """Offset of the table of checksums, int64 [layers, experts]."""
        return mmap.PAGESIZE

    @cached_property
    def experts_offset(self) -> int:
        """Offset of the first expert, after header and checksums."""
        return self.checksums_offset + round_up(
            self.layers * self.experts * CHECKSUM_BYTES, mmap.PAGESIZE
        )

    @property
    def nbytes(self) -> int:
        """Size of the whole pool in bytes."""
        return self.experts_offset + self.layers * self.experts * self.stride

    def expert_index(self, layer: int, expert: int) -> int:
        """Returns the index of an expert among those of all layers. Raises `ExpertPoolError`."""
        if not (0 <= layer < self.layers and 0 <= expert < self.experts):
            raise ExpertPoolError(
                f"no expert {expert} of layer {layer} in a pool of {self.layers} layers "
                f"of {self.experts} experts"
            )
        return layer * self.experts + expert

    def expert_offset(self, layer: int, expert: int) -> int:
        """Returns the offset of an expert. Raises `ExpertPoolError`."""
        return self.experts_offset + self.expert_index(layer, expert) * self.stride

    def values(self) -> dict[str, str]:
        """Values that must be the same on all ranks that share the memory."""
        segments = [f"{part.name!r} {part.dtype} {part.shape}" for part in self.descriptor]
        return {
            "layers": str(self.layers),
            "experts": str(self.experts),
            "segments": ", ".join(segments),
            "page and line": f"{mmap.PAGESIZE} and {CACHE_LINE} bytes",
        }

    @cached_property
    def digest(self) -> bytes:
        """Digest of 32 bytes, equal for equal layouts on machines with equal page sizes."""
        return hashlib.sha256(repr(self.values()).encode()).digest()


class PoolContents:
    """Experts and checksums in `data`, uint8 [layout.nbytes]."""

    def __init__(self, layout: PoolLayout, data: Tensor) -> None:
        self._layout = layout
        self._data: Tensor | None = data
        count = layout.layers * layout.experts
        self._checksums: Tensor | None = data[
            layout.checksums_offset : layout.checksums_offset + count * CHECKSUM_BYTES
        ].view(torch.int64)

    def view(self, layer: int, expert: int) -> tuple[Tensor, ...]:
        """Returns an expert's segments in place. Raises `ExpertPoolError`."""
        at, data, segments = self._layout.expert_offset(layer, expert), self._data, []
        if data is None:
            raise ExpertPoolError("the pool's memory was let go")
        for segment, offset in zip(self._layout.descriptor, self._layout.offsets, strict=True):
            part = data[at + offset : at + offset + segment.nbytes]
            segments.append(part.view(segment.dtype).reshape(segment.shape))
        return tuple(segments)

    def write(self, layer: int, expert: int, tensors: Sequence[Tensor]) -> None:
        """Copies an expert's segments into the pool, and records the checksum of the sources.

        Raises:
            ExpertPoolError: before any effect, if the tensors do not fit the layout.
        """
        places, sums = self.view(layer, expert), self._mapped_checksums()
        self.check(tensors)
        sources = [tensor.detach().cpu().contiguous() for tensor in tensors]
        for place, source in zip(places, sources, strict=True):
            place.copy_(source)
        number = self._layout.expert_index(layer, expert)
        sums[number] = as_int64(checksum_of(sources))

    def checksum(self, layer: int, expert: int) -> int:
        """Returns the recorded checksum of an expert."""
        return int(self._mapped_checksums()[self._layout.expert_index(layer, expert)]) & MASK64

    def verify(self, layer: int, expert: int) -> bool:
        """Returns whether an expert's bytes still have the recorded checksum."""
        return checksum_of(self.view(layer, expert)) == self.checksum(layer, expert)

    def release(self) -> None:
        """Releases the memory. A thread that still writes then writes where nobody reads."""
        self._data = self._checksums = None

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raises `ExpertPoolError` unless shapes and dtypes are those of the layout."""
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
    """Returns the checksum of contiguous host tensors back to back, as a slot store computes it."""
    parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    return _native.checksum(parts[0] if len(parts) == 1 else torch.cat(parts))
