"""Anonymous shared memory: sealed, reserved and mapped; its header; how much memory is available.

It has no name in any file system and is gone with the last process that holds it.
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
"""What /proc shows as the target of the descriptor; nothing can be opened by it."""
MFD_NOEXEC_SEAL = 0x0008
"""MFD_NOEXEC_SEAL of Linux 6.3, which hardened systems demand and older ones do not know."""
MADV_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14."""
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
WRITE_SEAL = fcntl.F_SEAL_WRITE
HUGE_PAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class HugePages(StrEnum):
    """What the system makes of the wish for huge pages, which is only ever a wish."""

    ADVISED = "advised"
    REFUSED = "refused"


def create(nbytes: int) -> int:
    """A descriptor of so many zeros, whose size nobody can change. Raises `ExpertPoolError`."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = _create(flags)
        try:
            os.ftruncate(descriptor, nbytes)
            # Who maps what another process then shrinks dies of a bus error at its next read.
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
    """What the kernel guarantees about it."""
    return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)


def seal(descriptor: int) -> None:
    """From now on nobody can write to it, for ever. The kernel refuses while anybody still could.

    Raises:
        ExpertPoolError: some process still has it mapped to be written.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, WRITE_SEAL | fcntl.F_SEAL_SEAL)
    except OSError as error:
        raise ExpertPoolError(f"the pool cannot be sealed: {error.strerror}") from error


def reserve(descriptor: int, offset: int, nbytes: int) -> None:
    """Take the pages now: later, a full machine would answer a write with a bus error.

    Raises:
        PoolIncomplete: there are not so many.
    """
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        raise PoolIncomplete(f"cannot reserve {nbytes} bytes: {error.strerror}") from error


class SharedMapping:
    """All of a descriptor's memory. The descriptor may be closed afterwards.

    Attributes:
        huge_pages: what became of the wish for them, which everybody has who copies from here.
    """

    def __init__(self, descriptor: int, nbytes: int, protection: int) -> None:
        try:
            self._map = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=protection)
        except (OSError, ValueError) as error:
            raise ExpertPoolError(f"cannot map {nbytes} bytes: {error}") from error
        self.huge_pages = self._advise_huge_pages(HUGE_PAGES_SETTING)

    @classmethod
    def for_writing(cls, descriptor: int, nbytes: int) -> Self:
        """For those who fill it. No child inherits it: the kernel would refuse to seal."""
        mapping = cls(descriptor, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        mapping._map.madvise(mmap.MADV_DONTFORK)
        return mapping

    @classmethod
    def for_reading(cls, descriptor: int, nbytes: int) -> Self:
        """For everybody, later.

        From a descriptor that can only read: before Linux 6.7 one that can write maps nothing that
        was sealed against that.
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
        """Over the same bytes, uint8 [nbytes]; it, and any view of it, keeps them mapped.

        To write to what was mapped to be read kills the process.
        """
        view = memoryview(self._map)
        if not view.readonly:
            return torch.frombuffer(view, dtype=torch.uint8)
        # No tensor can say that it is only to be read, and torch warns of each that is: so it gets
        # the address, and the view as something to hold on to.
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
        """Touch pages through the mapping, since a wish for huge ones holds only there.

        Best effort: `reserve` comes afterwards and takes what is missing, or says so.
        """
        try:
            self._map.madvise(MADV_POPULATE_WRITE, offset, nbytes)
        except OSError:
            return

    def close(self) -> None:
        """Unmap now. Raises `PoolLeased` while a tensor over it lives; it stays mapped then."""
        try:
            self._map.close()
        except BufferError as error:
            raise PoolLeased("a view of the pool's memory is still in use") from error

    def close_with_last_tensor(self) -> None:
        """Unmap with the last tensor."""
        with suppress(BufferError):
            self._map.close()


MAGIC = b"eqpool\0\1"
"""With the version of what follows as its last byte."""
HEADER_STRUCT = struct.Struct("<8s16s32sQ")
TOKEN_BYTES = 16


@dataclass(frozen=True)
class PoolHeader:
    """Magic, token of 16 random bytes, digest of the layout and bytes of the pool."""

    token: bytes
    digest: bytes
    nbytes: int

    @classmethod
    def of(cls, layout: PoolLayout, token: bytes) -> Self:
        """What a pool of that layout and instance begins with."""
        return cls(token, layout.digest, layout.nbytes)

    def write(self, descriptor: int) -> None:
        """To the start of the memory."""
        os.pwrite(descriptor, HEADER_STRUCT.pack(MAGIC, self.token, self.digest, self.nbytes), 0)

    def check(self, descriptor: int) -> None:
        """Raise `PoolMismatch` unless the memory is what this header says, and stays so long."""
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
    """Bytes that can be had, and whose limit that is, for an error."""

    free: int
    set_by: str


def available_memory(proc: Path = PROC, groups: Path = CGROUP_ROOT) -> MemoryLimit:
    """The tightest limit: of the machine, and of each control group that this process is in.

    Shared memory counts as used by whoever touches it first, and a control group that is full kills
    a process of its own; nobody is told before. A limit of /dev/shm does not count: the pool has
    no name there.
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
    """Limits of either version of control groups, from the process's own to the root."""
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
    """Nothing where there is no limit, or no such folder: a container sees its own as the root."""
    try:
        most = (place / limit).read_text(encoding="ascii").strip()
        used_bytes = int((place / used).read_text(encoding="ascii"))
        stat = (place / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return
    if most == "max":
        return
    # Pages of files that nobody used lately are given up before anybody is killed.
    reclaimable = next((int(v) for k, v in map(str.split, stat.splitlines()) if k == spare), 0)
    yield MemoryLimit(max(0, int(most) - used_bytes + reclaimable), f"control group {place}")
