"""The states of a pool, one type each.

    Filling -> Sealed -> Closed
    Filling -> Closed               given up, or sealing failed

All ranks of a node leave `Filling` together, in `seal`; each closes for itself.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from equipoise.balancer.experts.host.contents import Contents
from equipoise.balancer.experts.host.council import Council
from equipoise.balancer.experts.host.memory import Mapping
from equipoise.hal.errors import ExpertPoolError, PoolLeased


@dataclass(frozen=True)
class Filling:
    """Mapped to be written; each rank fills its part.

    Attributes:
        council: where the ranks of the node meet.
        descriptor: of the memory, this rank's own.
        mapping: of the whole pool.
        contents: over the mapping.
        users: who is writing.
        filled: numbers of the experts that this rank has begun to fill; guarded by `lock`.
    """

    council: Council
    descriptor: int
    mapping: Mapping
    contents: Contents
    users: "Users" = field(default_factory=lambda: Users())
    filled: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def claim(self, number: int, name: str) -> None:
        """Fill `number`, once. Raises `ExpertPoolError`."""
        with self.lock:
            if number in self.filled:
                raise ExpertPoolError(f"{name} was filled before")
            self.filled.add(number)

    def release(self) -> None:
        """Let go of the memory, which ends with the last that holds it."""
        self.contents.release()
        self.mapping.abandon()
        os.close(self.descriptor)


@dataclass(frozen=True)
class Sealed:
    """Nobody can write any more; everybody reads all of it."""

    mapping: Mapping
    contents: Contents
    users: "Users"

    def release(self) -> None:
        """Let go of the memory, which ends with the last that holds it."""
        self.contents.release()
        self.mapping.abandon()


@dataclass(frozen=True)
class Closed:
    """Nothing is held, except by tensors that somebody has kept."""


class Users:
    """How many use the memory by now."""

    def __init__(self) -> None:
        self._count = 0
        self._closing = False
        self._changed = threading.Condition()

    def enter(self) -> None:
        """One more. Raises `ExpertPoolError` once `drain` was called."""
        with self._changed:
            if self._closing:
                raise ExpertPoolError("the pool takes no more users")
            self._count += 1

    def leave(self) -> None:
        """One less."""
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.leave()

    def drain(self, timeout: float) -> None:
        """Let nobody in, and wait until everybody has left.

        Raises:
            PoolLeased: not within `timeout` seconds.
        """
        with self._changed:
            self._closing = True
            if not self._changed.wait_for(lambda: self._count == 0, timeout):
                raise PoolLeased(f"{self._count} user(s) did not end within {timeout:g} s")


class PoolLease:
    """Experts that are being read: until `release` their memory stays mapped where it is.

    A copy that the host waits for needs none, since it holds the tensors. One that a device makes
    on its own does: it holds addresses.
    """

    def __init__(self, users: Users, sources: Sequence[tuple[Tensor, ...]]) -> None:
        users.enter()
        self._users = users
        self._lock = threading.Lock()
        self._held = [tuple(sources)]

    @property
    def sources(self) -> tuple[tuple[Tensor, ...], ...]:
        """The segments of each expert, in the order in which they were asked for.

        Raises `ExpertPoolError` after `release`.
        """
        with self._lock:
            if not self._held:
                raise ExpertPoolError("the lease was given back")
            return self._held[0]

    def release(self) -> None:
        """Everything has been read. Any number of times; only the first counts."""
        with self._lock:
            if not self._held:
                return
            self._held.clear()
        self._users.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
