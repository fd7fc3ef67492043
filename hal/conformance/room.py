"""A shelf on which every call brings bytes of its own, so that every byte that is due is known."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from equipoise.hal.conformance.collectives import noise
from equipoise.hal.conformance.program import Step
from equipoise.hal.conformance.shelf import ROLES, Shelf

ROLE = ROLES[1]
"""The one stream of properties in which order is not the question."""
ENDS = ((0x00, 0x80), (0xA1, 0x7F), (0xF1, 0x7F), (0x01, 0x00), (0x81, 0xFF), (0x80, 0x7F))
"""Last two bytes of a little-endian float: -0.0, signalling and quiet NaN, denormal, infinity."""


def tame_bytes(nbytes: int, *key: object) -> Tensor:
    """Bytes of ordinary numbers in every dtype: no NaN, no zero, nothing denormal."""
    return torch.frombuffer(noise(nbytes, *key), dtype=torch.uint8) % 0x2F + 0x11


def wild_bytes(nbytes: int, item: int, *key: object) -> Tensor:
    """Floats of `item` bytes that arithmetic would change."""
    made = noise(nbytes, *key)
    for place in range(item, nbytes + 1, item):
        made[place - 2 : place] = bytes(ENDS[made[place - 1] % len(ENDS)])
    return torch.frombuffer(made, dtype=torch.uint8)


@dataclass
class Room:
    """Makes the calls of a program; knows every byte that is due.

    Attributes:
        shelf: the store.
        wild: bytes of one element where contents are to be wild floats, else 0.
        slots: what each slot is due to hold, uint8 [slot_bytes].
        staging: the same of staging that was written to.
        packed: of each pack, in words what it is, its blob, and what is due.
    """

    shelf: Shelf
    wild: int = 0
    slots: dict[int, Tensor] = field(default_factory=dict)
    staging: dict[int, Tensor] = field(default_factory=dict)
    packed: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    def do(self, number: int, step: Step) -> None:
        """Make one call; each brings contents of its own."""
        target = int(step.args[-1])
        if step.op == "commit":
            self.commit(number, int(step.args[0]), target)
        elif step.op == "write":
            self.write(number, target)
        else:
            self.pack(f"step {number}: slot {target} as packed", target)

    def commit(self, number: int, buffer: int, slot: int) -> None:
        """Through staging, from a blob."""
        blob = self.shelf.bench.of(self.fresh(number))
        self.shelf.kept.append(blob)
        self.shelf.store.unpack(blob, [buffer], self.shelf.stream(ROLE))
        self.shelf.store.commit([(buffer, slot)], self.shelf.stream(ROLE))
        self.staging[buffer] = self.slots[slot] = self.fresh(number)

    def write(self, number: int, slot: int) -> None:
        """From tensors of their own."""
        source = self.shelf.source(self.fresh(number))
        self.shelf.store.write([slot], [source], self.shelf.stream(ROLE))
        self.slots[slot] = self.fresh(number)

    def pack(self, what: str, slot: int) -> None:
        """Into a blob between guard bands, off the alignment."""
        size = self.shelf.slot_bytes
        guard = self.shelf.bench.guarded(size, 1)
        self.shelf.guards.append(guard)
        self.shelf.store.pack([slot], guard.data, self.shelf.stream(ROLE))
        zeros = torch.zeros(size, dtype=torch.uint8)
        self.packed.append((what, guard.data, self.slots.get(slot, zeros)))

    def fresh(self, number: int) -> Tensor:
        """The bytes that a step brings, uint8 [slot_bytes]."""
        size = self.shelf.slot_bytes
        return wild_bytes(size, self.wild, number) if self.wild else tame_bytes(size, number)
