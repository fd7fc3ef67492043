"""How a vendor's device copies and fingerprints bytes."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from equipoise.hal.slots import Segment
from equipoise.hal.stream import Stream


class ByteVerbs(Protocol):
    """On the current stream, without the host ever waiting; all tensors are uint8 [n]."""

    def view(self, segment: Segment) -> Tensor:
        """What a copy of the segment takes, uint8 [type.nbytes], in place. Raises `SlotError`."""
        ...

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Into the first of each pair, from the second, of equal size; no two overlap."""
        ...

    def fingerprint(self, parts: Sequence[Tensor], out: Tensor, stream: Stream) -> None:
        """`equipoise.hal.checksum` of the parts, back to back, into `out`, int64 []; on `stream`,
        which is current."""
        ...
