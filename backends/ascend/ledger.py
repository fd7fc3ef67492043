"""The device memory that communicators take, for whoever plans or reports it.

HCCL takes two buffers a communicator, one to send from and one to receive into, for as long as the
communicator lives. It reports them nowhere, so they are counted here.
"""

import threading
from dataclasses import dataclass

from equipoise.backends.ascend.settings import MIB, group_buffer, link_buffer

BUFFERS = 2
"""Of the same size in every communicator."""


@dataclass(frozen=True)
class Holding:
    """What one of HCCL's communicators takes of the device.

    Attributes:
        name: purpose and members.
        nbytes: of device memory.
    """

    name: str
    nbytes: int


class Ledger:
    """What is held at the moment. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, Holding] = {}

    def enter(self, name: str, mib: int) -> None:
        """A communicator with buffers of so many MiB was made."""
        with self._lock:
            self._held[name] = Holding(name, BUFFERS * mib * MIB)

    def strike(self, name: str) -> None:
        """It has given its buffers back."""
        with self._lock:
            self._held.pop(name, None)

    def held(self) -> tuple[Holding, ...]:
        """Everything, in the order in which it was made."""
        with self._lock:
            return tuple(self._held.values())

    def total(self) -> int:
        """Bytes of all of it."""
        return sum(holding.nbytes for holding in self.held())


def estimate(communicators: int, links: int) -> int:
    """Bytes that so many communicators, and links of this rank, will take with today's settings."""
    return BUFFERS * MIB * (communicators * group_buffer() + links * link_buffer())


LEDGER = Ledger()
"""Of this process."""
