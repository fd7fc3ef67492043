"""Family *visibility*: which version of a slot a read sees, and when."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.context import NEXT, Play, RankContext, require
from equipoise.hal.conformance.fixtures.slot_store import (
    SLOT_ROLES,
    SegmentSpec,
    SlotStoreFixture,
    format_versions,
    make_plain_slot_store,
    make_slot_store,
    versions_in,
)
from equipoise.hal.conformance.fixtures.strategies import programs_of, step_of
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.properties import stateful
from equipoise.hal.conformance.property import ProgramStrategy, Property, Traits
from equipoise.hal.stream import Event, Role

FAMILY = "visibility"
MAX_READER_STEPS = 10
"""Steps of a program."""
BATCH_SLOTS = 3
"""Slots of a store, where whole batches are judged."""
ONE_BYTE_SLOT = [SegmentSpec(torch.uint8, 1)]
"""Segments of a slot, where whole batches are judged."""
TWO_SEGMENT_SLOT = [SegmentSpec(torch.uint8, 32), SegmentSpec(torch.uint8, 32)]
"""Segments of a slot, where tearing is judged."""
STREAM = st.sampled_from(SLOT_ROLES)


def _reader_programs(slots: int) -> ProgramStrategy:
    """Looks at all slots, and commits and writes to some of them, by the bits of a number."""
    some = st.integers(1, 2**slots - 1)
    kinds = (
        step_of("look", STREAM),
        step_of("write", some, STREAM),
        step_of("commit", some, STREAM),
    )
    return lambda _: programs_of(*kinds, most=MAX_READER_STEPS)


@dataclass
class _ReaderRunner:
    """Makes the calls of a program, with every stream a reader.

    Attributes:
        fixture: the store.
        states: the versions of all slots, at first and after each call that changed them.
        reads: of each look, in words what it is, and where its bytes land.
        staging_used: how many staging buffers were used up.
    """

    fixture: SlotStoreFixture
    states: list[list[int]]
    reads: list[tuple[str, Tensor]] = field(default_factory=list)
    staging_used: int = 0

    def run_step(self, version: int, step: Step) -> None:
        """Make one call; its version is the number of its step, from 1."""
        role, all_slots = str(step.args[-1]), range(len(self.states[0]))
        if step.op == "look":
            what = f"step {version}: {role} saw"
            self.reads.append((what, self.fixture.read_in_launch(all_slots, role)))
            return
        slots = [slot for slot in all_slots if int(step.args[0]) >> slot & 1]
        if step.op == "write":
            self.fixture.write(slots, version, role)
        else:
            self.commit(slots, version, role)
        before = self.states[-1]
        self.states.append([version if s in slots else old for s, old in enumerate(before)])

    def commit(self, slots: list[int], version: int, role: str) -> None:
        """Many slots in one call, through staging buffers that nothing else uses."""
        staging = range(self.staging_used, self.staging_used + len(slots))
        self.fixture.unpack(staging, version, role)
        self.fixture.store.commit(list(zip(staging, slots, strict=True)), self.fixture.stream(role))
        self.staging_used += len(slots)


def _play_readers(
    ctx: RankContext, program: Program, slots: int, parts: Sequence[SegmentSpec]
) -> Play:
    """Plays to the end; returns the flags."""
    fixture = make_slot_store(ctx, slots, MAX_READER_STEPS * slots, parts)
    for role in SLOT_ROLES:
        fixture.store.attach(ctx.accelerator.stream(Role(role)))
    runner = _ReaderRunner(fixture, [[0] * slots])
    for version, step in enumerate(program.steps, start=1):
        runner.run_step(version, step)
        yield NEXT
    ctx.drain()
    return runner


def _play_torn(ctx: RankContext, program: Program) -> Play:
    """Whether a look saw the right version is for A12 to say: here it must be one."""
    runner = yield from _play_readers(ctx, program, 1, TWO_SEGMENT_SLOT)
    for what, blob in runner.reads:
        versions = versions_in(blob)
        require(
            "V2",
            len(versions) == 1,
            f"{what} a slot torn between versions {format_versions(versions)}",
        )


def _play_batches(ctx: RankContext, program: Program) -> Play:
    """Slots of one byte cannot be torn, so what is seen of a batch is judged by itself."""
    runner = yield from _play_readers(ctx, program, BATCH_SLOTS, ONE_BYTE_SLOT)
    for what, blob in runner.reads:
        versions = blob.tolist()
        require(
            "V4",
            versions in runner.states,
            f"{what} versions {versions} of the slots: half of a batch",
        )


WHOLE_SLOTS = (
    Property(
        name="a-slot-is-read-whole",
        family=FAMILY,
        clauses=("V2",),
        claim="An attached reader sees one version of a slot, whatever stream it is on.",
        programs=_reader_programs(1),
        play=_play_torn,
    ),
    Property(
        name="a-batch-is-seen-whole",
        family=FAMILY,
        clauses=("V4",),
        claim="Between two launches of an attached reader a commit has happened, or has not.",
        programs=_reader_programs(BATCH_SLOTS),
        play=_play_batches,
    ),
)


MAX_STORE_STEPS = 10
"""Steps of a program."""
SLOTS = 2
STAGING = 2
STORES = 2
"""Stores of one device that are alike: one for the target model, one for the draft model."""
SLOT_BYTES = 8
"""Bytes of a slot, where order is judged."""
SLOT = st.integers(0, SLOTS - 1)


@dataclass
class _StoreRunner:
    """Makes the calls of a program; remembers what every read must hold.

    Every operation that brings bytes brings a version of its own: the number of its step, from 1.

    Attributes:
        fixture: the store.
        expected_reads: of each read its description, where its bytes land, expected version.
        slot_versions: the version of each slot, by the order of issue.
        staging_used: how many staging buffers were used up.
    """

    fixture: SlotStoreFixture
    expected_reads: list[tuple[str, Tensor, int]] = field(default_factory=list)
    slot_versions: dict[int, int] = field(default_factory=dict)
    staging_used: int = 0

    def run_step(self, version: int, step: Step) -> None:
        """Make one call."""
        slot, role = int(step.args[0]), str(step.args[-1])
        if step.op == "commit":
            self.commit(version, slot, str(step.args[1]), role)
        elif step.op == "write":
            self.write(version, slot, role)
        elif step.op == "lease":
            # Over at once, so that nothing is refused: it must not disturb what is under way.
            self.fixture.store.lease([slot]).release()
        else:
            self.pack(version, slot, role)

    def commit(self, version: int, slot: int, arrives: str, role: str) -> None:
        """Through a staging buffer that nothing else uses."""
        self.fixture.unpack([self.staging_used], version, arrives)
        self.fixture.store.commit([(self.staging_used, slot)], self.fixture.stream(role))
        self.slot_versions[slot] = version
        self.staging_used += 1

    def write(self, version: int, slot: int, role: str) -> None:
        self.fixture.write([slot], version, role)
        self.slot_versions[slot] = version

    def pack(self, version: int, slot: int, role: str) -> None:
        what = f"step {version}: what was packed of slot {slot} on {role}"
        self.expected_reads.append(
            (what, self.fixture.pack([slot], role), self.slot_versions.get(slot, 0))
        )

    def pack_changed_slots(self) -> None:
        """A last pack of every slot that was changed."""
        for slot, version in self.slot_versions.items():
            self.expected_reads.append(
                (f"slot {slot} in the end", self.fixture.pack([slot], SLOT_ROLES[0]), version)
            )
        self.fixture.ctx.drain()


def _require_versions(clause: str, expected: Sequence[tuple[str, Tensor, int]]) -> None:
    for what, blob, version in expected:
        versions = versions_in(blob)
        require(
            clause,
            versions == [version],
            f"{what} holds version {format_versions(versions)}, not {version}",
        )


# ----- V5 and A2: the order of issue ---------------------------------------------------------


def _issue_order_programs(_: Traits) -> st.SearchStrategy[Program]:
    return programs_of(
        step_of("pack", SLOT, STREAM),
        step_of("write", SLOT, STREAM),
        step_of("commit", SLOT, STREAM, STREAM),
        step_of("lease", SLOT),
        most=MAX_STORE_STEPS,
    )


def _play_issue_order(ctx: RankContext, program: Program) -> Play:
    runner = _StoreRunner(make_plain_slot_store(ctx, SLOTS, MAX_STORE_STEPS, SLOT_BYTES))
    for version, step in enumerate(program.steps, start=1):
        runner.run_step(version, step)
        yield NEXT
    runner.pack_changed_slots()
    _require_versions("V5", runner.expected_reads)


def _staging_reuse_programs(_: Traits) -> st.SearchStrategy[Program]:
    buffer, store = st.integers(0, STAGING - 1), st.integers(0, STORES - 1)
    step_lists = st.lists(
        st.one_of(
            step_of("unpack", buffer, STREAM, store), step_of("commit", buffer, STREAM, store)
        ),
        min_size=2,
        max_size=MAX_STORE_STEPS,
    )
    return step_lists.map(lambda steps: make_program(_without_unfilled_commits(steps)))


def _without_unfilled_commits(steps: list[Step]) -> list[Step]:
    """Without commits of staging that nothing was unpacked into."""
    valid: list[Step] = []
    for step in steps:
        filled = {_buffer(other) for other in valid if other.op == "unpack"}
        if step.op == "unpack" or _buffer(step) in filled:
            valid.append(step)
    return valid


def _buffer(step: Step) -> tuple[int, int]:
    """The store, and its staging buffer."""
    return int(step.args[2]), int(step.args[0])


def _play_staging_reuse(ctx: RankContext, program: Program) -> Play:
    """Unpacking is ordered by events, so that nothing but the commits can go wrong."""
    stores = [
        make_plain_slot_store(ctx, MAX_STORE_STEPS, STAGING, SLOT_BYTES) for _ in range(STORES)
    ]
    arrived: dict[tuple[int, int], tuple[int, Event]] = {}
    expected: list[tuple[int, int]] = []
    for version, step in enumerate(program.steps, start=1):
        key, role = _buffer(step), str(step.args[1])
        place, stream = stores[key[0]], stores[key[0]].stream(role)
        if key in arrived:
            stream.wait(arrived[key][1])
        if step.op == "unpack":
            place.unpack([key[1]], version, role)
            arrived[key] = version, ctx.accelerator.event()
            stream.record(arrived[key][1])
        else:
            place.store.commit([(key[1], len(expected))], stream)
            expected.append((key[0], arrived[key][0]))
        yield NEXT
    ctx.drain()
    reads = []
    for slot, (store, version) in enumerate(expected):
        what = f"slot {slot} of store {store}"
        reads.append((what, stores[store].pack([slot], SLOT_ROLES[0]), version))
    ctx.drain()
    _require_versions("A2", reads)


# ----- V1: whoever waits, sees ------------------------------------------------------------------


def _event_ordered_programs(_: Traits) -> st.SearchStrategy[Program]:
    return programs_of(
        step_of("host", SLOT),
        step_of("look", SLOT, STREAM),
        step_of("write", SLOT, STREAM),
        step_of("commit", SLOT, STREAM),
        most=MAX_STORE_STEPS,
    )


@dataclass
class _EventOrderedRunner(_StoreRunner):
    """Orders reads after writes, and writes after reads, by events alone: no reader is attached."""

    write_events: dict[int, Event] = field(default_factory=dict)
    read_events: dict[int, list[Event]] = field(default_factory=dict)

    def run_step(self, version: int, step: Step) -> None:
        slot, role = int(step.args[0]), str(step.args[-1])
        if step.op == "host":
            self.read_on_host(version, slot)
        elif step.op == "look":
            self.read_in_launch(version, slot, role)
        else:
            self.bring(version, step.op, slot, role)

    def bring(self, version: int, op: str, slot: int, role: str) -> None:
        """A commit or a write after the slot's reads, and the event that announces it.

        After the last one too: that a store orders its own calls is judged elsewhere (V5).
        """
        before = [self.write_events[slot]] if slot in self.write_events else []
        for event in (*before, *self.read_events.pop(slot, [])):
            self.fixture.stream(role).wait(event)
        if op == "commit":
            self.commit(version, slot, role, role)
        else:
            self.write(version, slot, role)
        self.write_events[slot] = self.record(role)

    def read_in_launch(self, version: int, slot: int, role: str) -> None:
        if slot in self.write_events:
            self.fixture.stream(role).wait(self.write_events[slot])
        what = f"step {version}: what {role} saw in slot {slot} behind the event"
        self.expected_reads.append(
            (what, self.fixture.read_in_launch([slot], role), self.slot_versions.get(slot, 0))
        )
        self.read_events.setdefault(slot, []).append(self.record(role))

    def read_on_host(self, version: int, slot: int) -> None:
        if slot in self.write_events:
            self.write_events[slot].synchronize(self.fixture.ctx.timeout)
        what = f"step {version}: what the host saw in slot {slot} after the event"
        self.expected_reads.append(
            (what, self.fixture.read_slot(slot), self.slot_versions.get(slot, 0))
        )

    def record(self, role: str) -> Event:
        event = self.fixture.ctx.accelerator.event()
        self.fixture.ctx.accelerator.stream(Role(role)).record(event)
        return event


def _play_event_ordered(ctx: RankContext, program: Program) -> Play:
    runner = _EventOrderedRunner(make_plain_slot_store(ctx, SLOTS, MAX_STORE_STEPS, SLOT_BYTES))
    for version, step in enumerate(program.steps, start=1):
        runner.run_step(version, step)
        yield NEXT
    ctx.drain()
    _require_versions("V1", runner.expected_reads)


PROPERTIES = (
    Property(
        name="operations-of-a-store-take-effect-in-the-order-of-issue",
        family=FAMILY,
        clauses=("V5",),
        claim="Commits, writes and packs on any streams end as if made one after another.",
        programs=_issue_order_programs,
        play=_play_issue_order,
    ),
    Property(
        name="staging-is-not-rewritten-under-a-commit",
        family=FAMILY,
        clauses=("A2",),
        claim="A commit copies what its store's staging held when it was issued.",
        programs=_staging_reuse_programs,
        play=_play_staging_reuse,
    ),
    Property(
        name="a-commit-is-visible-after-its-event",
        family=FAMILY,
        clauses=("V1",),
        claim="Behind the event of a commit or write, streams and the host see all of its bytes.",
        programs=_event_ordered_programs,
        play=_play_event_ordered,
    ),
    *WHOLE_SLOTS,
    *stateful.PROPERTIES,
)
