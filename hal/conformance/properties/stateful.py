"""What one accelerator is due to show, whatever its streams do: the oracle of the machine.

Everything one accelerator has, at work at once, with the ledger saying what is due.

The rule-based machine: hypothesis composes programs for everything that an accelerator has.
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
from equipoise.hal.conformance.program import Argument, Case, Program, Step, program
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

    MOVER = "mover"
    """The mover's; no stream waits."""
    WAITED = "waited"
    """The mover's; a stream waits, and so does whatever waits for that stream."""
    SIGNED = "signed"
    """Signalled, and nobody has acquired it."""
    PASSED = "passed"
    """Signalled, acquired and released: the mover may wait for it."""


@dataclass
class SystemModel:
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

    order: HappensBefore = field(default_factory=HappensBefore)
    versions: dict[BufferKey, int] = field(default_factory=dict)
    writers: dict[BufferKey, int] = field(default_factory=dict)
    looks: dict[int, list[int]] = field(default_factory=dict)
    attached: Counter[str] = field(default_factory=Counter)
    leases: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    turn: LockTurn = LockTurn.MOVER
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

    def bring(self, number: int, buffer: BufferKey, role: str) -> None:
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
        self.turn = LockTurn.PASSED if self.turn is LockTurn.WAITED else LockTurn.SIGNED

    def acquire(self) -> None:
        """A stream acquires, reads and releases; before the signal it waits."""
        self.turn = LockTurn.PASSED if self.turn is LockTurn.SIGNED else LockTurn.WAITED

    def join(self, first: str, second: str) -> None:
        """A stream waits for all that another one was given so far."""
        self.order.record(0, first)
        self.order.wait(second, 0)

    def rest(self) -> None:
        """The host has waited for every stream."""
        for role in SLOT_ROLES:
            for launch in range(len(self.order.launches)):
                self.order.follow(role, launch)

    def _verb(self, buffer: BufferKey, role: str) -> int:
        """A launch behind the last write of what it touches (V5)."""
        if buffer in self.writers:
            self.order.follow(role, self.writers[buffer])
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
        place: a slot store.
        pool: the host pool.
        event: the one that streams wait for each other with.
        ledger: what is due.
        due: clause, words, where the bytes of a read land, and the version they are due to be.
        signed: the version that the mover signed last.
        waiting: a read under the lock for which nothing was signed yet.
    """

    place: SlotStoreFixture
    pool: HostPool
    event: Event
    ledger: SystemModel = field(default_factory=SystemModel)
    due: list[tuple[str, str, Tensor, int]] = field(default_factory=list)
    routed: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)
    readers: dict[str, list[Reader]] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    pages: dict[int, Page] = field(default_factory=dict)
    copies: dict[int, Event] = field(default_factory=dict)
    lock: StreamLock | None = None
    cell: Tensor | None = None
    signed: int = 0
    waiting: tuple[str, Tensor] | None = None
    tables: Tables | None = None

    # ----- slots ---------------------------------------------------------------------------------

    def unpack(self, number: int, buffer: int, role: str) -> None:
        """A version arrives in staging."""
        self.place.unpack([buffer], number, role)
        self.ledger.bring(number, ("staging", buffer), role)

    def commit(self, number: int, buffer: int, slot: int, role: str) -> None:
        """Staging goes to a slot."""
        stream = self.place.stream(role)
        refusal = catch(lambda: self.place.store.commit([(buffer, slot)], stream), SlotLeased)
        self.refused(number, slot, refusal)
        self.ledger.commit(buffer, slot, role)

    def write(self, number: int, slot: int, role: str) -> None:
        """A version goes to a slot."""
        refusal = catch(lambda: self.place.write([slot], number, role), SlotLeased)
        self.refused(number, slot, refusal)
        self.ledger.write(number, slot, role)

    def pack(self, number: int, slot: int, role: str) -> None:
        """The slot as a verb reads it."""
        blob = self.place.pack([slot], role)
        self.due.append(("V5", f"step {number}, pack on {role}", blob, self.ledger.slot(slot)))
        self.ledger.pack(slot, role)

    def look(self, number: int, slot: int, role: str) -> None:
        """The slot as a launch reads it, of an attached stream or of one that has waited."""
        clause = "A12" if self.ledger.attached[role] else "V1"
        blob = self.place.look([slot], role)
        self.due.append((clause, f"step {number}, look on {role}", blob, self.ledger.slot(slot)))
        self.ledger.look(slot, role)

    def attach(self, _: int, role: str) -> None:
        """What is in flight ends first: only what is issued from now on is ordered."""
        self.place.bench.drain()
        reader = self.place.store.attach(self.place.bench.accelerator.stream(Role(role)))
        self.readers.setdefault(role, []).append(reader)
        self.ledger.attach(role)

    def detach(self, _: int, role: str) -> None:
        """The stream's first reader goes."""
        self.readers[role].pop(0).detach()
        self.ledger.detach(role)

    def lease(self, _: int, slot: int) -> None:
        """A peer reads the slot."""
        self.leases.append(self.place.store.lease([slot]))
        self.ledger.leases.append(slot)

    def release(self, _: int, lease: int) -> None:
        """The peer has read, and may say so again."""
        self.leases[lease].release()
        self.ledger.leases[lease] = -1

    def refused(self, number: int, slot: int, refusal: Exception | None) -> None:
        """Whether a verb was refused as it should be."""
        state = "leased" if self.ledger.leased(slot) else "not leased"
        right = (refusal is not None) == self.ledger.leased(slot)
        require("A11", right, f"step {number}: slot {slot} is {state}, and {refusal or 'no error'}")

    # ----- events and pages ----------------------------------------------------------------------

    def join(self, _: int, first: str, second: str) -> None:
        """The second stream waits for what the first was given so far; the event is used again."""
        self.place.bench.accelerator.stream(Role(first)).record(self.event)
        self.place.bench.accelerator.stream(Role(second)).wait(self.event)
        self.ledger.join(first, second)

    def take(self, number: int) -> None:
        """A page, written at once: a copy that still reads it shows it."""
        self.pages[number] = self.pool.take(self.place.bench.patience)
        self.pages[number].data.fill_(number)
        self.ledger.pages.append(number)

    def copy(self, number: int, page: int, slot: int, role: str) -> None:
        """The page goes to a slot, behind the page's earlier copies."""
        stream, data = self.place.stream(role), self.pages[page].data
        if page in self.copies:
            stream.wait(self.copies[page])
        refusal = catch(lambda: self.place.store.write([slot], [[data]], stream), SlotLeased)
        self.refused(number, slot, refusal)
        self.copies[page] = self.place.bench.accelerator.event()
        stream.record(self.copies[page])
        self.ledger.write(page, slot, role)

    def give_back(self, _: int, page: int) -> None:
        """The page may be handed out again once its last copy has ended."""
        self.pages.pop(page).give_back(self.copies.get(page))
        self.ledger.pages.remove(page)

    # ----- the stream lock -----------------------------------------------------------------------

    def sign(self, number: int) -> None:
        """The mover writes the memory under the lock, when it has it, and signals."""
        lock, cell = self.locked()
        if self.ledger.turn is LockTurn.PASSED:
            lock.wait(lock.epoch, self.place.bench.patience)
        cell.fill_(number)
        lock.signal(lock.epoch)
        self.signed = number
        if self.waiting is not None:
            self.due.append(("L7", *self.waiting, number))
            self.waiting = None
        self.ledger.sign()

    def acquire(self, number: int, role: str) -> None:
        """A stream reads the memory under the lock, and releases."""
        (lock, cell), stream = self.locked(), self.place.stream(role)
        blob = self.place.bench.empty((ITEM_BYTES,))
        lock.acquire(stream)
        # Not blocking: the host must not wait for a stream that waits for its signal.
        stream.launch(lambda: blob.copy_(cell, non_blocking=True))
        lock.release(stream)
        read = f"step {number}, acquire on {role}", blob
        if self.ledger.turn is LockTurn.SIGNED:
            self.due.append(("L7", *read, self.signed))
        else:
            self.waiting = read
        self.ledger.acquire()

    def renew(self, number: int) -> None:
        """A new epoch, in which the mover of the old one can do nothing."""
        lock, _cell = self.locked()
        old = lock.epoch
        lock.drain(self.place.bench.patience)
        late = catch(lambda: lock.signal(old), EquipoiseError)
        require("L3", isinstance(late, StaleEpoch), f"step {number}: a late signal, and {late!r}")
        self.ledger.turn = LockTurn.MOVER

    def locked(self) -> tuple[StreamLock, Tensor]:
        """The lock and what is under it: host memory that the mover writes."""
        bench = self.place.bench
        if self.lock is None or self.cell is None:
            self.lock = bench.accelerator.stream_lock(bench.deadline)
            self.cell = bench.accelerator.pinned(ITEM_BYTES)
        return self.lock, self.cell

    # ----- tables --------------------------------------------------------------------------------

    def install(self, _: int, which: int) -> None:
        """One of the placements becomes the one that is routed by."""
        device = self.place.bench.accelerator
        if self.tables is None:
            self.tables = Tables.empty(1, 2, 2, 1, device.device)
        rows = [[0, 1, 2], list(PLACEMENTS[which]), [FULL_SHARE, FULL_SHARE]]
        parts = [torch.tensor([row], dtype=torch.int32) for row in rows]
        self.place.kept += parts
        device.kernels.commit_tables(
            TableUpdate((0,), *parts), self.tables, self.place.stream(ROUTER_ROLE)
        )
        self.ledger.tables = which

    def route(self, _: int) -> None:
        """Both experts are routed."""
        bench, tables = self.place.bench, self.tables
        ids = bench.of(torch.tensor([0, 1], dtype=torch.int32))
        slots, counts = (bench.empty((2,), torch.int32) for _ in range(2))
        self.place.kept.append(ids)
        assert tables is not None
        assert self.ledger.tables is not None
        bench.accelerator.kernels.route_and_count(
            ids, tables, Salt(0, 0, 0), slots, counts, self.place.stream(ROUTER_ROLE)
        )
        self.routed.append((slots, counts, self.ledger.tables))

    # ----- the end -------------------------------------------------------------------------------

    def end(self, number: int) -> None:
        """Nobody is left waiting; then everything that was read is judged."""
        if self.ledger.turn is LockTurn.WAITED:
            self.sign(number)
        for slot in range(SLOTS):
            self.pack(number, slot, ROUTER_ROLE)
        self.place.bench.drain()
        for clause, what, blob, version in self.due:
            seen = versions_in(blob)
            require(
                clause, seen == [version], f"{what}: version {format_versions(seen)}, not {version}"
            )
        for slots, counts, which in self.routed:
            seen, wanted = slots.tolist(), list(PLACEMENTS[which])
            require("G2", seen == wanted, f"routed to slots {seen}, installed were {wanted}")
            require("G2", counts.tolist() == [1, 1], f"counted {counts.tolist()}, not 1 each")


def play_system(bench: RankContext, found: Program) -> Play:
    """Every step is the name of a method."""
    place = make_plain_slot_store(bench, SLOTS, STAGING, ITEM_BYTES)
    pool, event = bench.accelerator.host_pool(ITEM_BYTES, PAGES), bench.accelerator.event()
    shop = SystemRunner(place, pool, event)
    for number, step in enumerate(found.steps, start=1):
        getattr(shop, step.op)(number, *step.args)
        yield NEXT
    shop.end(len(found.steps) + 1)


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
    return lambda self: self.traits.accelerator.stream_lock and self.ledger.turn in turns


def no_stream_waits_for_host(self: "AcceleratorStateMachine") -> bool:
    """Whether the host may wait for streams: none of them waits for the host."""
    return self.ledger.turn is not LockTurn.WAITED


class AcceleratorStateMachine(RuleBasedStateMachine):
    """Each rule is a call; what the ledger says cannot be made is left out.

    The case is played at the end, as data, and not call by call while it is composed: so real
    devices, on which a race shows once and not again, can be searched and shrunk like all others.
    """

    arrived = Bundle("arrived")
    leases = Bundle("leases")
    pages = Bundle("pages")

    def __init__(self, traits: Traits, played: PlayCase) -> None:
        super().__init__()
        self.traits = traits
        self.ledger = SystemModel()
        self._played = played
        self._steps: list[Step] = []
        self._schedule = b""

    def note(self, op: str, *args: Argument) -> int:
        """The call is a step of the program; its number."""
        self._steps.append(Step(op, args))
        return len(self._steps)

    def teardown(self) -> None:
        """Play what was composed."""
        if self._steps:
            self._played(Case(program(self._steps), self._schedule))

    @initialize(schedule=schedules(MAX_STATEFUL_CHOICES))
    def choose(self, schedule: bytes) -> None:
        """Who moves next, where somebody decides it."""
        self._schedule = schedule

    def clear(self, slot: int, role: str) -> None:
        """Let the stream wait for strangers that look at the slot: a verb would not."""
        for stranger in self.ledger.strangers(role, slot):
            self.join(stranger, role)

    @rule(target=arrived, buffer=BUFFER, role=STREAM)
    def unpack(self, buffer: int, role: str) -> int:
        """A version arrives in staging."""
        self.ledger.bring(self.note("unpack", buffer, role), ("staging", buffer), role)
        return buffer

    @rule(buffer=arrived, slot=SLOT, role=STREAM)
    def commit(self, buffer: int, slot: int, role: str) -> None:
        """Staging goes to a slot."""
        self.clear(slot, role)
        self.note("commit", buffer, slot, role)
        self.ledger.commit(buffer, slot, role)

    @rule(slot=SLOT, role=STREAM)
    def write(self, slot: int, role: str) -> None:
        """A version goes to a slot."""
        self.clear(slot, role)
        self.ledger.write(self.note("write", slot, role), slot, role)

    @rule(slot=SLOT, role=STREAM)
    def pack(self, slot: int, role: str) -> None:
        """A verb reads a slot."""
        self.note("pack", slot, role)
        self.ledger.pack(slot, role)

    @rule(slot=SLOT, role=STREAM)
    def look(self, slot: int, role: str) -> None:
        """A launch reads a slot."""
        if self.ledger.settled(role, slot):
            self.note("look", slot, role)
            self.ledger.look(slot, role)

    @precondition(
        lambda self: no_stream_waits_for_host(self) and self.ledger.attached.total() < MAX_READERS
    )
    @rule(role=STREAM)
    def attach(self, role: str) -> None:
        """A stream becomes a reader."""
        self.note("attach", role)
        self.ledger.attach(role)

    @precondition(lambda self: bool(self.ledger.attached))
    @rule(role=STREAM)
    def detach(self, role: str) -> None:
        """A reader leaves."""
        if self.ledger.attached[role]:
            self.note("detach", role)
            self.ledger.detach(role)

    @rule(target=leases, slot=SLOT)
    def lease(self, slot: int) -> int:
        """A peer reads a slot."""
        self.note("lease", slot)
        self.ledger.leases.append(slot)
        return len(self.ledger.leases) - 1

    @rule(lease=leases)
    def release(self, lease: int) -> None:
        """The peer has read; it may say so again."""
        self.note("release", lease)
        self.ledger.leases[lease] = -1

    @rule(first=STREAM, second=STREAM)
    def join(self, first: str, second: str) -> None:
        """A stream waits for an event that is recorded on another."""
        self.note("join", first, second)
        self.ledger.join(first, second)

    @precondition(lambda self: no_stream_waits_for_host(self) and len(self.ledger.pages) < PAGES)
    @rule(target=pages)
    def take(self) -> int:
        """A page of the host pool."""
        number = self.note("take")
        self.ledger.pages.append(number)
        return number

    @rule(page=pages, slot=SLOT, role=STREAM)
    def copy(self, page: int, slot: int, role: str) -> None:
        """A page goes to a slot."""
        self.clear(slot, role)
        self.note("copy", page, slot, role)
        self.ledger.write(page, slot, role)

    @rule(page=consumes(pages))
    def give_back(self, page: int) -> None:
        """A page goes back to the pool."""
        self.note("give_back", page)
        self.ledger.pages.remove(page)

    @precondition(lock_turn_is((LockTurn.MOVER, LockTurn.WAITED, LockTurn.PASSED)))
    @rule()
    def sign(self) -> None:
        """The mover signals, once it has the memory."""
        self.note("sign")
        self.ledger.sign()

    @precondition(lock_turn_is((LockTurn.MOVER, LockTurn.SIGNED)))
    @rule(role=STREAM)
    def acquire(self, role: str) -> None:
        """A stream reads under the lock."""
        self.note("acquire", role)
        self.ledger.acquire()

    @precondition(lock_turn_is((LockTurn.SIGNED, LockTurn.PASSED)))
    @rule()
    def renew(self) -> None:
        """The lock begins a new epoch."""
        self.note("renew")
        self.ledger.turn = LockTurn.MOVER

    @rule(which=st.integers(0, 1))
    def install(self, which: int) -> None:
        """New tables."""
        self.note("install", which)
        self.ledger.tables = which
        self.ledger.order.launch(ROUTER_ROLE)

    @precondition(lambda self: self.ledger.tables is not None)
    @rule()
    def route(self) -> None:
        """A routing pass."""
        self.note("route")
        self.ledger.order.launch(ROUTER_ROLE)


PROPERTIES = (
    Property(
        name="everything-at-once-shows-what-is-due",
        family="visibility",
        clauses=("V5", "V1", "A11", "A12", "L3", "L7", "G2"),
        claim="Streams, events, slots, readers, leases, pages, lock and tables do not disturb "
        "each other.",
        programs=StatefulPrograms(AcceleratorStateMachine),
        play=play_system,
    ),
)
