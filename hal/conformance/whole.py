"""Properties of family *visibility* about attached readers: whole slots, whole batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.bench import NEXT, Bench, Play, demand
from equipoise.hal.conformance.program import Program, Step
from equipoise.hal.conformance.property import Drawn, Property
from equipoise.hal.conformance.shelf import ROLES, Part, Shelf, listed, shelf, versions
from equipoise.hal.conformance.strategies import a_step, programs_of
from equipoise.hal.stream import Role

FAMILY = "visibility"
LONGEST = 10
"""Steps of a program."""
BATCH = 3
"""Slots of a store, where whole batches are judged."""
BYTE = [Part(torch.uint8, 1)]
"""Segments of a slot, where whole batches are judged."""
HALVES = [Part(torch.uint8, 32), Part(torch.uint8, 32)]
"""Segments of a slot, where tearing is judged."""
STREAM = st.sampled_from(ROLES)


def _programs(slots: int) -> Drawn:
    """Looks at all slots, and commits and writes to some of them, by the bits of a number."""
    some = st.integers(1, 2**slots - 1)
    kinds = (a_step("look", STREAM), a_step("write", some, STREAM), a_step("commit", some, STREAM))
    return lambda _: programs_of(*kinds, most=LONGEST)


@dataclass
class _Desk:
    """Makes the calls of a program, with every stream a reader.

    Attributes:
        place: the store.
        states: the versions of all slots, at first and after each call that changed them.
        reads: of each look, in words what it is, and where its bytes land.
        used: how many staging buffers were used up.
    """

    place: Shelf
    states: list[list[int]]
    reads: list[tuple[str, Tensor]] = field(default_factory=list)
    used: int = 0

    def do(self, version: int, step: Step) -> None:
        """Make one call; its version is the number of its step, from 1."""
        role, everything = str(step.args[-1]), range(len(self.states[0]))
        if step.op == "look":
            what = f"step {version}: {role} saw"
            self.reads.append((what, self.place.look(everything, role)))
            return
        slots = [slot for slot in everything if int(step.args[0]) >> slot & 1]
        if step.op == "write":
            self.place.write(slots, version, role)
        else:
            self.commit(slots, version, role)
        before = self.states[-1]
        self.states.append([version if s in slots else old for s, old in enumerate(before)])

    def commit(self, slots: list[int], version: int, role: str) -> None:
        """Many slots in one call, through staging buffers that nothing else uses."""
        staging = range(self.used, self.used + len(slots))
        self.place.unpack(staging, version, role)
        self.place.store.commit(list(zip(staging, slots, strict=True)), self.place.stream(role))
        self.used += len(slots)


def _play(bench: Bench, found: Program, slots: int, parts: Sequence[Part]) -> Play:
    """Play to the end; the desk."""
    place = shelf(bench, slots, LONGEST * slots, parts)
    for role in ROLES:
        place.store.attach(bench.accelerator.stream(Role(role)))
    desk = _Desk(place, [[0] * slots])
    for version, step in enumerate(found.steps, start=1):
        desk.do(version, step)
        yield NEXT
    bench.drain()
    return desk


def _play_torn(bench: Bench, found: Program) -> Play:
    """Whether a look saw the right version is for A12 to say: here it must be one."""
    desk = yield from _play(bench, found, 1, HALVES)
    for what, blob in desk.reads:
        seen = versions(blob)
        demand("V2", len(seen) == 1, f"{what} a slot torn between versions {listed(seen)}")


def _play_batches(bench: Bench, found: Program) -> Play:
    """Slots of one byte cannot be torn, so what is seen of a batch is judged by itself."""
    desk = yield from _play(bench, found, BATCH, BYTE)
    for what, blob in desk.reads:
        seen = blob.tolist()
        demand("V4", seen in desk.states, f"{what} versions {seen} of the slots: half of a batch")


PROPERTIES = (
    Property(
        name="a-slot-is-read-whole",
        family=FAMILY,
        clauses=("V2",),
        claim="An attached reader sees one version of a slot, whatever stream it is on.",
        programs=_programs(1),
        play=_play_torn,
    ),
    Property(
        name="a-batch-is-seen-whole",
        family=FAMILY,
        clauses=("V4",),
        claim="Between two launches of an attached reader a commit has happened, or has not.",
        programs=_programs(BATCH),
        play=_play_batches,
    ),
)
