"""Family *keepalive*, one device: what a verb of a slot store is given is its own until it ran."""

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.bench import NEXT, Bench, Play, demand
from equipoise.hal.conformance.junk import junk_for, untouched
from equipoise.hal.conformance.program import Program, Step
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.shelf import ROLES, Part, Shelf, listed, shelf, versions
from equipoise.hal.conformance.strategies import a_step, programs_of
from equipoise.hal.stream import Role

FAMILY = "keepalive"
MOST = 6
SLOTS = 2
PARTS = [Part(torch.uint8, 24), Part(torch.uint8, 40)]
SLOT, STREAM = st.integers(0, SLOTS - 1), st.sampled_from(ROLES)


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    """Slot and stream; the version that a step brings is its number, from 1."""
    kinds = [a_step(op, SLOT, STREAM) for op in ("unpack", "write", "pack")]
    return programs_of(*kinds, most=MOST)


@dataclass
class _Desk:
    """Makes the calls of a program, each with memory that it drops at once.

    Attributes:
        place: the store; staging buffer k belongs to slot k.
        due: the version that each slot will hold.
        junk: what took the memory that was dropped.
    """

    place: Shelf
    due: list[int] = field(default_factory=lambda: [0] * SLOTS)
    junk: list[Tensor] = field(default_factory=list)

    def do(self, version: int, slot: int, step: Step) -> None:
        """Make one call, drop what it was given, and let somebody else have that memory."""
        stream = self.place.stream(str(step.args[1]))
        sizes = [self.place.slot_bytes]
        if step.op == "pack":
            self.place.store.pack([slot], self._blob(0), stream)
        elif step.op == "unpack":
            self.place.store.unpack(self._blob(version), [slot], stream)
            self.due[slot] = version
        else:
            made = self.place.source(self._blob(version))
            self.place.kept.clear()
            sizes = [segment.nbytes for segment in made]
            self.place.store.write([slot], [made], stream)
            del made
            self.due[slot] = version
        self.junk += junk_for(self.place.bench, *sizes)
        if step.op == "unpack":
            self.place.store.commit([(slot, slot)], stream)

    def _blob(self, version: int) -> Tensor:
        return self.place.bench.filled((self.place.slot_bytes,), version)


def _play(bench: Bench, found: Program) -> Play:
    desk = _Desk(shelf(bench, SLOTS, SLOTS, PARTS))
    for number, step in enumerate(found.steps, 1):
        desk.do(number, int(step.args[0]), step)
        yield NEXT
    bench.drain(*(bench.accelerator.stream(Role(role)) for role in ROLES))
    for slot, due in enumerate(desk.due):
        seen = versions(desk.place.bytes_of(slot))
        demand("K1", seen == [due], f"slot {slot} holds {listed(seen)}, not {due}")
    untouched("K1", desk.junk)


PROPERTIES = (
    Property(
        name="memory-dropped-behind-a-verb-still-counts",
        family=FAMILY,
        clauses=("K1",),
        claim="A verb of a store owns what it was given: its caller may drop that at once.",
        programs=_programs,
        play=_play,
    ),
)
