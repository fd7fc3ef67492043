"""Bytes on an NPU: one copy each, and the fingerprint in operators."""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.backends.ascend.bits import fingerprint
from equipoise.backends.ascend.formats import segment_bytes
from equipoise.backends.devices.memory import copy
from equipoise.hal.slots import Segment
from equipoise.hal.stream import Stream


class NpuBytes:
    """A private format is copied as the bytes that it stores, like anything else (A10)."""

    def view(self, segment: Segment) -> Tensor:
        """The segment's bytes."""
        return segment_bytes(segment)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """One copy after the other."""
        for to, source in pairs:
            copy(to, source)

    def fingerprint(self, parts: Sequence[Tensor], out: Tensor, stream: Stream) -> None:
        """Of all parts, put together first."""
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        copy(out, fingerprint(whole))
