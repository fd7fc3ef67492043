"""Property of family *addresses* about leases: slots that a peer still reads."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.shelf import ROLES, Shelf, plain
from equipoise.hal.errors import SlotLeased
from equipoise.hal.slots import Lease

LONGEST = 12
"""Steps of a program."""
SLOTS = 2
SETS = 3
"""Sets of slots that are not empty."""
ROLE = ROLES[1]


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    ops = st.sampled_from(("lease", "commit", "write", "release"))
    steps = st.builds(lambda op, which: Step(op, (which,)), ops, st.integers(0, SETS - 1))
    return st.lists(steps, min_size=1, max_size=LONGEST).map(lambda drawn: program(_valid(drawn)))


def _valid(steps: list[Step]) -> list[Step]:
    """Releases name one of the leases that were taken so far; it may have been released before.

    Everything else names a set of slots: that of the bits of its argument plus one.
    """
    taken, kept = 0, []
    for step in steps:
        taken += step.op == "lease"
        if step.op != "release":
            kept.append(step)
        elif taken:
            kept.append(Step("release", (int(step.args[0]) % taken,)))
    return kept


@dataclass
class _Desk:
    """Leases, and verbs that must be refused while one of their slots is leased."""

    place: Shelf
    due: list[int] = field(default_factory=lambda: [0] * SLOTS)
    leases: list[Lease] = field(default_factory=list)
    held: list[set[int]] = field(default_factory=list)
    packed: list[tuple[int, Tensor, list[int]]] = field(default_factory=list)

    def do(self, number: int, step: Step) -> None:
        """Make one call; behind it, the slots are packed, which no lease forbids."""
        given = int(step.args[0])
        slots = [slot for slot in range(SLOTS) if given + 1 >> slot & 1]
        if step.op == "release":
            self.leases[given].release()
            self.held[given] = set()
        elif step.op == "lease":
            self.lease(slots)
        else:
            self.change(number, step.op, slots)
        self.packed.append((number, self.place.pack(range(SLOTS), ROLE), list(self.due)))

    def lease(self, slots: list[int]) -> None:
        lease = self.place.store.lease(slots)
        self.leases.append(lease)
        self.held.append(set(slots))
        demand("A11", list(lease.slots) == slots, f"a lease of {slots} says {lease.slots}")

    def change(self, number: int, op: str, slots: list[int]) -> None:
        leased = sorted(set.union(set(), *self.held) & set(slots))
        verb = self.write if op == "write" else self.commit
        refusal = attempt(lambda: verb(number, slots), SlotLeased)
        what = f"step {number}: {op} to slots {slots} while {leased or 'none'} of them are leased"
        demand("A11", (refusal is not None) == bool(leased), f"{what}: {refusal or 'no error'}")
        if not leased:
            self.due = [number if slot in slots else old for slot, old in enumerate(self.due)]

    def write(self, number: int, slots: list[int]) -> None:
        self.place.write(slots, number, ROLE)

    def commit(self, number: int, slots: list[int]) -> None:
        self.place.unpack(slots, number, ROLE)
        self.place.store.commit([(slot, slot) for slot in slots], self.place.stream(ROLE))


def _play(bench: Bench, found: Program) -> Play:
    desk = _Desk(plain(bench, SLOTS, SLOTS, 1))
    for number, step in enumerate(found.steps, start=1):
        desk.do(number, step)
        yield NEXT
    for slot in range(SLOTS):
        desk.change(len(found.steps) + 1, "write", [slot])
    bench.drain()
    for number, blob, due in desk.packed:
        what = f"after step {number} the slots hold versions {blob.tolist()}, not {due}"
        demand("A11", blob.tolist() == due, what)


PROPERTIES = (
    Property(
        name="a-leased-slot-is-written-by-nobody",
        family="addresses",
        clauses=("A11",),
        claim="Commits and writes to a leased slot are refused, whole, until its last release.",
        programs=_programs,
        play=_play,
    ),
)
