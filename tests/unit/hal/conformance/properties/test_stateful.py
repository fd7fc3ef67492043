"""The state machine composes valid programs, and its model computes what must come first."""

from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.capabilities import Capabilities
from equipoise.hal.conformance.fixtures.happens_before import HappensBefore
from equipoise.hal.conformance.fixtures.slot_store import SLOT_ROLES
from equipoise.hal.conformance.program import Case
from equipoise.hal.conformance.properties.stateful import PROPERTIES, LockTurn, SystemModel
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.search import PropertyHeld, SearchSettings, search

(MACHINE,) = PROPERTIES
STREAM = st.sampled_from(SLOT_ROLES)
FIRST, SECOND, THIRD = SLOT_ROLES
BARE = Capabilities()
LOCKED = ("sign", "acquire", "renew")


class Listener:
    """Plays nothing; keeps its arguments."""

    name = "listener"
    traits = Traits(BARE, None, (1,), controlled=True)

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def play(self, prop: Property, case: Case) -> None:
        self.cases.append(case)

    def close(self) -> None:
        pass


def test_machine_composes_varied_programs_and_schedules() -> None:
    listener = Listener()
    verdict = search(MACHINE, listener, SearchSettings(cases=50))
    assert isinstance(verdict, PropertyHeld)
    assert len({case.program for case in listener.cases}) > 20
    assert len({len(case.schedule) for case in listener.cases}) > 5


def test_machine_omits_undeclared_operations() -> None:
    listener = Listener()
    search(MACHINE, listener, SearchSettings(cases=50))
    assert not [s for c in listener.cases for s in c.program.steps if s.op in LOCKED]


@given(st.lists(STREAM, min_size=1, max_size=6), STREAM)
def test_order_follow_reaches_launch_and_earlier_ones(launches: list[str], waiter: str) -> None:
    order = HappensBefore()
    numbers = [order.launch(role) for role in launches]
    order.order_after(waiter, numbers[-1])
    same = [number for number in numbers if launches[number] == launches[-1]]
    assert all(order.is_ordered_after(waiter, number) for number in same)


def test_model_lists_stranger_until_writer_waits_for_it() -> None:
    model = SystemModel()
    model.look(0, FIRST)
    assert model.unattached_readers(SECOND, 0) == [FIRST]
    model.join(FIRST, SECOND)
    assert model.unattached_readers(SECOND, 0) == []


def test_model_attached_stream_is_settled_and_no_stranger() -> None:
    model = SystemModel()
    model.attach(FIRST)
    model.write(1, 0, SECOND)
    assert model.may_read(FIRST, 0)
    assert not model.may_read(THIRD, 0)
    model.look(0, FIRST)
    assert model.unattached_readers(SECOND, 0) == []


def test_model_leased_slot_keeps_its_version() -> None:
    model = SystemModel()
    model.leases.append(0)
    model.write(1, 0, FIRST)
    assert model.slot(0) == 0
    model.leases[0] = -1
    model.write(2, 0, FIRST)
    assert model.slot(0) == 2


def test_model_lock_turn_is_order_independent() -> None:
    acquired_first, signed_first = SystemModel(), SystemModel()
    acquired_first.acquire()
    acquired_first.sign()
    signed_first.sign()
    signed_first.acquire()
    assert acquired_first.lock_turn == signed_first.lock_turn == LockTurn.READER_RELEASED
