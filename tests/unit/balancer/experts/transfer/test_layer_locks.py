import threading
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.transfer.layer_locks import UNLOCKED, LayerLocks, StepKind
from equipoise.hal import registry
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.errors import EngineError, LockPoisoned, StreamTimeout
from equipoise.hal.stream import Role
from equipoise.hal.support.slot_access import ReaderRegistry


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    device = registry.accelerator("cpu").open(0)
    yield device
    device.close()


def gates(
    accelerator: Accelerator, deadline: float = 20.0, entries: Mapping[int, int] | None = None
) -> LayerLocks:
    return LayerLocks(accelerator, 4, ReaderRegistry(accelerator.event), deadline, entries or {})


def test_gates_leave_unwritten_layers_open(accelerator: Accelerator) -> None:
    locks = gates(accelerator)
    locks.schedule({2: 7})
    assert locks.reading_slots(1, 7) is UNLOCKED
    assert locks.reading_slots(2, 6) is UNLOCKED
    assert locks.reading_slots(2, 7) is not UNLOCKED


@given(st.dictionaries(st.integers(0, 3), st.integers(0, 9)), st.integers(0, 12))
def test_step_kind_follows_locks_of_the_step(first: dict[int, int], step: int) -> None:
    device = registry.accelerator("cpu").open(0)
    locks = gates(device)
    locks.schedule(first)
    locked_layers = [layer for layer in range(4) if locks.is_locked(layer, step)]
    assert (locks.step_kind(step) is StepKind.SKIP) == (not locked_layers)
    assert (locks.step_kind(step) is StepKind.UPDATE) == (step in first.values())
    device.close()


def test_second_step_reads_weights_written_between_steps(accelerator: Accelerator) -> None:
    compute, locks = accelerator.stream(Role.COMPUTE), gates(accelerator)
    locks.schedule({0: 0})
    slot, slot_reads = [0], list[int]()

    def step(number: int) -> None:
        with locks.reading_slots(0, number):
            slot_reads.append(slot[0])

    locks.locks[0].signal(0)
    compute.launch(lambda: step(0))
    compute.launch(lambda: step(1))
    locks.locks[0].wait(0, 20.0)
    assert slot_reads == [0]
    slot[0] = 1
    locks.locks[0].signal(0)
    compute.synchronize(20.0)
    assert slot_reads == [0, 1]
    assert locks.is_drained(0)
    assert locks.locks[0].epoch == 1
    assert locks.is_drained(0), "asking again changes nothing"


def test_lock_is_not_drained_before_second_step(accelerator: Accelerator) -> None:
    compute, locks = accelerator.stream(Role.COMPUTE), gates(accelerator)
    locks.schedule({0: 0})
    locks.locks[0].signal(0)
    with locks.reading_slots(0, 0):
        pass
    compute.synchronize(20.0)
    locks.locks[0].wait(0, 20.0)
    locks.locks[0].signal(0)
    assert not locks.is_drained(0)


def test_lock_is_not_drained_while_the_point_behind_its_release_is_not_reached(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device writes the release before the event behind it: seen between the two, on a GPU."""
    compute, locks = accelerator.stream(Role.COMPUTE), gates(accelerator)
    locks.schedule({0: 0})
    locks.locks[0].signal(0)
    for step in (0, 1):
        with locks.reading_slots(0, step):
            pass
    locks.locks[0].wait(0, 20.0)
    locks.locks[0].signal(0)
    compute.synchronize(20.0)

    def raise_timeout(timeout: float) -> int:
        raise StreamTimeout("the event was not reached")

    with monkeypatch.context() as patch:
        patch.setattr(locks.locks[0], "drain", raise_timeout)
        assert not locks.is_drained(0)
    assert locks.is_drained(0)
    assert locks.locks[0].epoch == 1


def test_attached_stream_reads_only_while_lock_is_held(
    accelerator: Accelerator,
) -> None:
    compute, other = accelerator.stream(Role.COMPUTE), accelerator.stream(Role.AUX)
    readers = ReaderRegistry(accelerator.event)
    readers.attach(other)
    locks = LayerLocks(accelerator, 1, readers, 20.0)
    locks.schedule({0: 0})
    order, gate = list[str](), threading.Event()

    def read() -> None:
        gate.wait(20.0)
        order.append("read")

    with locks.reading_slots(0, 0):
        other.launch(read)
    compute.launch(lambda: order.append("behind"))
    assert order == [], "nobody comes in before the writer has signalled"
    locks.locks[0].signal(0)
    gate.set()
    locks.locks[0].wait(0, 20.0)
    assert order[0] == "read"
    compute.synchronize(20.0)


def test_gates_check_raises_on_poisoned_lock(accelerator: Accelerator) -> None:
    locks = gates(accelerator)
    locks.schedule({1: 0, 2: 0})
    locks.check()
    locks.poison([2])
    with pytest.raises(LockPoisoned):
        locks.check()


def holds(locks: LayerLocks, layer: int) -> bool:
    """Whether the writer still waits for the stream to give a lock back."""
    try:
        locks.locks[layer].wait(locks.locks[layer].epoch, 0.0)
    except StreamTimeout:
        return True
    return False


@given(entries=st.integers(1, 4))
def test_lock_is_given_back_after_last_entry_of_a_step(entries: int) -> None:
    device = registry.accelerator("cpu").open(0)
    compute, locks = device.stream(Role.COMPUTE), gates(device, entries={0: entries})
    locks.schedule({0: 4})
    for step in (4, 5):
        locks.locks[0].signal(0)
        for number in range(entries):
            with locks.reading_slots(0, step):
                compute.synchronize(20.0)
                assert holds(locks, 0), f"entry {number} of step {step} reads beside the writer"
        compute.synchronize(20.0)
        assert step == 5 or not holds(locks, 0)
    assert locks.is_drained(0)
    assert locks.reading_slots(0, 6) is UNLOCKED
    device.close()


def test_gate_entries_may_overlap_across_threads(accelerator: Accelerator) -> None:
    compute, locks = accelerator.stream(Role.COMPUTE), gates(accelerator, entries={0: 2})
    locks.schedule({0: 0})
    locks.locks[0].signal(0)
    inside, out = threading.Barrier(2), list[bool]()

    def batch() -> None:
        with locks.reading_slots(0, 0):
            inside.wait(20.0)
            compute.synchronize(20.0)
            out.append(holds(locks, 0))
            inside.wait(20.0)

    threads = [threading.Thread(target=batch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    compute.synchronize(20.0)
    assert out == [True, True]
    assert not holds(locks, 0)


def test_gate_refuses_one_entry_too_many(
    accelerator: Accelerator,
) -> None:
    locks = gates(accelerator)
    locks.schedule({3: 7})
    locks.locks[3].signal(0)
    with locks.reading_slots(3, 7):
        pass
    with (
        pytest.raises(EngineError, match="layer 3 is entered more than 1 times in step 7"),
        locks.reading_slots(3, 7),
    ):
        pass


@pytest.mark.parametrize("entry_count", [0, 1, 2])
def test_gate_raises_in_next_step_when_entries_are_missing(
    accelerator: Accelerator, entry_count: int
) -> None:
    locks = gates(accelerator, entries={3: 3})
    locks.schedule({3: 7})
    locks.locks[3].signal(0)
    for _ in range(entry_count):
        with locks.reading_slots(3, 7):
            pass
    message = (
        f"layer 3 was entered {entry_count} times and left {entry_count} times in step 7, not 3"
    )
    with pytest.raises(EngineError, match=message), locks.reading_slots(3, 8):
        pass
    with pytest.raises(EngineError, match=message):
        locks.reading_slots(3, 9)


def test_gate_raises_when_second_step_skips_the_layer(
    accelerator: Accelerator,
) -> None:
    locks = gates(accelerator)
    locks.schedule({3: 7})
    locks.locks[3].signal(0)
    with locks.reading_slots(3, 7):
        pass
    with pytest.raises(EngineError, match=r"layer 3 was entered 0 times .* in step 8, not 1"):
        locks.reading_slots(3, 9)


def test_failing_gate_entry_counts_as_entry(accelerator: Accelerator) -> None:
    locks = gates(accelerator, entries={0: 2})
    locks.schedule({0: 0})
    locks.locks[0].signal(0)
    with pytest.raises(ZeroDivisionError), locks.reading_slots(0, 0):
        raise ZeroDivisionError
    with locks.reading_slots(0, 0):
        pass
    accelerator.synchronize(20.0)
    assert not holds(locks, 0)
