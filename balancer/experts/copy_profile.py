"""How gently to copy, by what carries the bytes."""

from dataclasses import dataclass

from equipoise.hal.errors import CopierError

LINE = 64
"""Bytes of a cache line."""
UNLIMITED = 0.0


@dataclass(frozen=True)
class Profile:
    """How copies share a path with the serving's own traffic.

    Attributes:
        name: for messages.
        chunk_bytes: most bytes that one thread copies without stepping aside; a multiple of 64.
        rate: bytes a second that all threads together begin, `UNLIMITED` for what they can.
    """

    name: str
    chunk_bytes: int
    rate: float

    def __post_init__(self) -> None:
        if self.chunk_bytes < LINE or self.chunk_bytes % LINE:
            raise CopierError(
                f"profile {self.name!r}: chunks are multiples of {LINE} bytes, "
                f"not {self.chunk_bytes}"
            )
        if not 0.0 <= self.rate < float("inf"):
            raise CopierError(f"profile {self.name!r}: no rate: {self.rate} bytes a second")


# The two rates are half and a quarter of what the links are said to carry, one way; nobody has
# measured them here. A chunk is about 16 microseconds of its rate: that is how long another
# transfer may find the path taken.
PLAIN = Profile("plain", 1 << 20, UNLIMITED)
"""Nothing to share with: loading, tests. Chunks that are many for a slot, and stay in a cache."""
PCIE = Profile("pcie", 1 << 18, 16e9)
"""Half of 16 lanes of the fourth generation: the serving's own copies keep the other half."""
C2C = Profile("c2c", 1 << 21, 112e9)
"""A quarter of a coherent link of 450 GB/s: there host memory ends first, and the CPU needs it."""
