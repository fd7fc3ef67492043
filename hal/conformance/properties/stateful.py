"""Family *visibility*: a rule-based state machine over everything that an accelerator has.

Hypothesis composes the programs; `SystemModel` computes what every read must see.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    precondition,
    rule,
)
from torch import Tensor

from equipoise.hal.accelerator import HostPool, Page
from equipoise.hal.conformance.context import NEXT, Play, RankContext, catch, require
from equipoise.hal.conformance.fixtures.happens_before import HappensBefore
from equipoise.hal.conformance.fixtures.slot_store import (
    SLOT_ROLES,
    SlotStoreFixture,
    format_versions,
    make_plain_slot_store,
    versions_in,
)
from equipoise.hal.conformance.fixtures.strategies import schedules
from equipoise.hal.conformance.program import Argument, Case, Program, Step, make_program
from equipoise.hal.conformance.property import Property, StatefulPrograms, Traits
from equipoise.hal.errors import EquipoiseError, SlotLeased, StaleEpoch
from equipoise.hal.kernels import Salt, Tables, TableUpdate
from equipoise.hal.lock import StreamLock
from equipoise.hal.slots import Lease, Reader
from equipoise.hal.stream import Event, Role

SLOTS = 2
STAGING = 2
PAGES = 2
BufferKey = tuple[str, int]
"""A slot or a staging buffer, by number."""


class LockTurn(StrEnum):
    """Whose the stream lock's memory is."""

    WRITER = "writer"
    """Owned by the writer; no stream waits."""
    READER_WAITS = "waited"
    """Owned by the writer; a stream waits, and so do streams that wait for it."""
    SIGNALLED = "signed"
    """Signalled, not acquired yet."""
    READER_RELEASED = "passed"
    """Signalled, acquired and released: the writer may wait for it."""


@dataclass
class SystemModel:
    """Follows the calls one by one; computes which are possible, and what each read must see.

    Versions are numbers of the steps that brought them; 0 is what was there at first.

    Attributes:
        order: the launches that must have run before each launch.
        versions: of slots and staging buffers, in the order of issue (V5).
        writers: the launch that last wrote a buffer.
        unattached_reads: launches of streams that were not attached, by the slot they read.
        attached: how many readers each stream has.
        leases: the slot of each lease that was taken; -1 once it was released.
        pages: the pages in hand, by the steps that took them.
        lock_turn: state of the stream lock.
        tables: which of the two placements is installed; None before the first.
    """

    order: HappensBefore = field(default_factory=HappensBefore)
    versions: dict[BufferKey, int] = field(default_factory=dict)
    writers: dict[BufferKey, int] = field(default_factory=dict)
    unattached_reads: dict[int, list[int]] = field(default_factory=dict)
    attached: Counter[str] = field(default_factory=Counter)
    leases: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    lock_turn: LockTurn = LockTurn.WRITER
    tables: int | None = None

    def slot(self, slot: int) -> int:
        """The version that a read of the slot must see now."""
        return self.versions.get(("slot", slot), 0)

    def leased(self, slot: int) -> bool:
        """Whether it may not be written."""
        return slot in self.leases

    def may_read(self, role: str, slot: int) -> bool:
        """Whether a launch on the stream may read the slot: its last write comes before."""
        writer = self.writers.get(("slot", slot))
        return writer is None or self.order.is_ordered_after(role, writer)

    def unattached_readers(self, role: str, slot: int) -> list[str]:
        """Streams that were not attached and still look at the slot, as far as `role` knows."""
        reads = [
            look
            for look in self.unattached_reads.get(slot, [])
            if not self.order.is_ordered_after(role, look)
        ]
        return sorted({self.order.launches[look][0] for look in reads})

    def store_version(self, number: int, buffer: BufferKey, role: str) -> None:
        """An operation on the stream writes a version of its own."""
        writer = self._slot_op(buffer, role)
        self.versions[buffer], self.writers[buffer] = number, writer
        for reader in self.attached:
            if buffer[0] == "slot":
                self.order.order_after(reader, writer)

    def commit(self, staging: int, slot: int, role: str) -> None:
        """Staging goes to a slot; a leased slot stays as it is."""
        if not self.leased(slot):
            self._slot_op(("staging", staging), role)
            self.store_version(self.versions["staging", staging], ("slot", slot), role)

    def write(self, number: int, slot: int, role: str) -> None:
        """A version goes to a slot; a leased slot stays as it is."""
        if not self.leased(slot):
            self.store_version(number, ("slot", slot), role)

    def pack(self, slot: int, role: str) -> None:
        """A store operation reads the slot, after its last write."""
        self._slot_op(("slot", slot), role)

    def look(self, slot: int, role: str) -> None:
        """A launch reads the slot; that of a stranger is not waited for."""
        launch = self.order.launch(role)
        if not self.attached[role]:
            self.unattached_reads.setdefault(slot, []).append(launch)

    def attach(self, role: str) -> None:
        """Everything has ended before; from now on the stream is waited for."""
        self.synchronize_all()
        self.attached[role] += 1

    def detach(self, role: str) -> None:
        """One reader less."""
        self.attached -= Counter([role])

    def sign(self) -> None:
        """The writer has waited for its turn and signalled: the waiting stream continues."""
        self.lock_turn = (
            LockTurn.READER_RELEASED
            if self.lock_turn is LockTurn.READER_WAITS
            else LockTurn.SIGNALLED
        )

    def acquire(self) -> None:
        """A stream acquires, reads and releases; before the signal it waits."""
        self.lock_turn = (
            LockTurn.READER_RELEASED
            if self.lock_turn is LockTurn.SIGNALLED
            else LockTurn.READER_WAITS
        )

    def join(self, first: str, second: str) -> None:
        """A stream waits for all that was launched on another one so far."""
        self.order.record(0, first)
        self.order.wait(second, 0)

    def synchronize_all(self) -> None:
        """The host has waited for every stream."""
        for role in SLOT_ROLES:
            for launch in range(len(self.order.launches)):
                self.order.order_after(role, launch)

    def _slot_op(self, buffer: BufferKey, role: str) -> int:
        """A launch after the last write of what it touches (V5)."""
        if buffer in self.writers:
            self.order.order_after(role, self.writers[buffer])
        return self.order.launch(role)


ITEM_BYTES = 4
"""Bytes of a slot, of a page, and of the memory under the stream lock."""
ROUTER_ROLE = SLOT_ROLES[0]
"""The stream that routes, and that new tables are installed on (clause G2)."""
PLACEMENTS = ((0, 1), (1, 0))
"""Two ways to put two experts into two slots."""
FULL_SHARE = 65536
"""The share of an expert that has one replica."""


@dataclass
class SystemRunner:
    """Makes the calls of a program, one method each; `number` is that of the step, from 1.

    Attributes:
        fixture: a slot store.
        pool: the host pool.
        event: the one that streams wait for each other with.
        model: computes the expected values.
        expected_reads: clause, description, where the bytes of a read land, expected version.
        signed_version: the version that the writer signed last.
        waiting_read: a read under the lock for which nothing was signed yet.
    """

    fixture: SlotStoreFixture
    pool: HostPool
    event: Event
    model: SystemModel = field(default_factory=SystemModel)
    expected_reads: list[tuple[str, str, Tensor, int]] = field(default_factory=list)
    routing_passes: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)
    readers: dict[str, list[Reader]] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    pages: dict[int, Page] = field(default_factory=dict)
    copy_events: dict[int, Event] = field(default_factory=dict)
    lock: StreamLock | None = None
    locked_memory: Tensor | None = None
    signed_version: int = 0
    waiting_read: tuple[str, Tensor] | None = None
    tables: Tables | None = None

    # ----- slots ---------------------------------------------------------------------------------

    def unpack(self, number: int, buffer: int, role: str) -> None:
        """A version arrives in staging."""
        self.fixture.unpack([buffer], number, role)
        self.model.store_version(number, ("staging", buffer), role)

    def commit(self, number: int, buffer: int, slot: int, role: str) -> None:
        """Staging goes to a slot."""
        stream = self.fixture.stream(role)
        refusal = catch(lambda: self.fixture.store.commit([(buffer, slot)], stream), SlotLeased)
        self.check_refusal(number, slot, refusal)
        self.model.commit(buffer, slot, role)

    def write(self, number: int, slot: int, role: str) -> None:
        """A version goes to a slot."""
        refusal = catch(lambda: self.fixture.write([slot], number, role), SlotLeased)
        self.check_refusal(number, slot, refusal)
        self.model.write(number, slot, role)

    def pack(self, number: int, slot: int, role: str) -> None:
        """The slot as an operation reads it."""
        blob = self.fixture.pack([slot], role)
        self.expected_reads.append(
            ("V5", f"step {number}, pack on {role}", blob, self.model.slot(slot))
        )
        self.model.pack(slot, role)

    def look(self, number: int, slot: int, role: str) -> None:
        """The slot as a launch reads it, of an attached stream or of one that has waited."""
        clause = "A12" if self.model.attached[role] else "V1"
        blob = self.fixture.read_in_launch([slot], role)
        self.expected_reads.append(
            (clause, f"step {number}, look on {role}", blob, self.model.slot(slot))
        )
        self.model.look(slot, role)

    def attach(self, _: int, role: str) -> None:
        """What is in flight ends first: only what is issued from now on is ordered."""
        self.fixture.ctx.drain()
        reader = self.fixture.store.attach(self.fixture.ctx.accelerator.stream(Role(role)))
        self.readers.setdefault(role, []).append(reader)
        self.model.attach(role)

    def detach(self, _: int, role: str) -> None:
        """The stream's first reader goes."""
        self.readers[role].pop(0).detach()
        self.model.detach(role)

    def lease(self, _: int, slot: int) -> None:
        """A peer reads the slot."""
        self.leases.append(self.fixture.store.lease([slot]))
        self.model.leases.append(slot)

    def release(self, _: int, lease: int) -> None:
        """The peer has read, and may say so again."""
        self.leases[lease].release()
        self.model.leases[lease] = -1

    def check_refusal(self, number: int, slot: int, refusal: Exception | None) -> None:
        """Whether an operation was refused as it should be."""
        state = "leased" if self.model.leased(slot) else "not leased"
        right = (refusal is not None) == self.model.leased(slot)
        require("A11", right, f"step {number}: slot {slot} is {state}, and {refusal or 'no error'}")

    # ----- events and pages ----------------------------------------------------------------------

    def join(self, _: int, first: str, second: str) -> None:
        """The second stream waits for launches on the first so far; the event is reused."""
        self.fixture.ctx.accelerator.stream(Role(first)).record(self.event)
        self.fixture.ctx.accelerator.stream(Role(second)).wait(self.event)
        self.model.join(first, second)

    def take(self, number: int) -> None:
        """A page, written at once: a copy that still reads it shows it."""
        self.pages[number] = self.pool.take(self.fixture.ctx.timeout)
        self.pages[number].data.fill_(number)
        self.model.pages.append(number)

    def copy(self, number: int, page: int, slot: int, role: str) -> None:
        """Copy the page to a slot, after the page's earlier copies."""
        stream, data = self.fixture.stream(role), self.pages[page].data
        if page in self.copy_events:
            stream.wait(self.copy_events[page])
        refusal = catch(lambda: self.fixture.store.write([slot], [[data]], stream), SlotLeased)
        self.check_refusal(number, slot, refusal)
        self.copy_events[page] = self.fixture.ctx.accelerator.event()
        stream.record(self.copy_events[page])
        self.model.write(page, slot, role)

    def give_back(self, _: int, page: int) -> None:
        """The page may be handed out again once its last copy has ended."""
        self.pages.pop(page).give_back(self.copy_events.get(page))
        self.model.pages.remove(page)

    # ----- the stream lock -----------------------------------------------------------------------

    def sign(self, number: int) -> None:
        """The writer writes the memory under the lock, when it owns it, and signals."""
        lock, cell = self.lock_and_memory()
        if self.model.lock_turn is LockTurn.READER_RELEASED:
            lock.wait(lock.epoch, self.fixture.ctx.timeout)
        cell.fill_(number)
        lock.signal(lock.epoch)
        self.signed_version = number
        if self.waiting_read is not None:
            self.expected_reads.append(("L7", *self.waiting_read, number))
            self.waiting_read = None
        self.model.sign()

    def acquire(self, number: int, role: str) -> None:
        """A stream reads the memory under the lock, and releases."""
        (lock, cell), stream = self.lock_and_memory(), self.fixture.stream(role)
        blob = self.fixture.ctx.empty((ITEM_BYTES,))
        lock.acquire(stream)
        # Not blocking: the host must not wait for a stream that waits for its signal.
        stream.launch(lambda: blob.copy_(cell, non_blocking=True))
        lock.release(stream)
        waiting_read = f"step {number}, acquire on {role}", blob
        if self.model.lock_turn is LockTurn.SIGNALLED:
            self.expected_reads.append(("L7", *waiting_read, self.signed_version))
        else:
            self.waiting_read = waiting_read
        self.model.acquire()

    def renew(self, number: int) -> None:
        """A new epoch, in which the writer of the old one has no effect."""
        lock, _cell = self.lock_and_memory()
        old = lock.epoch
        lock.drain(self.fixture.ctx.timeout)
        late = catch(lambda: lock.signal(old), EquipoiseError)
        require("L3", isinstance(late, StaleEpoch), f"step {number}: a late signal, and {late!r}")
        self.model.lock_turn = LockTurn.WRITER

    def lock_and_memory(self) -> tuple[StreamLock, Tensor]:
        """The lock and the host memory under it, which the writer writes."""
        ctx = self.fixture.ctx
        if self.lock is None or self.locked_memory is None:
            self.lock = ctx.accelerator.stream_lock(ctx.deadline)
            self.locked_memory = ctx.accelerator.pinned(ITEM_BYTES)
        return self.lock, self.locked_memory

    # ----- tables --------------------------------------------------------------------------------

    def prepare_tables(self) -> None:
        """Make the tables, and every kernel ready for them while no stream is held: where a kernel
        is compiled and loaded with its first launch, that would wait for one."""
        device, stream = self.fixture.ctx.accelerator, self.fixture.stream(ROUTER_ROLE)
        self.tables = Tables.empty(1, 2, 2, 1, device.device)
        device.kernels.warm(self.tables, stream)
        self.fixture.ctx.drain()

    def install(self, _: int, placement: int) -> None:
        """One of the placements becomes the one that is routed by."""
        device = self.fixture.ctx.accelerator
        assert self.tables is not None
        rows = [[0, 1, 2], list(PLACEMENTS[placement]), [FULL_SHARE, FULL_SHARE]]
        parts = [torch.tensor([row], dtype=torch.int32) for row in rows]
        self.fixture.keepalive += parts
        device.kernels.commit_tables(
            TableUpdate((0,), *parts), self.tables, self.fixture.stream(ROUTER_ROLE)
        )
        self.model.tables = placement

    def route(self, _: int) -> None:
        """Both experts are routed."""
        ctx, tables = self.fixture.ctx, self.tables
        ids = ctx.copy_of(torch.tensor([0, 1], dtype=torch.int32))
        slots, counts = (ctx.empty((2,), torch.int32) for _ in range(2))
        self.fixture.keepalive.append(ids)
        assert tables is not None
        assert self.model.tables is not None
        ctx.accelerator.kernels.route_and_count(
            ids, tables, Salt(0, 0, 0), slots, counts, self.fixture.stream(ROUTER_ROLE)
        )
        self.routing_passes.append((slots, counts, self.model.tables))

    # ----- the end -------------------------------------------------------------------------------

    def end(self, number: int) -> None:
        """Nobody is left waiting; then everything that was read is judged."""
        if self.model.lock_turn is LockTurn.READER_WAITS:
            self.sign(number)
        for slot in range(SLOTS):
            self.pack(number, slot, ROUTER_ROLE)
        self.fixture.ctx.drain()
        for clause, what, blob, version in self.expected_reads:
            actual = versions_in(blob)
            require(
                clause,
                actual == [version],
                f"{what}: version {format_versions(actual)}, not {version}",
            )
        for slots, counts, placement in self.routing_passes:
            actual, expected = slots.tolist(), list(PLACEMENTS[placement])
            require(
                "G2", actual == expected, f"routed to slots {actual}, installed were {expected}"
            )
            require("G2", counts.tolist() == [1, 1], f"counted {counts.tolist()}, not 1 each")


def play_system(ctx: RankContext, program: Program) -> Play:
    """Every step is the name of a method."""
    place = make_plain_slot_store(ctx, SLOTS, STAGING, ITEM_BYTES)
    pool, event = ctx.accelerator.host_pool(ITEM_BYTES, PAGES), ctx.accelerator.event()
    runner = SystemRunner(place, pool, event)
    if any(step.op == "install" for step in program.steps):
        runner.prepare_tables()
    for number, step in enumerate(program.steps, start=1):
        getattr(runner, step.op)(number, *step.args)
        yield NEXT
    runner.end(len(program.steps) + 1)


# Mostly one slot and two streams: what never meets cannot disturb each other.
SLOT = st.sampled_from((*[0] * SLOTS, *range(SLOTS)))
BUFFER = st.integers(0, STAGING - 1)
STREAM = st.sampled_from((*SLOT_ROLES[:2], *SLOT_ROLES))
MAX_STATEFUL_CHOICES = 144
"""Choices that are drawn at most: programs are longer than those of other properties."""
MAX_READERS = 2
"""Readers at a time."""
PlayCase = Callable[[Case], None]


def lock_turn_is(turns: tuple[LockTurn, ...]) -> Callable[["AcceleratorStateMachine"], bool]:
    """Whether the device has a stream lock, which is at one of these turns."""
    return lambda self: self.traits.accelerator.stream_lock and self.model.lock_turn in turns


def no_stream_waits_for_host(self: "AcceleratorStateMachine") -> bool:
    """Whether the host may wait for streams: none of them waits for the host."""
    return self.model.lock_turn is not LockTurn.READER_WAITS


class AcceleratorStateMachine(RuleBasedStateMachine):
    """Each rule is a call; what the model says cannot be made is left out.

    The case is played at the end, as data, and not call by call while it is composed: so real
    devices, on which a race shows once and not again, can be searched and shrunk like all others.
    """

    arrived = Bundle("arrived")
    leases = Bundle("leases")
    pages = Bundle("pages")

    def __init__(self, traits: Traits, played: PlayCase) -> None:
        super().__init__()
        self.traits = traits
        self.model = SystemModel()
        self._played = played
        self._steps: list[Step] = []
        self._schedule = b""

    def add_step(self, op: str, *args: Argument) -> int:
        """The call is a step of the program; its number."""
        self._steps.append(Step(op, args))
        return len(self._steps)

    def teardown(self) -> None:
        """Play what was composed."""
        if self._steps:
            self._played(Case(make_program(self._steps), self._schedule))

    @initialize(schedule=schedules(MAX_STATEFUL_CHOICES))
    def choose(self, schedule: bytes) -> None:
        """The interleaving, where it is chosen."""
        self._schedule = schedule

    def wait_for_unattached_readers(self, slot: int, role: str) -> None:
        """Let the stream wait for strangers that look at the slot: an operation would not."""
        for stranger in self.model.unattached_readers(role, slot):
            self.join(stranger, role)

    @rule(target=arrived, buffer=BUFFER, role=STREAM)
    def unpack(self, buffer: int, role: str) -> int:
        """A version arrives in staging."""
        self.model.store_version(self.add_step("unpack", buffer, role), ("staging", buffer), role)
        return buffer

    @rule(buffer=arrived, slot=SLOT, role=STREAM)
    def commit(self, buffer: int, slot: int, role: str) -> None:
        """Staging goes to a slot."""
        self.wait_for_unattached_readers(slot, role)
        self.add_step("commit", buffer, slot, role)
        self.model.commit(buffer, slot, role)

    @rule(slot=SLOT, role=STREAM)
    def write(self, slot: int, role: str) -> None:
        """A version goes to a slot."""
        self.wait_for_unattached_readers(slot, role)
        self.model.write(self.add_step("write", slot, role), slot, role)

    @rule(slot=SLOT, role=STREAM)
    def pack(self, slot: int, role: str) -> None:
        """An operation reads a slot."""
        self.add_step("pack", slot, role)
        self.model.pack(slot, role)

    @rule(slot=SLOT, role=STREAM)
    def look(self, slot: int, role: str) -> None:
        """A launch reads a slot."""
        if self.model.may_read(role, slot):
            self.add_step("look", slot, role)
            self.model.look(slot, role)

    @precondition(
        lambda self: no_stream_waits_for_host(self) and self.model.attached.total() < MAX_READERS
    )
    @rule(role=STREAM)
    def attach(self, role: str) -> None:
        """A stream becomes a reader."""
        self.add_step("attach", role)
        self.model.attach(role)

    @precondition(lambda self: bool(self.model.attached))
    @rule(role=STREAM)
    def detach(self, role: str) -> None:
        """A reader leaves."""
        if self.model.attached[role]:
            self.add_step("detach", role)
            self.model.detach(role)

    @rule(target=leases, slot=SLOT)
    def lease(self, slot: int) -> int:
        """A peer reads a slot."""
        self.add_step("lease", slot)
        self.model.leases.append(slot)
        return len(self.model.leases) - 1

    @rule(lease=leases)
    def release(self, lease: int) -> None:
        """The peer has read; it may say so again."""
        self.add_step("release", lease)
        self.model.leases[lease] = -1

    @rule(first=STREAM, second=STREAM)
    def join(self, first: str, second: str) -> None:
        """A stream waits for an event that is recorded on another."""
        self.add_step("join", first, second)
        self.model.join(first, second)

    @precondition(lambda self: no_stream_waits_for_host(self) and len(self.model.pages) < PAGES)
    @rule(target=pages)
    def take(self) -> int:
        """A page of the host pool."""
        number = self.add_step("take")
        self.model.pages.append(number)
        return number

    @rule(page=pages, slot=SLOT, role=STREAM)
    def copy(self, page: int, slot: int, role: str) -> None:
        """A page goes to a slot."""
        self.wait_for_unattached_readers(slot, role)
        self.add_step("copy", page, slot, role)
        self.model.write(page, slot, role)

    @rule(page=consumes(pages))
    def give_back(self, page: int) -> None:
        """A page goes back to the pool."""
        self.add_step("give_back", page)
        self.model.pages.remove(page)

    @precondition(lock_turn_is((LockTurn.WRITER, LockTurn.READER_WAITS, LockTurn.READER_RELEASED)))
    @rule()
    def sign(self) -> None:
        """The writer signals, once it owns the memory."""
        self.add_step("sign")
        self.model.sign()

    @precondition(lock_turn_is((LockTurn.WRITER, LockTurn.SIGNALLED)))
    @rule(role=STREAM)
    def acquire(self, role: str) -> None:
        """A stream reads under the lock."""
        self.add_step("acquire", role)
        self.model.acquire()

    @precondition(lock_turn_is((LockTurn.SIGNALLED, LockTurn.READER_RELEASED)))
    @rule()
    def renew(self) -> None:
        """The lock begins a new epoch."""
        self.add_step("renew")
        self.model.lock_turn = LockTurn.WRITER

    @rule(placement=st.integers(0, 1))
    def install(self, placement: int) -> None:
        """New tables."""
        self.add_step("install", placement)
        self.model.tables = placement
        self.model.order.launch(ROUTER_ROLE)

    @precondition(lambda self: self.model.tables is not None)
    @rule()
    def route(self) -> None:
        """A routing pass."""
        self.add_step("route")
        self.model.order.launch(ROUTER_ROLE)


PROPERTIES = (
    Property(
        name="accelerator-state-machine-matches-its-model",
        family="visibility",
        clauses=("V5", "V1", "A11", "A12", "L3", "L7", "G2"),
        claim="Streams, events, slots, readers, leases, pages, lock and tables do not disturb "
        "each other.",
        programs=StatefulPrograms(AcceleratorStateMachine),
        play=play_system,
    ),
)
