"""The driver's C interface: memory, copies, events. Nothing of torch is loaded."""

import re
from collections.abc import Callable

import pytest
from devices.simulator.simulated_program import Outcome, run_program

FRESH = "a7"
INVALID, OUT_OF_MEMORY, DEVICE_EXCEPTION, TIMEOUT = 100000, 207001, 507015, 507046


@pytest.fixture(scope="module")
def memory() -> Outcome:
    """The facts about memory."""
    return run_program("memory", "eager")


SCHEDULES = [
    *("eager", "lazy"),
    *(pytest.param(name, marks=pytest.mark.deep) for name in ("delay", "explore")),
]


@pytest.fixture(scope="module", params=SCHEDULES)
def events(request: pytest.FixtureRequest) -> Outcome:
    """The facts about events, under each schedule."""
    return run_program("events", request.param)


def test_driver_new_memory_holds_poison(memory: Outcome) -> None:
    assert memory.facts["fresh"] == FRESH * 64


def test_driver_wrong_copy_fails_and_is_a_fault(memory: Outcome) -> None:
    wrong = memory.facts["wrong"]
    assert len(wrong) == 13
    assert {what for what, code in wrong.items() if code == 0} == set()
    assert memory.facts["told"] == len(wrong)
    assert memory.facts["untouched"]


def test_driver_freed_memory_is_out_of_reach(memory: Outcome) -> None:
    assert memory.facts["after_free"] == DEVICE_EXCEPTION
    assert memory.facts["twice"] == INVALID
    assert memory.facts["told_after_free"] == 2


def test_driver_pinned_memory_freed_twice_is_a_fault(memory: Outcome) -> None:
    assert memory.facts["pinned_twice"] == INVALID
    assert memory.facts["told_about_pinned"] == 1


def test_driver_refuses_allocation_beyond_device_memory(memory: Outcome) -> None:
    assert memory.facts["too_much"] == OUT_OF_MEMORY


def test_driver_task_on_freed_memory_fails_its_stream_for_good() -> None:
    facts = run_program("freed_device_memory", "lazy").facts
    assert facts["synchronised"] == DEVICE_EXCEPTION
    assert facts["again"] == DEVICE_EXCEPTION
    assert facts["told"] == 1
    assert facts["target"] == FRESH * 64


def test_driver_task_on_freed_pinned_memory_fails_its_stream() -> None:
    facts = run_program("freed_pinned_memory", "lazy").facts
    assert facts == {"synchronised": DEVICE_EXCEPTION, "told": 1, "target": FRESH * 64}


def test_driver_lazy_schedule_progresses_under_polling() -> None:
    assert run_program("polling", "lazy").facts == {"asking": True, "watching": True}


def delays(rank: int) -> list[str]:
    """How long the first tasks wait on `delay`, by the trace; later ones have been asked for."""
    outcome = run_program("stream_order", "delay", "--trace", environment={"RANK": str(rank)})
    assert outcome.facts == {"done": True}
    return re.findall(r"a delay of (\d+) ns", outcome.err)[:20]


@pytest.mark.deep
def test_driver_delay_schedule_is_seeded_by_rank() -> None:
    first, again, second = delays(0), delays(0), delays(1)
    assert len(first) == len(second) == 20
    assert first == again
    assert len(set(first) & set(second)) < 5


def test_driver_wait_for_unrecorded_event_is_a_fault(events: Outcome) -> None:
    assert events.facts["unrecorded"] == [INVALID, 1]


def test_driver_event_wait_keeps_latest_recording(events: Outcome) -> None:
    assert events.facts["keeps"] == "01" * 64


def test_driver_external_event_record_releases_one_wait(events: Outcome) -> None:
    once, after = events.facts["one_each"][:2], events.facts["one_each"][2:]
    assert sorted(once) == [0, TIMEOUT]
    assert after == [0, 0]


def test_driver_stream_waits_for_value_written_by_another(events: Outcome) -> None:
    assert events.facts["value"] == [TIMEOUT, 0]


def test_driver_lazy_schedule_exposes_missing_wait() -> None:
    assert run_program("events", "lazy").facts["order"] == f"02 {FRESH}"


@pytest.mark.parametrize("place", ["device memory", "pinned memory"])
def test_driver_host_can_read_pinned_but_not_device_memory(
    place: str, reach: Callable[[str], Outcome]
) -> None:
    outcome = reach(place)
    assert outcome.code == {"device memory": 139, "pinned memory": 0}[place], outcome.err


@pytest.fixture
def reach() -> Callable[[str], Outcome]:
    """Reads the first byte of a kind of memory, in a process of its own."""
    return lambda place: run_program("dereference", "eager", arguments=(place,))
