"""Everything one accelerator has, at work at once, with the ledger saying what is due."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand
from equipoise.hal.conformance.ledger import PAGES, SLOTS, STAGING, Ledger, Turn
from equipoise.hal.conformance.program import Program
from equipoise.hal.conformance.shelf import ROLES, Shelf, listed, plain, versions
from equipoise.hal.errors import EquipoiseError, SlotLeased, StaleEpoch
from equipoise.hal.kernels import Salt, Tables, TableUpdate
from equipoise.hal.lock import StreamLock
from equipoise.hal.pool import HostPool, Page
from equipoise.hal.slots import Lease, Reader
from equipoise.hal.stream import Event, Role

WIDTH = 4
"""Bytes of a slot, of a page, and of the memory under the stream lock."""
ROUTER = ROLES[0]
"""The stream that routes, and that new tables are installed on (clause G2)."""
PLACEMENTS = ((0, 1), (1, 0))
"""Two ways to put two experts into two slots."""
WHOLE = 65536
"""The share of an expert that has one replica."""


@dataclass
class Workshop:
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

    place: Shelf
    pool: HostPool
    event: Event
    ledger: Ledger = field(default_factory=Ledger)
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
        refusal = attempt(lambda: self.place.store.commit([(buffer, slot)], stream), SlotLeased)
        self.refused(number, slot, refusal)
        self.ledger.commit(buffer, slot, role)

    def write(self, number: int, slot: int, role: str) -> None:
        """A version goes to a slot."""
        refusal = attempt(lambda: self.place.write([slot], number, role), SlotLeased)
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
        demand("A11", right, f"step {number}: slot {slot} is {state}, and {refusal or 'no error'}")

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
        refusal = attempt(lambda: self.place.store.write([slot], [[data]], stream), SlotLeased)
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
        if self.ledger.turn is Turn.PASSED:
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
        blob = self.place.bench.empty((WIDTH,))
        lock.acquire(stream)
        # Not blocking: the host must not wait for a stream that waits for its signal.
        stream.launch(lambda: blob.copy_(cell, non_blocking=True))
        lock.release(stream)
        read = f"step {number}, acquire on {role}", blob
        if self.ledger.turn is Turn.SIGNED:
            self.due.append(("L7", *read, self.signed))
        else:
            self.waiting = read
        self.ledger.acquire()

    def renew(self, number: int) -> None:
        """A new epoch, in which the mover of the old one can do nothing."""
        lock, _cell = self.locked()
        old = lock.epoch
        lock.drain(self.place.bench.patience)
        late = attempt(lambda: lock.signal(old), EquipoiseError)
        demand("L3", isinstance(late, StaleEpoch), f"step {number}: a late signal, and {late!r}")
        self.ledger.turn = Turn.MOVER

    def locked(self) -> tuple[StreamLock, Tensor]:
        """The lock and what is under it: host memory that the mover writes."""
        bench = self.place.bench
        if self.lock is None or self.cell is None:
            self.lock = bench.accelerator.stream_lock(bench.deadline)
            self.cell = bench.accelerator.pinned(WIDTH)
        return self.lock, self.cell

    # ----- tables --------------------------------------------------------------------------------

    def install(self, _: int, which: int) -> None:
        """One of the placements becomes the one that is routed by."""
        device = self.place.bench.accelerator
        if self.tables is None:
            self.tables = Tables.empty(1, 2, 2, 1, device.device)
        rows = [[0, 1, 2], list(PLACEMENTS[which]), [WHOLE, WHOLE]]
        parts = [torch.tensor([row], dtype=torch.int32) for row in rows]
        self.place.kept += parts
        device.kernels.commit_tables(
            TableUpdate((0,), *parts), self.tables, self.place.stream(ROUTER)
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
            ids, tables, Salt(0, 0, 0), slots, counts, self.place.stream(ROUTER)
        )
        self.routed.append((slots, counts, self.ledger.tables))

    # ----- the end -------------------------------------------------------------------------------

    def end(self, number: int) -> None:
        """Nobody is left waiting; then everything that was read is judged."""
        if self.ledger.turn is Turn.WAITED:
            self.sign(number)
        for slot in range(SLOTS):
            self.pack(number, slot, ROUTER)
        self.place.bench.drain()
        for clause, what, blob, version in self.due:
            seen = versions(blob)
            demand(clause, seen == [version], f"{what}: version {listed(seen)}, not {version}")
        for slots, counts, which in self.routed:
            seen, wanted = slots.tolist(), list(PLACEMENTS[which])
            demand("G2", seen == wanted, f"routed to slots {seen}, installed were {wanted}")
            demand("G2", counts.tolist() == [1, 1], f"counted {counts.tolist()}, not 1 each")


def play(bench: Bench, found: Program) -> Play:
    """Every step is the name of a method."""
    place = plain(bench, SLOTS, STAGING, WIDTH)
    pool, event = bench.accelerator.host_pool(WIDTH, PAGES), bench.accelerator.event()
    shop = Workshop(place, pool, event)
    for number, step in enumerate(found.steps, start=1):
        getattr(shop, step.op)(number, *step.args)
        yield NEXT
    shop.end(len(found.steps) + 1)
