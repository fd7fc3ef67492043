"""Anonymous shared memory: sealed, reserved and mapped; its header; how much memory is available.

It has no name in any file system, and is freed when the last process that holds it ends.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from equipoise.balancer.experts.host_pool import shared_memory
from equipoise.balancer.experts.host_pool.layout import PoolLayout
from equipoise.hal.errors import ExpertPoolError, PoolIncomplete, PoolLeased, PoolMismatch

MEMORY_NAME = "equipoise-experts"
"""Name that /proc shows as the target of the descriptor; the memory cannot be opened by it."""
MFD_NOEXEC_SEAL = 0x0008
"""MFD_NOEXEC_SEAL of Linux 6.3, which hardened systems require and older ones do not have."""
MADV_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14."""
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
WRITE_SEAL = fcntl.F_SEAL_WRITE
HUGE_PAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class HugePages(StrEnum):
    """Whether the system accepts the advice to use huge pages; it is never bound by it."""

    ADVISED = "advised"
    REFUSED = "refused"


def create(nbytes: int) -> int:
    """Creates zeroed memory of a sealed size; returns its descriptor. Raises `ExpertPoolError`."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = _create(flags)
        try:
            os.ftruncate(descriptor, nbytes)
            # If another process shrank the memory, a process that maps it would die of a bus error.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SIZE_SEALS)
        except BaseException:
            os.close(descriptor)
            raise
    except (OSError, OverflowError) as error:
        raise ExpertPoolError(f"no shared memory of {nbytes} bytes: {error}") from error
    return descriptor


def _create(flags: int) -> int:
    try:
        return os.memfd_create(MEMORY_NAME, flags | MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(MEMORY_NAME, flags)


def seals(descriptor: int) -> int:
    """Returns the seals of the descriptor."""
    return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)


def seal(descriptor: int) -> None:
    """Forbids all writes for ever. The kernel refuses while any process can still write.

    Raises:
        ExpertPoolError: a process still has a writable mapping.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, WRITE_SEAL | fcntl.F_SEAL_SEAL)
    except OSError as error:
        raise ExpertPoolError(f"the pool cannot be sealed: {error.strerror}") from error


def reserve(descriptor: int, offset: int, nbytes: int) -> None:
    """Reserves pages now; on a machine without memory, a later write would be a bus error.

    Raises:
        PoolIncomplete: there are not enough pages.
    """
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        raise PoolIncomplete(f"cannot reserve {nbytes} bytes: {error.strerror}") from error


class SharedMapping:
    """A mapping of all of a descriptor's memory. The descriptor may be closed afterwards.

    Attributes:
        huge_pages: whether the system accepts the advice to use them.
    """

    def __init__(self, descriptor: int, nbytes: int, protection: int) -> None:
        try:
            self._map = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=protection)
        except (OSError, ValueError) as error:
            raise ExpertPoolError(f"cannot map {nbytes} bytes: {error}") from error
        self.huge_pages = self._advise_huge_pages(HUGE_PAGES_SETTING)

    @classmethod
    def for_writing(cls, descriptor: int, nbytes: int) -> Self:
        """Maps for writing. Children do not inherit it, or the kernel would refuse to seal."""
        mapping = cls(descriptor, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        mapping._map.madvise(mmap.MADV_DONTFORK)
        return mapping

    @classmethod
    def for_reading(cls, descriptor: int, nbytes: int) -> Self:
        """Maps for reading, after sealing.

        Uses a read-only descriptor: before Linux 6.7, memory that is sealed against writes cannot
        be mapped from a writable one.
        """
        try:
            reading = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return cls(descriptor, nbytes, mmap.PROT_READ)
        try:
            return cls(reading, nbytes, mmap.PROT_READ)
        finally:
            os.close(reading)

    def tensor(self) -> Tensor:
        """Returns a tensor over the same bytes, uint8 [nbytes]; it and its views keep them mapped.

        Writing to a mapping for reading kills the process.
        """
        view = memoryview(self._map)
        if not view.readonly:
            return torch.frombuffer(view, dtype=torch.uint8)
        # Tensors cannot be read-only, and torch warns of buffers that are. So it gets the address,
        # and holds the view to keep the memory mapped.
        address = np.frombuffer(view, np.uint8).ctypes.data
        array = (ctypes.c_ubyte * len(view)).from_address(address)
        array.owner = view  # type: ignore[attr-defined]
        return torch.frombuffer(array, dtype=torch.uint8)

    def _advise_huge_pages(self, setting: Path) -> HugePages:
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
            allowed = setting.read_text(encoding="ascii")
        except OSError:
            return HugePages.REFUSED
        refused = "[never]" in allowed or "[deny]" in allowed
        return HugePages.REFUSED if refused else HugePages.ADVISED

    def populate(self, offset: int, nbytes: int) -> None:
        """Touches pages through the mapping, because advice on huge pages applies only there.

        Best effort: `reserve` follows, and takes the missing pages or raises.
        """
        try:
            self._map.madvise(MADV_POPULATE_WRITE, offset, nbytes)
        except OSError:
            return

    def close(self) -> None:
        """Unmaps now. Raises `PoolLeased`, and stays mapped, while a tensor over it exists."""
        try:
            self._map.close()
        except BufferError as error:
            raise PoolLeased("a view of the pool's memory is still in use") from error

    def close_with_last_tensor(self) -> None:
        """Unmaps when the last tensor is freed."""
        with suppress(BufferError):
            self._map.close()


MAGIC = b"eqpool\0\1"
"""Magic bytes; the last one is the version of the header."""
HEADER_STRUCT = struct.Struct("<8s16s32sQ")
TOKEN_BYTES = 16


@dataclass(frozen=True)
class PoolHeader:
    """Header of a pool: magic, token of 16 random bytes, digest of the layout, size in bytes."""

    token: bytes
    digest: bytes
    nbytes: int

    @classmethod
    def of(cls, layout: PoolLayout, token: bytes) -> Self:
        """Builds the header of the pool with this layout and token."""
        return cls(token, layout.digest, layout.nbytes)

    def write(self, descriptor: int) -> None:
        """Writes the header to the start of the memory."""
        os.pwrite(descriptor, HEADER_STRUCT.pack(MAGIC, self.token, self.digest, self.nbytes), 0)

    def check(self, descriptor: int) -> None:
        """Raises `PoolMismatch` unless the memory has this header, its size, and a sealed size."""
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != self.nbytes:
            raise PoolMismatch(f"it has {status.st_size} bytes instead of {self.nbytes}")
        try:
            seals = shared_memory.seals(descriptor)
        except OSError as error:
            raise PoolMismatch(f"it has no seals: {error.strerror}") from error
        if (
            seals & shared_memory.SIZE_SEALS != shared_memory.SIZE_SEALS
            or seals & shared_memory.WRITE_SEAL
        ):
            raise PoolMismatch(f"its seals are {seals:#x}")
        if os.pread(descriptor, HEADER_STRUCT.size, 0) != HEADER_STRUCT.pack(
            MAGIC, self.token, self.digest, self.nbytes
        ):
            raise PoolMismatch("its header is of another pool")


PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryLimit:
    """Available bytes, and the origin of that limit, for an error."""

    free: int
    set_by: str


def available_memory(proc: Path = PROC, groups: Path = CGROUP_ROOT) -> MemoryLimit:
    """Returns the tightest limit: of the machine, and of each control group of this process.

    Shared memory is charged to the process that touches it first, and a full control group kills
    one of its processes without warning. A limit of /dev/shm does not apply: the pool has no name
    there.
    """
    limits = [_machine_limit(proc), *_cgroup_limits(proc, groups)]
    return min(limits, key=lambda limit: limit.free)


def _machine_limit(proc: Path) -> MemoryLimit:
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return MemoryLimit(int(amount.split()[0]) << 10, "this machine's memory")
    raise ValueError(f"{proc / 'meminfo'} does not say what is available")


def _cgroup_limits(proc: Path, groups: Path) -> Iterator[MemoryLimit]:
    """Yields limits of either version of control groups, from the process's own to the root."""
    for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, limit, used, spare = (
                groups,
                "memory.max",
                "memory.current",
                "inactive_file",
            )
        elif "memory" in controllers.split(","):
            folder = groups / "memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
            spare = "total_inactive_file"
        else:
            continue
        place = folder / path.lstrip("/")
        while True:
            yield from _cgroup_limit(place, limit, used, spare)
            if place == folder:
                break
            place = place.parent


def _cgroup_limit(place: Path, limit: str, used: str, spare: str) -> Iterator[MemoryLimit]:
    """Yields nothing without a limit or folder: a container sees its own group as the root."""
    try:
        most = (place / limit).read_text(encoding="ascii").strip()
        used_bytes = int((place / used).read_text(encoding="ascii"))
        stat = (place / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return
    if most == "max":
        return
    # The kernel reclaims inactive file pages before it kills a process.
    reclaimable = next((int(v) for k, v in map(str.split, stat.splitlines()) if k == spare), 0)
    yield MemoryLimit(max(0, int(most) - used_bytes + reclaimable), f"control group {place}")
