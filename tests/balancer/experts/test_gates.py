import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.gates import OPEN, Gates, NoGates, StepKind
from equipoise.hal import registry
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.errors import LockPoisoned
from equipoise.hal.readers import Readers
from equipoise.hal.stream import Role

pytestmark = pytest.mark.ranks


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    opened = registry.accelerator("cpu").open(0)
    yield opened
    opened.close()


def gates(accelerator: Accelerator, deadline: float = 20.0) -> Gates:
    return Gates(accelerator, 4, Readers(accelerator.event), deadline)


def test_layers_that_nobody_writes_have_no_lock(accelerator: Accelerator) -> None:
    locks = gates(accelerator)
    locks.schedule({2: 7})
    assert locks.reading(1, 7) is OPEN
    assert locks.reading(2, 6) is OPEN
    assert locks.reading(2, 9) is OPEN
    assert locks.reading(2, 7) is not OPEN
    assert NoGates().reading(2, 7) is OPEN


@given(st.dictionaries(st.integers(0, 3), st.integers(0, 9)), st.integers(0, 12))
def test_a_step_is_of_the_kind_of_the_locks_it_carries(first: dict[int, int], step: int) -> None:
    device = registry.accelerator("cpu").open(0)
    locks = gates(device)
    locks.schedule(first)
    taken = [layer for layer in range(4) if locks.locked(layer, step)]
    assert (locks.kind(step) is StepKind.SKIP) == (not taken)
    assert (locks.kind(step) is StepKind.UPDATE) == (step in first.values())
    device.close()


def test_the_second_step_reads_what_was_written_between_the_two(accelerator: Accelerator) -> None:
    compute, locks = accelerator.stream(Role.COMPUTE), gates(accelerator)
    locks.schedule({0: 0})
    slot, seen = [0], list[int]()

    def step(number: int) -> None:
        with locks.reading(0, number):
            seen.append(slot[0])

    locks.locks[0].signal(0)
    compute.launch(lambda: step(0))
    compute.launch(lambda: step(1))
    locks.locks[0].wait(0, 20.0)
    assert seen == [0]
    slot[0] = 1
    locks.locks[0].signal(0)
    compute.synchronize(20.0)
    assert seen == [0, 1]
    assert locks.drained(0)
    assert locks.locks[0].epoch == 1
    assert locks.drained(0), "asking again changes nothing"


def test_a_lock_is_not_drained_before_its_second_step(accelerator: Accelerator) -> None:
    compute, locks = accelerator.stream(Role.COMPUTE), gates(accelerator)
    locks.schedule({0: 0})
    locks.locks[0].signal(0)
    with locks.reading(0, 0):
        pass
    compute.synchronize(20.0)
    locks.locks[0].wait(0, 20.0)
    locks.locks[0].signal(0)
    assert not locks.drained(0)


def test_another_reader_comes_in_behind_the_lock_and_is_out_before_it_goes_back(
    accelerator: Accelerator,
) -> None:
    compute, other = accelerator.stream(Role.COMPUTE), accelerator.stream(Role.AUX)
    readers = Readers(accelerator.event)
    readers.attach(other)
    locks = Gates(accelerator, 1, readers, 20.0)
    locks.schedule({0: 0})
    order, gate = list[str](), threading.Event()

    def read() -> None:
        gate.wait(20.0)
        order.append("read")

    with locks.reading(0, 0):
        other.launch(read)
    compute.launch(lambda: order.append("behind"))
    assert order == [], "nobody comes in before the mover has signalled"
    locks.locks[0].signal(0)
    gate.set()
    locks.locks[0].wait(0, 20.0)
    assert order[0] == "read"
    compute.synchronize(20.0)


def test_poison_is_told_to_whoever_checks(accelerator: Accelerator) -> None:
    locks = gates(accelerator)
    locks.schedule({1: 0, 2: 0})
    locks.check()
    locks.poison([2])
    with pytest.raises(LockPoisoned):
        locks.check()
