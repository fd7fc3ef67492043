"""Order of issue, from events alone: clause V5."""

import threading
from collections.abc import Iterator
from functools import partial

import pytest
from helpers.watchdog import WATCHDOG
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.backends.cpu import BACKEND
from equipoise.backends.cpu.accelerator import CpuAccelerator
from equipoise.hal.errors import StreamFailed, StreamTimeout
from equipoise.hal.stream import Role
from equipoise.hal.support.slot_access import HazardTracker

NAMES = st.lists(st.sampled_from("abc"), max_size=2, unique=True)


@pytest.fixture
def cpu() -> Iterator[CpuAccelerator]:
    accelerator = BACKEND.open(0)
    yield accelerator
    accelerator.close()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), NAMES, NAMES), max_size=20))
def test_hazards_run_conflicting_operations_in_issue_order(
    operations: list[tuple[int, list[str], list[str]]],
) -> None:
    cpu = BACKEND.open(0)
    hazards, streams = HazardTracker(cpu.event), [cpu.stream(role) for role in Role]
    log: list[int] = []
    for place, (at, reads, writes) in enumerate(operations):
        with hazards.track(streams[at], reads=reads, writes=writes):
            streams[at].launch(partial(log.append, place))
    cpu.synchronize(WATCHDOG)
    cpu.close()
    position = {place: when for when, place in enumerate(log)}
    for later, (_, reads, writes) in enumerate(operations):
        for earlier, (_, earlier_reads, earlier_writes) in enumerate(operations[:later]):
            if {*reads, *writes} & set(earlier_writes) or set(writes) & set(earlier_reads):
                assert position[earlier] < position[later]


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        ({"writes": "a"}, {"reads": "a"}, True),
        ({"writes": "a"}, {"writes": "a"}, True),
        ({"reads": "a"}, {"writes": "a"}, True),
        ({"reads": "a"}, {"reads": "a"}, False),
        ({"writes": "a"}, {"writes": "b", "reads": "c"}, False),
    ],
)
def test_hazards_delay_only_conflicting_operations(
    cpu: CpuAccelerator, first: dict[str, str], second: dict[str, str], waits: bool
) -> None:
    hazards, gate, log = HazardTracker(cpu.event), threading.Event(), []
    one, two = cpu.stream(Role.COPY), cpu.stream(Role.AUX)
    with hazards.track(one, **first):
        one.launch(lambda: gate.wait(WATCHDOG))
    with hazards.track(two, **second):
        two.launch(lambda: log.append(1))
    if waits:
        with pytest.raises(StreamTimeout):
            two.synchronize(0.02)
    else:
        two.synchronize(WATCHDOG)
    assert log == ([] if waits else [1])
    gate.set()
    cpu.synchronize(WATCHDOG)
    assert log == [1]


def test_hazards_record_one_event_per_operation(cpu: CpuAccelerator) -> None:
    events = []

    def event() -> object:
        events.append(cpu.event())
        return events[-1]

    hazards, stream = HazardTracker(event), cpu.stream(Role.COPY)  # type: ignore[arg-type]
    with hazards.track(stream, reads="ab", writes="cd") as recorded_event:
        stream.launch(lambda: None)
    stream.synchronize(WATCHDOG)
    assert events == [recorded_event]
    assert recorded_event.query()


def test_hazards_ignore_operation_that_failed_to_launch(cpu: CpuAccelerator) -> None:
    hazards, one, two = HazardTracker(cpu.event), cpu.stream(Role.COPY), cpu.stream(Role.AUX)
    with pytest.raises(ZeroDivisionError), hazards.track(one, writes="a"):
        raise ZeroDivisionError
    with hazards.track(two, reads="a"):
        two.launch(lambda: None)
    two.synchronize(WATCHDOG)


def test_hazards_fail_readers_of_failed_writer_until_rewrite(
    cpu: CpuAccelerator,
) -> None:
    hazards, one, two = HazardTracker(cpu.event), cpu.stream(Role.COPY), cpu.stream(Role.AUX)
    with hazards.track(one, writes="a") as recorded_event:
        one.launch(lambda: 1 / 0)
    with pytest.raises(StreamFailed):
        recorded_event.synchronize(WATCHDOG)
    with pytest.raises(StreamFailed), hazards.track(two, reads="a"):
        pytest.fail("reached the block")
    for _ in range(2):
        with hazards.track(two, writes="a"):
            two.launch(lambda: None)
    with hazards.track(two, reads="a"):
        two.launch(lambda: None)
    two.synchronize(WATCHDOG)


@pytest.mark.slow
def test_hazards_memory_is_bounded(cpu: CpuAccelerator) -> None:
    hazards = HazardTracker(cpu.event)
    for number in range(200):
        stream = cpu.stream(list(Role)[number % 4])
        with hazards.track(stream, reads="ab", writes="c" if number % 3 else ""):
            stream.launch(lambda: None)
    cpu.synchronize(WATCHDOG)
    assert set(hazards._traces) == set("abc")
    assert {len(trace.readers) for trace in hazards._traces.values()} <= {0, 4}
