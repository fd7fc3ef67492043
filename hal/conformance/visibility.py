"""Family *visibility*: who sees which version of a slot, and when."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance import machine, whole
from equipoise.hal.conformance.bench import NEXT, Bench, Play, demand
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.shelf import ROLES, Shelf, listed, plain, versions
from equipoise.hal.conformance.strategies import a_step, programs_of
from equipoise.hal.stream import Event, Role

FAMILY = "visibility"
LONGEST = 10
"""Steps of a program."""
SLOTS = 2
STAGING = 2
WIDTH = 8
"""Bytes of a slot, where order is judged."""
STREAM = st.sampled_from(ROLES)
SLOT = st.integers(0, SLOTS - 1)


@dataclass
class _Desk:
    """Makes the calls of a program; remembers what every read is due to hold.

    Every verb that brings bytes brings a version of its own: the number of its step, from 1.

    Attributes:
        shelf: the store.
        due: of each read, in words what it is, where its bytes land, and the version due.
        slots: the version of each slot, by the order of issue.
        staging: how many staging buffers were used up.
    """

    shelf: Shelf
    due: list[tuple[str, Tensor, int]] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)
    staging: int = 0

    def do(self, version: int, step: Step) -> None:
        """Make one call."""
        slot, role = int(step.args[0]), str(step.args[-1])
        if step.op == "commit":
            self.commit(version, slot, str(step.args[1]), role)
        elif step.op == "write":
            self.write(version, slot, role)
        else:
            self.pack(version, slot, role)

    def commit(self, version: int, slot: int, arrives: str, role: str) -> None:
        """Through a staging buffer that nothing else uses."""
        self.shelf.unpack([self.staging], version, arrives)
        self.shelf.store.commit([(self.staging, slot)], self.shelf.stream(role))
        self.slots[slot] = version
        self.staging += 1

    def write(self, version: int, slot: int, role: str) -> None:
        self.shelf.write([slot], version, role)
        self.slots[slot] = version

    def pack(self, version: int, slot: int, role: str) -> None:
        what = f"step {version}: what was packed of slot {slot} on {role}"
        self.due.append((what, self.shelf.pack([slot], role), self.slots.get(slot, 0)))

    def end(self) -> None:
        """A last pack of every slot that was changed."""
        for slot, version in self.slots.items():
            self.due.append((f"slot {slot} in the end", self.shelf.pack([slot], ROLES[0]), version))
        self.shelf.bench.drain()


def _judge(clause: str, due: Sequence[tuple[str, Tensor, int]]) -> None:
    for what, blob, version in due:
        found = versions(blob)
        demand(clause, found == [version], f"{what} holds version {listed(found)}, not {version}")


# ----- V5 and A2: the order of issue ---------------------------------------------------------


def _in_order(_: Traits) -> st.SearchStrategy[Program]:
    return programs_of(
        a_step("pack", SLOT, STREAM),
        a_step("write", SLOT, STREAM),
        a_step("commit", SLOT, STREAM, STREAM),
        most=LONGEST,
    )


def _play_in_order(bench: Bench, found: Program) -> Play:
    desk = _Desk(plain(bench, SLOTS, LONGEST, WIDTH))
    for version, step in enumerate(found.steps, start=1):
        desk.do(version, step)
        yield NEXT
    desk.end()
    _judge("V5", desk.due)


def _rewritten(_: Traits) -> st.SearchStrategy[Program]:
    buffer = st.integers(0, STAGING - 1)
    drawn = st.lists(
        st.one_of(a_step("unpack", buffer, STREAM), a_step("commit", buffer, STREAM)),
        min_size=2,
        max_size=LONGEST,
    )
    return drawn.map(lambda steps: program(_filled(steps)))


def _filled(steps: list[Step]) -> list[Step]:
    """Without commits of staging that nothing was unpacked into."""
    kept: list[Step] = []
    for step in steps:
        filled = {other.args[0] for other in kept if other.op == "unpack"}
        if step.op == "unpack" or step.args[0] in filled:
            kept.append(step)
    return kept


def _play_rewritten(bench: Bench, found: Program) -> Play:
    """Unpacking is ordered by events, so that nothing but the commits can go wrong."""
    place = plain(bench, LONGEST, STAGING, WIDTH)
    arrived: dict[int, tuple[int, Event]] = {}
    due: list[int] = []
    for version, step in enumerate(found.steps, start=1):
        buffer, role = int(step.args[0]), str(step.args[1])
        stream = place.stream(role)
        if buffer in arrived:
            stream.wait(arrived[buffer][1])
        if step.op == "unpack":
            place.unpack([buffer], version, role)
            arrived[buffer] = version, bench.accelerator.event()
            stream.record(arrived[buffer][1])
        else:
            place.store.commit([(buffer, len(due))], stream)
            due.append(arrived[buffer][0])
        yield NEXT
    bench.drain()
    blobs = [place.pack([slot], ROLES[0]) for slot in range(len(due))]
    bench.drain()
    found_in = zip(blobs, due, strict=True)
    _judge("A2", [(f"slot {s}", blob, version) for s, (blob, version) in enumerate(found_in)])


# ----- V1: whoever waits, sees ------------------------------------------------------------------


def _announced(_: Traits) -> st.SearchStrategy[Program]:
    return programs_of(
        a_step("host", SLOT),
        a_step("look", SLOT, STREAM),
        a_step("write", SLOT, STREAM),
        a_step("commit", SLOT, STREAM),
        most=LONGEST,
    )


@dataclass
class _Announcer(_Desk):
    """Orders reads behind writes, and writes behind reads, by events alone: nobody is attached."""

    written: dict[int, Event] = field(default_factory=dict)
    seen: dict[int, list[Event]] = field(default_factory=dict)

    def do(self, version: int, step: Step) -> None:
        slot, role = int(step.args[0]), str(step.args[-1])
        if step.op == "host":
            self.host(version, slot)
        elif step.op == "look":
            self.look(version, slot, role)
        else:
            self.bring(version, step.op, slot, role)

    def bring(self, version: int, op: str, slot: int, role: str) -> None:
        """A commit or a write behind the slot's looks, and the event that announces it.

        Behind the last one too: that a store orders its verbs by itself is judged elsewhere (V5).
        """
        before = [self.written[slot]] if slot in self.written else []
        for event in (*before, *self.seen.pop(slot, [])):
            self.shelf.stream(role).wait(event)
        if op == "commit":
            self.commit(version, slot, role, role)
        else:
            self.write(version, slot, role)
        self.written[slot] = self.record(role)

    def look(self, version: int, slot: int, role: str) -> None:
        if slot in self.written:
            self.shelf.stream(role).wait(self.written[slot])
        what = f"step {version}: what {role} saw in slot {slot} behind the event"
        self.due.append((what, self.shelf.look([slot], role), self.slots.get(slot, 0)))
        self.seen.setdefault(slot, []).append(self.record(role))

    def host(self, version: int, slot: int) -> None:
        if slot in self.written:
            self.written[slot].synchronize(self.shelf.bench.patience)
        what = f"step {version}: what the host saw in slot {slot} after the event"
        self.due.append((what, self.shelf.bytes_of(slot), self.slots.get(slot, 0)))

    def record(self, role: str) -> Event:
        event = self.shelf.bench.accelerator.event()
        self.shelf.bench.accelerator.stream(Role(role)).record(event)
        return event


def _play_announced(bench: Bench, found: Program) -> Play:
    desk = _Announcer(plain(bench, SLOTS, LONGEST, WIDTH))
    for version, step in enumerate(found.steps, start=1):
        desk.do(version, step)
        yield NEXT
    bench.drain()
    _judge("V1", desk.due)


PROPERTIES = (
    Property(
        name="verbs-of-a-store-take-effect-in-the-order-of-issue",
        family=FAMILY,
        clauses=("V5",),
        claim="Commits, writes and packs on any streams end as if made one after another.",
        programs=_in_order,
        play=_play_in_order,
    ),
    Property(
        name="staging-is-not-rewritten-under-a-commit",
        family=FAMILY,
        clauses=("A2",),
        claim="A commit copies what staging held when it was issued.",
        programs=_rewritten,
        play=_play_rewritten,
    ),
    Property(
        name="who-waits-for-a-commit-sees-it",
        family=FAMILY,
        clauses=("V1",),
        claim="Behind the event of a commit or write, streams and the host see all of its bytes.",
        programs=_announced,
        play=_play_announced,
    ),
    *whole.PROPERTIES,
    *machine.PROPERTIES,
)
