"""Where each expert's weights lie in the memory of a pool."""

import hashlib
import math
import mmap
from dataclasses import dataclass
from functools import cached_property

from equipoise.balancer.experts.copy_profile import LINE
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.errors import ExpertPoolError, Unsupported
from equipoise.hal.slots import SegmentType

SUM = 8
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
        found, at = [], 0
        for segment in self.descriptor:
            found.append(at)
            at += round_up(segment.nbytes, LINE)
        return tuple(found)

    @cached_property
    def expert_bytes(self) -> int:
        """From the first byte of an expert to behind its last."""
        return self.offsets[-1] + self.descriptor[-1].nbytes

    @cached_property
    def stride(self) -> int:
        """From one expert to the next."""
        return max(mmap.PAGESIZE, round_up(self.expert_bytes, mmap.PAGESIZE))

    @property
    def sums(self) -> int:
        """Where the table of checksums begins, int64 [layers, experts]."""
        return mmap.PAGESIZE

    @cached_property
    def first(self) -> int:
        """Where the first expert begins: behind all that is about the pool itself."""
        return self.sums + round_up(self.layers * self.experts * SUM, mmap.PAGESIZE)

    @property
    def total(self) -> int:
        """Bytes of the whole pool."""
        return self.first + self.layers * self.experts * self.stride

    def number(self, layer: int, expert: int) -> int:
        """Which of all experts it is. Raises `ExpertPoolError`."""
        if not (0 <= layer < self.layers and 0 <= expert < self.experts):
            raise ExpertPoolError(
                f"no expert {expert} of layer {layer} in a pool of {self.layers} layers "
                f"of {self.experts} experts"
            )
        return layer * self.experts + expert

    def at(self, layer: int, expert: int) -> int:
        """Where an expert begins. Raises `ExpertPoolError`."""
        return self.first + self.number(layer, expert) * self.stride

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that are equal for equal layouts on equal machines."""
        words = [f"{self.layers} {self.experts} {mmap.PAGESIZE} {LINE}"]
        words += [
            f"{segment.name!r} {segment.dtype} {segment.shape} {math.prod(segment.shape)}"
            for segment in self.descriptor
        ]
        return hashlib.sha256("\n".join(words).encode()).digest()
