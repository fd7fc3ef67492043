"""The rule-based machine: hypothesis composes programs for everything that an accelerator has."""

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    precondition,
    rule,
)

from equipoise.hal.conformance.ledger import PAGES, SLOTS, STAGING, Ledger, Turn
from equipoise.hal.conformance.program import Argument, Case, Step, program
from equipoise.hal.conformance.property import Composed, Property, Traits
from equipoise.hal.conformance.shelf import ROLES
from equipoise.hal.conformance.strategies import schedules
from equipoise.hal.conformance.workshop import ROUTER, play

# Mostly one slot and two streams: what never meets cannot disturb each other.
SLOT = st.sampled_from((*[0] * SLOTS, *range(SLOTS)))
BUFFER = st.integers(0, STAGING - 1)
STREAM = st.sampled_from((*ROLES[:2], *ROLES))
LONG = 144
"""Choices that are drawn at most: programs are longer than those of other properties."""
READERS = 2
"""Readers at a time."""
Played = Callable[[Case], None]


def locking(turns: tuple[Turn, ...]) -> Callable[["Composer"], bool]:
    """Whether the device has a stream lock, which is at one of these turns."""
    return lambda self: self.traits.accelerator.stream_lock and self.ledger.turn in turns


def moving(self: "Composer") -> bool:
    """Whether the host may wait for streams: none of them waits for the host."""
    return self.ledger.turn is not Turn.WAITED


class Composer(RuleBasedStateMachine):
    """Each rule is a call; what the ledger says cannot be made is left out.

    The case is played at the end, as data, and not call by call while it is composed: so real
    devices, on which a race shows once and not again, can be searched and shrunk like all others.
    """

    arrived = Bundle("arrived")
    leases = Bundle("leases")
    pages = Bundle("pages")

    def __init__(self, traits: Traits, played: Played) -> None:
        super().__init__()
        self.traits = traits
        self.ledger = Ledger()
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

    @initialize(schedule=schedules(LONG))
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

    @precondition(lambda self: moving(self) and self.ledger.attached.total() < READERS)
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

    @precondition(lambda self: moving(self) and len(self.ledger.pages) < PAGES)
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

    @precondition(locking((Turn.MOVER, Turn.WAITED, Turn.PASSED)))
    @rule()
    def sign(self) -> None:
        """The mover signals, once it has the memory."""
        self.note("sign")
        self.ledger.sign()

    @precondition(locking((Turn.MOVER, Turn.SIGNED)))
    @rule(role=STREAM)
    def acquire(self, role: str) -> None:
        """A stream reads under the lock."""
        self.note("acquire", role)
        self.ledger.acquire()

    @precondition(locking((Turn.SIGNED, Turn.PASSED)))
    @rule()
    def renew(self) -> None:
        """The lock begins a new epoch."""
        self.note("renew")
        self.ledger.turn = Turn.MOVER

    @rule(which=st.integers(0, 1))
    def install(self, which: int) -> None:
        """New tables."""
        self.note("install", which)
        self.ledger.tables = which
        self.ledger.order.launch(ROUTER)

    @precondition(lambda self: self.ledger.tables is not None)
    @rule()
    def route(self) -> None:
        """A routing pass."""
        self.note("route")
        self.ledger.order.launch(ROUTER)


PROPERTIES = (
    Property(
        name="everything-at-once-shows-what-is-due",
        family="visibility",
        clauses=("V5", "V1", "A11", "A12", "L3", "L7", "G2"),
        claim="Streams, events, slots, readers, leases, pages, lock and tables do not disturb "
        "each other.",
        programs=Composed(Composer),
        play=play,
    ),
)
