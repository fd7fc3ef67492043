"""How one rank tells another where its memory is, and how the other gets hold of it."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from equipoise.balancer.experts.host import memory
from equipoise.balancer.experts.host.header import Header
from equipoise.balancer.experts.host.layout import PoolLayout
from equipoise.hal.errors import ForeignMemory

PROC = Path("/proc")
BOOT = Path("/proc/sys/kernel/random/boot_id")
STARTED = 19
"""Place of a process's start time in /proc/PID/stat, counted from behind its name."""


@dataclass(frozen=True)
class Offer:
    """Where the memory is, in words that mean something on the same machine only.

    Attributes:
        boot: identity of the running kernel.
        process: its owner, as the owner sees it.
        started: when that process started, in clock ticks since boot: numbers are used again.
        descriptor: the owner's.
        token: of the instance, in hexadecimal.
    """

    boot: str
    process: int
    started: int
    descriptor: int
    token: str

    @classmethod
    def of(cls, descriptor: int, token: bytes) -> Self:
        """What this process has to tell of its own memory."""
        here = os.getpid()
        return cls(boot(), here, started(here), descriptor, token.hex())

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """From JSON."""
        return cls(**json.loads(text))

    def header(self, layout: PoolLayout) -> Header:
        """What the memory has to begin with."""
        return Header.of(layout, bytes.fromhex(self.token))

    def open(self, layout: PoolLayout, proc: Path = PROC) -> int:
        """A descriptor of one's own for the same memory, checked; no name is involved.

        Raises:
            ForeignMemory: it is another machine, another view of the processes, another process
                under the same number, or no permission; or what is there is not that pool.
        """
        if self.boot != boot():
            raise ForeignMemory("it is on another machine")
        try:
            if started(self.process, proc) != self.started:
                raise ForeignMemory(f"process {self.process} is another one here")
            path = proc / str(self.process) / "fd" / str(self.descriptor)
            # Looked at before it is opened: to open what is no memory may have an effect.
            if not os.readlink(path).startswith(f"/memfd:{memory.LABEL}"):
                raise ForeignMemory(f"descriptor {self.descriptor} is something else")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise ForeignMemory(f"cannot open it: {error}") from error
        return self.checked(descriptor, layout)

    def checked(self, descriptor: int, layout: PoolLayout) -> int:
        """`descriptor`, if it is the memory that was offered; otherwise it is closed.

        Raises `ForeignMemory`.
        """
        try:
            self.header(layout).check(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def boot() -> str:
    """Identity of the running kernel: another one after every start, and on every machine."""
    return BOOT.read_text(encoding="ascii").strip()


def started(process: int, proc: Path = PROC) -> int:
    """When it started. Raises `OSError`, `ValueError`."""
    text = (proc / str(process) / "stat").read_text(encoding="utf-8", errors="replace")
    # The name stands in parentheses and may contain any character.
    fields = text.rpartition(")")[2].split()
    if len(fields) <= STARTED:
        raise ValueError(f"no start time of process {process}")
    return int(fields[STARTED])
