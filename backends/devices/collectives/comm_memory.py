"""The device memory that communicators take, for reports and for planning.

Most libraries do not report it, and none does in advance. So each library states an estimate per
communicator, and this module adds them up.
"""

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class CommMemory:
    """The device memory of one communicator.

    Attributes:
        name: purpose and members.
        nbytes: of device memory.
    """

    name: str
    nbytes: int


class CommMemoryUsage:
    """The memory of all open communicators. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, CommMemory] = {}

    def add(self, name: str, nbytes: int) -> None:
        """Add a communicator that takes `nbytes`."""
        with self._lock:
            self._by_name[name] = CommMemory(name, nbytes)

    def remove(self, name: str) -> None:
        """Remove a communicator that was released; does nothing if it is not there."""
        with self._lock:
            self._by_name.pop(name, None)

    def entries(self) -> tuple[CommMemory, ...]:
        """All communicators, in the order in which they were made."""
        with self._lock:
            return tuple(self._by_name.values())

    def total(self) -> int:
        """Their bytes in all."""
        return sum(holding.nbytes for holding in self.entries())


COMM_MEMORY = CommMemoryUsage()
"""Of this process."""
