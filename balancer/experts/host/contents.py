"""The weights and their checksums in the memory of a pool, as tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise import _native
from equipoise.balancer.experts.host.layout import SUM, PoolLayout
from equipoise.hal.checksum import MASK64, as_int64
from equipoise.hal.errors import ExpertPoolError


class Contents:
    """What stands where in `data`, uint8 [layout.total]."""

    def __init__(self, layout: PoolLayout, data: Tensor) -> None:
        self._layout = layout
        self._data: Tensor | None = data
        count = layout.layers * layout.experts
        self._sums: Tensor | None = data[layout.sums : layout.sums + count * SUM].view(torch.int64)

    def view(self, layer: int, expert: int) -> tuple[Tensor, ...]:
        """An expert's segments, in place. Raises `ExpertPoolError`."""
        at, data, found = self._layout.at(layer, expert), self._data, []
        if data is None:
            raise ExpertPoolError("the pool's memory was let go")
        for segment, offset in zip(self._layout.descriptor, self._layout.offsets, strict=True):
            part = data[at + offset : at + offset + segment.nbytes]
            found.append(part.view(segment.dtype).reshape(segment.shape))
        return tuple(found)

    def write(self, layer: int, expert: int, tensors: Sequence[Tensor]) -> None:
        """Copy an expert's segments in, and note the checksum of what they are copied from.

        Raises:
            ExpertPoolError: before any effect, if they are not what the layout says.
        """
        places, sums = self.view(layer, expert), self._noted()
        self.check(tensors)
        sources = [tensor.detach().cpu().contiguous() for tensor in tensors]
        for place, source in zip(places, sources, strict=True):
            place.copy_(source)
        number = self._layout.number(layer, expert)
        sums[number] = as_int64(fingerprint(sources))

    def noted(self, layer: int, expert: int) -> int:
        """The checksum of what was written."""
        return int(self._noted()[self._layout.number(layer, expert)]) & MASK64

    def intact(self, layer: int, expert: int) -> bool:
        """Whether an expert's bytes still have the checksum that was noted."""
        return fingerprint(self.view(layer, expert)) == self.noted(layer, expert)

    def release(self) -> None:
        """Hold the memory no longer; whoever writes by then writes on, to what nobody reads."""
        self._data = self._sums = None

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise `ExpertPoolError` unless they are what the layout says."""
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        wanted = [(segment.shape, segment.dtype) for segment in self._layout.descriptor]
        if found != wanted:
            raise ExpertPoolError(f"tensors are {found}, the descriptor says {wanted}")

    def _noted(self) -> Tensor:
        if self._sums is None:
            raise ExpertPoolError("the pool's memory was let go")
        return self._sums


def fingerprint(tensors: Sequence[Tensor]) -> int:
    """Checksum of contiguous host tensors back to back, as a slot store has it of a slot."""
    parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    return _native.checksum(parts[0] if len(parts) == 1 else torch.cat(parts))
