"""What the memory of a pool says about itself, on its first page."""

import os
import stat
import struct
from dataclasses import dataclass
from typing import Self

from equipoise.balancer.experts.host import memory
from equipoise.balancer.experts.host.layout import PoolLayout
from equipoise.hal.errors import ForeignMemory

MAGIC = b"eqpool\0\1"
"""With the version of what follows as its last byte."""
FORM = struct.Struct("<8s16s32sQ")
TOKEN = 16


@dataclass(frozen=True)
class Header:
    """Magic, token of 16 random bytes, digest of the layout and bytes of the pool."""

    token: bytes
    digest: bytes
    nbytes: int

    @classmethod
    def of(cls, layout: PoolLayout, token: bytes) -> Self:
        """What a pool of that layout and instance begins with."""
        return cls(token, layout.digest, layout.total)

    def write(self, descriptor: int) -> None:
        """To the start of the memory."""
        os.pwrite(descriptor, FORM.pack(MAGIC, self.token, self.digest, self.nbytes), 0)

    def check(self, descriptor: int) -> None:
        """Raise `ForeignMemory` unless the memory is what this header says, and stays so long."""
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != self.nbytes:
            raise ForeignMemory(f"it has {found.st_size} bytes instead of {self.nbytes}")
        try:
            sealed = memory.seals(descriptor)
        except OSError as error:
            raise ForeignMemory(f"it has no seals: {error.strerror}") from error
        if sealed & memory.SIZED != memory.SIZED or sealed & memory.READ_ONLY:
            raise ForeignMemory(f"its seals are {sealed:#x}")
        if os.pread(descriptor, FORM.size, 0) != FORM.pack(
            MAGIC, self.token, self.digest, self.nbytes
        ):
            raise ForeignMemory("its header is of another pool")
