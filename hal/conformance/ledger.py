"""What one accelerator is due to show, whatever its streams do: the oracle of the machine."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from equipoise.hal.conformance.model import Order
from equipoise.hal.conformance.shelf import ROLES

SLOTS = 2
STAGING = 2
PAGES = 2
Buffer = tuple[str, int]
"""A slot or a staging buffer, by number."""


class Turn(StrEnum):
    """Whose the stream lock's memory is."""

    MOVER = "mover"
    """The mover's; no stream waits."""
    WAITED = "waited"
    """The mover's; a stream waits, and so does whatever waits for that stream."""
    SIGNED = "signed"
    """Signalled, and nobody has acquired it."""
    PASSED = "passed"
    """Signalled, acquired and released: the mover may wait for it."""


@dataclass
class Ledger:
    """Follows calls one by one; knows which can be made, and what each read is due to see.

    Versions are numbers of the steps that brought them; 0 is what was there at first.

    Attributes:
        order: what must have run before what.
        versions: of slots and staging buffers, in the order of issue (V5).
        writers: the launch that last wrote a buffer.
        looks: launches of streams that were not attached, by the slot they read.
        attached: how many readers each stream has.
        leases: the slot of each lease that was taken; -1 once it was released.
        pages: the pages in hand, by the steps that took them.
        turn: where the stream lock stands.
        tables: which of the two placements is installed; None before the first.
    """

    order: Order = field(default_factory=Order)
    versions: dict[Buffer, int] = field(default_factory=dict)
    writers: dict[Buffer, int] = field(default_factory=dict)
    looks: dict[int, list[int]] = field(default_factory=dict)
    attached: Counter[str] = field(default_factory=Counter)
    leases: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    turn: Turn = Turn.MOVER
    tables: int | None = None

    def slot(self, slot: int) -> int:
        """The version that a slot is due to hold for whoever reads it now."""
        return self.versions.get(("slot", slot), 0)

    def leased(self, slot: int) -> bool:
        """Whether nobody may write it."""
        return slot in self.leases

    def settled(self, role: str, slot: int) -> bool:
        """Whether a launch on the stream may read the slot: its last write comes before."""
        writer = self.writers.get(("slot", slot))
        return writer is None or self.order.reached(role, writer)

    def strangers(self, role: str, slot: int) -> list[str]:
        """Streams that were not attached and still look at the slot, as far as `role` knows."""
        looks = [look for look in self.looks.get(slot, []) if not self.order.reached(role, look)]
        return sorted({self.order.launches[look][0] for look in looks})

    def bring(self, number: int, buffer: Buffer, role: str) -> None:
        """A verb on the stream writes a version of its own."""
        writer = self._verb(buffer, role)
        self.versions[buffer], self.writers[buffer] = number, writer
        for reader in self.attached:
            if buffer[0] == "slot":
                self.order.follow(reader, writer)

    def commit(self, staging: int, slot: int, role: str) -> None:
        """Staging goes to a slot; a leased slot stays as it is."""
        if not self.leased(slot):
            self._verb(("staging", staging), role)
            self.bring(self.versions["staging", staging], ("slot", slot), role)

    def write(self, number: int, slot: int, role: str) -> None:
        """A version goes to a slot; a leased slot stays as it is."""
        if not self.leased(slot):
            self.bring(number, ("slot", slot), role)

    def pack(self, slot: int, role: str) -> None:
        """A verb reads the slot, behind its last write."""
        self._verb(("slot", slot), role)

    def look(self, slot: int, role: str) -> None:
        """A launch reads the slot; that of a stranger is not waited for."""
        launch = self.order.launch(role)
        if not self.attached[role]:
            self.looks.setdefault(slot, []).append(launch)

    def attach(self, role: str) -> None:
        """Everything has ended before; from now on the stream is waited for."""
        self.rest()
        self.attached[role] += 1

    def detach(self, role: str) -> None:
        """One reader less."""
        self.attached -= Counter([role])

    def sign(self) -> None:
        """The mover has waited for its turn and signalled: whoever waits goes on."""
        self.turn = Turn.PASSED if self.turn is Turn.WAITED else Turn.SIGNED

    def acquire(self) -> None:
        """A stream acquires, reads and releases; before the signal it waits."""
        self.turn = Turn.PASSED if self.turn is Turn.SIGNED else Turn.WAITED

    def join(self, first: str, second: str) -> None:
        """A stream waits for all that another one was given so far."""
        self.order.record(0, first)
        self.order.wait(second, 0)

    def rest(self) -> None:
        """The host has waited for every stream."""
        for role in ROLES:
            for launch in range(len(self.order.launches)):
                self.order.follow(role, launch)

    def _verb(self, buffer: Buffer, role: str) -> int:
        """A launch behind the last write of what it touches (V5)."""
        if buffer in self.writers:
            self.order.follow(role, self.writers[buffer])
        return self.order.launch(role)
