"""Family *addresses*: slots under readers and leases, host pages under copies."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.accelerator import Graph, HostPool, Page
from equipoise.hal.conformance.context import NEXT, Play, RankContext, catch, require
from equipoise.hal.conformance.fixtures.slot_store import (
    SLOT_ROLES,
    SlotStoreFixture,
    format_versions,
    make_plain_slot_store,
    versions_in,
)
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.errors import PoolExhausted, SlotError, SlotLeased
from equipoise.hal.slots import Lease, Reader
from equipoise.hal.stream import Event, Role

MAX_READER_STEPS = 12
"""Steps of a program after those that attach: only later calls are ordered."""
STREAM = st.sampled_from(SLOT_ROLES[:2])


def _reader_programs(traits: Traits) -> st.SearchStrategy[Program]:
    reads = ("look", "replay") if traits.accelerator.graph_capture else ("look",)
    changes, by_reader = st.sampled_from(("write", "commit")), st.sampled_from((*reads, "detach"))
    attach = st.builds(lambda role: Step("attach", (role,)), STREAM)
    steps = st.one_of(
        st.builds(lambda op, role: Step(op, (role,)), changes, STREAM),
        st.builds(lambda op, reader: Step(op, (reader,)), by_reader, st.integers(0, 2)),
    )
    return st.builds(
        lambda first, then: make_program(_valid_reader_steps([*first, *then])),
        st.lists(attach, min_size=1, max_size=3),
        st.lists(steps, min_size=1, max_size=MAX_READER_STEPS),
    )


def _valid_reader_steps(steps: list[Step]) -> list[Step]:
    """Readers are named by their place among those that are attached, of which there are some."""
    attached, valid = 0, []
    for step in steps:
        if isinstance(step.args[0], int):
            if not attached:
                continue
            step = Step(step.op, (step.args[0] % attached,))
        attached += {"attach": 1, "detach": -1}.get(step.op, 0)
        valid.append(step)
    return valid


@dataclass
class _AttachedReaderRunner:
    """One slot of one byte, which cannot be torn: a wrong read is a read in the wrong order.

    A stream may be attached more than once.
    """

    fixture: SlotStoreFixture
    version: int = 0
    readers: list[tuple[str, Reader]] = field(default_factory=list)
    expected_reads: list[tuple[str, Tensor, int]] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)

    def run_step(self, number: int, step: Step) -> None:
        """Make one call."""
        if step.op == "attach":
            self.attach(str(step.args[0]))
        elif step.op == "detach":
            self.detach(number, int(step.args[0]))
        elif step.op in ("look", "replay"):
            self.read(number, step.op, self.readers[int(step.args[0])][0])
        else:
            self.change(number, step.op, str(step.args[0]))

    def attach(self, role: str) -> None:
        reader = self.fixture.store.attach(self.fixture.ctx.accelerator.stream(Role(role)))
        self.readers.append((role, reader))

    def detach(self, number: int, position: int) -> None:
        """Detach right after a last read, which is still waited for."""
        role, reader = self.readers.pop(position)
        self.read(number, "look", role)
        reader.detach()

    def read(self, number: int, op: str, role: str) -> None:
        blob = self.fixture.read_in_launch([0], role) if op == "look" else self.replay(role)
        self.expected_reads.append((f"step {number}: {role}", blob, self.version))

    def replay(self, role: str) -> Tensor:
        """What a graph replayed on the stream reads, which was captured at once before."""
        graph, stream = self.fixture.ctx.accelerator.graph(), self.fixture.stream(role)
        (view,), blob = self.fixture.segment_views(0), self.fixture.ctx.empty((1,))
        graph.capture(stream, lambda: stream.launch(lambda: blob.copy_(view)))
        graph.replay(stream)
        self.graphs.append(graph)
        return blob

    def change(self, number: int, op: str, role: str) -> None:
        if op == "write":
            self.fixture.write([0], number, role)
        else:
            self.fixture.unpack([number], number, role)
            self.fixture.store.commit([(number, 0)], self.fixture.stream(role))
        self.version = number


def _play_readers(ctx: RankContext, program: Program) -> Play:
    runner = _AttachedReaderRunner(make_plain_slot_store(ctx, 1, len(program.steps) + 1, 1))
    for number, step in enumerate(program.steps, start=1):
        runner.run_step(number, step)
        yield NEXT
    ctx.drain()
    for what, blob, version in runner.expected_reads:
        versions = versions_in(blob)
        require(
            "A12", versions == [version], f"{what} read version {versions[0]}, {version} was due"
        )


READERS = (
    Property(
        name="attached-readers-and-commits-keep-the-order-of-issue",
        family="addresses",
        clauses=("A12",),
        claim="A commit comes after what readers launched before it, and before what comes later.",
        programs=_reader_programs,
        play=_play_readers,
    ),
)


MAX_LEASE_STEPS = 12
"""Steps of a program."""
SLOTS = 2
SLOT_SETS = 3
"""Sets of slots that are not empty."""
ROLE = SLOT_ROLES[1]


def _lease_programs(_: Traits) -> st.SearchStrategy[Program]:
    ops = st.sampled_from(("lease", "commit", "write", "release"))
    steps = st.builds(lambda op, number: Step(op, (number,)), ops, st.integers(0, SLOT_SETS - 1))
    return st.lists(steps, min_size=1, max_size=MAX_LEASE_STEPS).map(
        lambda steps: make_program(_valid_lease_steps(steps))
    )


def _valid_lease_steps(steps: list[Step]) -> list[Step]:
    """Releases name one of the leases that were taken so far; it may have been released before.

    Everything else names a set of slots: that of the bits of its argument plus one.
    """
    lease_count, valid = 0, []
    for step in steps:
        lease_count += step.op == "lease"
        if step.op != "release":
            valid.append(step)
        elif lease_count:
            valid.append(Step("release", (int(step.args[0]) % lease_count,)))
    return valid


@dataclass
class _LeaseRunner:
    """Leases, and operations that must be refused while one of their slots is leased."""

    fixture: SlotStoreFixture
    expected_versions: list[int] = field(default_factory=lambda: [0] * SLOTS)
    leases: list[Lease] = field(default_factory=list)
    leased_slots: list[set[int]] = field(default_factory=list)
    packs: list[tuple[int, Tensor, list[int]]] = field(default_factory=list)

    def run_step(self, number: int, step: Step) -> None:
        """Make one call; then pack the slots, which no lease forbids."""
        operand = int(step.args[0])
        slots = [slot for slot in range(SLOTS) if operand + 1 >> slot & 1]
        if step.op == "release":
            self.leases[operand].release()
            self.leased_slots[operand] = set()
        elif step.op == "lease":
            self.lease(slots)
        else:
            self.change(number, step.op, slots)
        self.packs.append(
            (number, self.fixture.pack(range(SLOTS), ROLE), list(self.expected_versions))
        )

    def lease(self, slots: list[int]) -> None:
        lease = self.fixture.store.lease(slots)
        self.leases.append(lease)
        self.leased_slots.append(set(slots))
        require("A11", list(lease.slots) == slots, f"a lease of {slots} says {lease.slots}")

    def change(self, number: int, op: str, slots: list[int]) -> None:
        leased = sorted(set.union(set(), *self.leased_slots) & set(slots))
        operation = self.write if op == "write" else self.commit
        refusal = catch(lambda: operation(number, slots), SlotLeased)
        what = f"step {number}: {op} to slots {slots} while {leased or 'none'} of them are leased"
        require("A11", (refusal is not None) == bool(leased), f"{what}: {refusal or 'no error'}")
        if not leased:
            self.expected_versions = [
                number if slot in slots else old for slot, old in enumerate(self.expected_versions)
            ]

    def write(self, number: int, slots: list[int]) -> None:
        self.fixture.write(slots, number, ROLE)

    def commit(self, number: int, slots: list[int]) -> None:
        self.fixture.unpack(slots, number, ROLE)
        self.fixture.store.commit([(slot, slot) for slot in slots], self.fixture.stream(ROLE))


def _play_leases(ctx: RankContext, program: Program) -> Play:
    runner = _LeaseRunner(make_plain_slot_store(ctx, SLOTS, SLOTS, 1))
    for number, step in enumerate(program.steps, start=1):
        runner.run_step(number, step)
        yield NEXT
    for slot in range(SLOTS):
        runner.change(len(program.steps) + 1, "write", [slot])
    ctx.drain()
    for number, blob, expected in runner.packs:
        what = f"after step {number} the slots hold versions {blob.tolist()}, not {expected}"
        require("A11", blob.tolist() == expected, what)


LEASES = (
    Property(
        name="writes-to-a-leased-slot-are-refused",
        family="addresses",
        clauses=("A11",),
        claim="Commits and writes to a leased slot are refused, whole, until its last release.",
        programs=_lease_programs,
        play=_play_leases,
    ),
)


MAX_PAGE_STEPS = 10
"""Steps of a program: at most as many slots are written."""
PAGE_BYTES = 8
"""Bytes of a page and of a slot."""


def _page_programs(_: Traits) -> st.SearchStrategy[Program]:
    copy = st.builds(lambda role: Step("copy", (role,)), st.sampled_from(SLOT_ROLES))
    steps = st.one_of(st.just(Step("take")), copy, st.just(Step("give_back")))
    return st.lists(steps, min_size=1, max_size=MAX_PAGE_STEPS).map(
        lambda steps: make_program(_valid_page_steps(steps))
    )


def _valid_page_steps(steps: list[Step]) -> list[Step]:
    """Only a page that was taken can be copied or given back."""
    has_page, valid = False, []
    for step in steps:
        if step.op == "take" or has_page:
            has_page = step.op != "give_back"
            valid.append(step)
    return valid


@dataclass
class _PageRunner:
    """Takes the only page, fills it, copies from it, and gives it back after the last copy.

    Attributes:
        page: the page in hand.
        version: what it was filled with.
        last_copy: recorded after the last copy that reads it.
        expected_versions: the version of each copy.
    """

    fixture: SlotStoreFixture
    pool: HostPool
    page: Page | None = None
    version: int = 0
    last_copy: Event | None = None
    expected_versions: list[int] = field(default_factory=list)

    def run_step(self, number: int, step: Step) -> None:
        """Make one call."""
        if step.op == "take":
            self.take(number)
        elif self.page is not None and step.op == "copy":
            self.copy(self.page, str(step.args[0]))
        elif self.page is not None:
            self.give_back(self.page)

    def take(self, number: int) -> None:
        """The page is filled at once: if a copy still reads it, that copy shows it."""
        if self.page is not None:
            refusal = catch(lambda: self.pool.take(0.0), PoolExhausted)
            require("A13", refusal, f"step {number}: the page in hand was handed out again")
            return
        self.page = self.pool.take(self.fixture.ctx.timeout)
        self.page.data.fill_(number)
        self.version, self.last_copy = number, None

    def copy(self, page: Page, role: str) -> None:
        """Into its own slot, after the page's earlier copies."""
        stream = self.fixture.stream(role)
        if self.last_copy is not None:
            stream.wait(self.last_copy)
        self.fixture.store.write([len(self.expected_versions)], [[page.data]], stream)
        self.expected_versions.append(self.version)
        self.last_copy = self.fixture.ctx.accelerator.event()
        stream.record(self.last_copy)

    def give_back(self, page: Page) -> None:
        """Once."""
        page.give_back(self.last_copy)
        self.page = None
        again = catch(lambda: page.give_back(None), SlotError)
        require("A13", again, f"the page of version {self.version} could be given back twice")


def _play_pages(ctx: RankContext, program: Program) -> Play:
    place = make_plain_slot_store(ctx, MAX_PAGE_STEPS, 0, PAGE_BYTES)
    runner = _PageRunner(place, ctx.accelerator.host_pool(PAGE_BYTES, 1))
    for number, step in enumerate(program.steps, start=1):
        runner.run_step(number, step)
        yield NEXT
    ctx.drain()
    for slot, version in enumerate(runner.expected_versions):
        versions = versions_in(place.read_slot(slot))
        what = f"copy {slot} read version {format_versions(versions)} of its page, not {version}"
        require("A13", versions == [version], what)


PAGES = (
    Property(
        name="a-page-is-not-handed-out-under-a-copy",
        family="addresses",
        clauses=("A13",),
        claim="A page of the host pool comes back only when the copies that read it have ended.",
        programs=_page_programs,
        play=_play_pages,
    ),
)
