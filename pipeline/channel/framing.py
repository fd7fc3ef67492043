"""Framing: in how many parts a message is sent, and whether it describes its schema.

A receiver that knows the schema of every message beforehand needs one part and no description
(`SinglePartFraming`).

A receiver that does not (`DescribedFraming`) posts receives before it knows their sizes. Sizes must
match: libraries end the process, or hang, if more arrives than was posted. So both ends derive
the size from what both have seen: the first part of a message is as large as the message was that
came `ahead` messages earlier, and what does not fit follows in a second part. The first message of
a schema describes it after the payload. While steps are alike there is one part and no
description here, too.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from equipoise.pipeline.channel.message import CachedLayout

MIN_FIRST_PART_BYTES = 4096
"""Smallest first part, and the size of the first ones: room for a header and the descriptions of
one or two schemas."""
MAX_FIRST_PART_BYTES = 1 << 26
"""Largest first part, 64 MiB. When steps shrink, messages are padded to the size of larger ones
before them, for as many messages as are posted ahead; this bounds the padding."""


@dataclass(frozen=True)
class Frame:
    """How one message is sent.

    Attributes:
        nbytes: size of header, payload and description.
        first_part_bytes: size of the first part; a smaller message is padded to it.
        description: of its schema; empty if the receiver knows it.
    """

    nbytes: int
    first_part_bytes: int
    description: bytes = b""

    @property
    def padded_nbytes(self) -> int:
        """Size of the message in memory, padding included."""
        return max(self.nbytes, self.first_part_bytes)

    @property
    def num_parts(self) -> int:
        """Number of parts it is sent in: 1 or 2."""
        return 1 if self.nbytes <= self.first_part_bytes else 2


class Framing(Protocol):
    """Frames the messages of an edge, in order."""

    def frame(self, cached: CachedLayout) -> Frame:
        """Return the frame that the next message would have with this schema."""
        ...

    def advance(self, frame: Frame) -> None:
        """Record that the next message is sent with `frame`."""
        ...


class SinglePartFraming:
    """For receivers that know each schema beforehand: one part, no description."""

    def frame(self, cached: CachedLayout) -> Frame:
        """Return a frame of one part."""
        return Frame(cached.layout.nbytes, cached.layout.nbytes)

    def advance(self, frame: Frame) -> None:
        """Does nothing: frames do not depend on earlier ones."""


class FirstPartSizes:
    """The sizes of first parts, computed alike at both ends.

    Args:
        ahead: number of receives that are posted ahead.
    """

    def __init__(self, ahead: int) -> None:
        self._sizes: deque[int] = deque([MIN_FIRST_PART_BYTES] * ahead)

    @property
    def num_known(self) -> int:
        """Number of coming messages whose first part has a known size."""
        return len(self._sizes)

    @property
    def next_size(self) -> int:
        """Size of the next message's first part."""
        return self._sizes[0]

    def pop(self) -> int:
        """Return `next_size` and go on to the message after it."""
        return self._sizes.popleft()

    def record(self, nbytes: int) -> None:
        """Record the size of a message, which becomes the size of a later first part."""
        self._sizes.append(min(max(nbytes, MIN_FIRST_PART_BYTES), MAX_FIRST_PART_BYTES))


class DescribedFraming:
    """For receivers that do not know schemas beforehand.

    Args:
        ahead: number of receives that the other end posts ahead.
    """

    def __init__(self, ahead: int) -> None:
        self._parts = FirstPartSizes(ahead)

    def frame(self, cached: CachedLayout) -> Frame:
        """Return a frame with the first part that both ends expect."""
        description = cached.layout.schema.to_bytes() if cached.is_new else b""
        return Frame(cached.layout.nbytes + len(description), self._parts.next_size, description)

    def advance(self, frame: Frame) -> None:
        """Record the frame: the sizes of later first parts depend on it."""
        self._parts.pop()
        self._parts.record(frame.nbytes)
