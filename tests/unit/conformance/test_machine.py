"""What the machine composes can be played, and its ledger knows what must come first."""

from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.capabilities import Capabilities
from equipoise.hal.conformance.ledger import Ledger, Turn
from equipoise.hal.conformance.machine import PROPERTIES
from equipoise.hal.conformance.model import Order
from equipoise.hal.conformance.program import Case
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.search import Effort, Held, search
from equipoise.hal.conformance.shelf import ROLES

(MACHINE,) = PROPERTIES
STREAM = st.sampled_from(ROLES)
FIRST, SECOND, THIRD = ROLES
BARE = Capabilities()
LOCKED = ("sign", "acquire", "renew")


class Listener:
    """Plays nothing; keeps what it was given."""

    name = "listener"
    traits = Traits(BARE, None, (1,), controlled=True)

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def play(self, claim: Property, case: Case) -> None:
        self.cases.append(case)

    def close(self) -> None:
        pass


def test_the_machine_composes_programs_with_schedules_of_every_length() -> None:
    listener = Listener()
    verdict = search(MACHINE, listener, Effort(cases=50))
    assert isinstance(verdict, Held)
    assert len({case.program for case in listener.cases}) > 20
    assert len({len(case.schedule) for case in listener.cases}) > 5


def test_what_the_device_does_not_declare_is_in_no_program() -> None:
    listener = Listener()
    search(MACHINE, listener, Effort(cases=50))
    assert not [s for c in listener.cases for s in c.program.steps if s.op in LOCKED]


@given(st.lists(STREAM, min_size=1, max_size=6), STREAM)
def test_a_stream_that_followed_a_launch_has_reached_it_and_those_before(
    launches: list[str], waiting: str
) -> None:
    order = Order()
    numbers = [order.launch(role) for role in launches]
    order.follow(waiting, numbers[-1])
    same = [number for number in numbers if launches[number] == launches[-1]]
    assert all(order.reached(waiting, number) for number in same)


def test_a_stranger_that_looks_is_known_until_the_writer_has_waited_for_it() -> None:
    ledger = Ledger()
    ledger.look(0, FIRST)
    assert ledger.strangers(SECOND, 0) == [FIRST]
    ledger.join(FIRST, SECOND)
    assert ledger.strangers(SECOND, 0) == []


def test_an_attached_stream_is_no_stranger_and_has_seen_every_commit() -> None:
    ledger = Ledger()
    ledger.attach(FIRST)
    ledger.write(1, 0, SECOND)
    assert ledger.settled(FIRST, 0)
    assert not ledger.settled(THIRD, 0)
    ledger.look(0, FIRST)
    assert ledger.strangers(SECOND, 0) == []


def test_a_leased_slot_keeps_its_version() -> None:
    ledger = Ledger()
    ledger.leases.append(0)
    ledger.write(1, 0, FIRST)
    assert ledger.slot(0) == 0
    ledger.leases[0] = -1
    ledger.write(2, 0, FIRST)
    assert ledger.slot(0) == 2


def test_the_turns_of_the_lock_do_not_depend_on_who_comes_first() -> None:
    early, late = Ledger(), Ledger()
    early.acquire()
    early.sign()
    late.sign()
    late.acquire()
    assert early.turn == late.turn == Turn.PASSED
