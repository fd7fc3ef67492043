"""In how many parts a message travels, and whether it describes itself.

Where the receiver is told what is to come there is one part and no description. Where it is not,
its receives are posted before their messages are known, and a size must be right: libraries end a
process, or hang, where more comes than was awaited. So it is a function of what both ends have
seen: a message's first part is as large as the message so many before it was, and what does not
fit follows in a second one. A class is described in the first of its messages, behind the payload.
While steps are alike there is one part and no description here, too.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from equipoise.pipeline.channel.message import CachedLayout

MIN_FIRST_PART_BYTES = 4096
"""Bytes of the first messages' first parts: a header, and the description of a class or two."""
MAX_FIRST_PART_BYTES = 1 << 26
"""Bytes of a first part at most: where steps shrink they are padded to it, for as many messages as
are posted ahead."""


@dataclass(frozen=True)
class Frame:
    """One message.

    Attributes:
        nbytes: header, payload and description.
        first_part_bytes: bytes of the first part; the message is padded to it where it is smaller.
        description: of its class; empty where the receiver knows it.
    """

    nbytes: int
    first_part_bytes: int
    description: bytes = b""

    @property
    def padded_nbytes(self) -> int:
        """Bytes of memory that it takes, padding included."""
        return max(self.nbytes, self.first_part_bytes)

    @property
    def num_parts(self) -> int:
        """How many parts it travels in."""
        return 1 if self.nbytes <= self.first_part_bytes else 2


class Framing(Protocol):
    """Frames the messages of an edge, in their order."""

    def frame(self, met: CachedLayout) -> Frame:
        """The frame of the next message, were it of that class."""
        ...

    def advance(self, frame: Frame) -> None:
        """The next message has that frame."""
        ...


class SinglePartFraming:
    """For receivers that are told."""

    def frame(self, met: CachedLayout) -> Frame:
        """One part."""
        return Frame(met.layout.nbytes, met.layout.nbytes)

    def advance(self, frame: Frame) -> None:
        """Nothing follows from it."""


class FirstPartSizes:
    """Sizes of first parts, the same at both ends.

    Args:
        ahead: receives that are posted ahead.
    """

    def __init__(self, ahead: int) -> None:
        self._sizes: deque[int] = deque([MIN_FIRST_PART_BYTES] * ahead)

    @property
    def num_known(self) -> int:
        """Of how many messages to come the sizes are known."""
        return len(self._sizes)

    @property
    def next_size(self) -> int:
        """The size for the next message."""
        return self._sizes[0]

    def pop(self) -> int:
        """The same, once for each message, in their order."""
        return self._sizes.popleft()

    def record(self, nbytes: int) -> None:
        """One more message of so many bytes was sent, or has come."""
        self._sizes.append(min(max(nbytes, MIN_FIRST_PART_BYTES), MAX_FIRST_PART_BYTES))


class DescribedFraming:
    """For receivers that are told nothing.

    Args:
        ahead: receives that the other end posts ahead.
    """

    def __init__(self, ahead: int) -> None:
        self._parts = FirstPartSizes(ahead)

    def frame(self, met: CachedLayout) -> Frame:
        """As large a first part as both ends have agreed on."""
        description = met.layout.schema.to_bytes() if met.is_new else b""
        return Frame(met.layout.nbytes + len(description), self._parts.next_size, description)

    def advance(self, frame: Frame) -> None:
        """Later ones follow from it."""
        self._parts.pop()
        self._parts.record(frame.nbytes)
