"""The device memory that communicators take, for whoever plans or reports it.

Not every library reports it, and none beforehand: so it is counted here by what each says that its
communicators take.
"""

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class CommMemory:
    """What one communicator of a library's takes of the device.

    Attributes:
        name: purpose and members.
        nbytes: of device memory.
    """

    name: str
    nbytes: int


class CommMemoryLedger:
    """What is held at the moment. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, CommMemory] = {}

    def add(self, name: str, nbytes: int) -> None:
        """A communicator that takes so much was made."""
        with self._lock:
            self._held[name] = CommMemory(name, nbytes)

    def remove(self, name: str) -> None:
        """It has given its memory back."""
        with self._lock:
            self._held.pop(name, None)

    def entries(self) -> tuple[CommMemory, ...]:
        """Everything, in the order in which it was made."""
        with self._lock:
            return tuple(self._held.values())

    def total(self) -> int:
        """Bytes of all of it."""
        return sum(holding.nbytes for holding in self.entries())


COMM_MEMORY = CommMemoryLedger()
"""Of this process."""
