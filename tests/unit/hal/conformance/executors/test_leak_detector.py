"""What counts as a leak of a rank process: clause R1."""

import threading

import pytest

from equipoise.hal.conformance.executors.leak_detector import (
    MAX_MEMORY_GROWTH,
    LeakDetector,
    ProcessUsage,
    process_usage,
)
from equipoise.hal.errors import Violation


def make_detector(*memory: int) -> LeakDetector:
    """Reports these bytes, one value per call."""
    samples = iter(memory)
    return LeakDetector(lambda: ProcessUsage((), (), next(samples), frozenset()))


def test_memory_that_grows_between_cases_is_a_leak() -> None:
    detector = make_detector(0, MAX_MEMORY_GROWTH, MAX_MEMORY_GROWTH, MAX_MEMORY_GROWTH)
    detector.check_released()
    with pytest.raises(Violation, match="more bytes of memory"):
        detector.check_released(timeout=0.0)


@pytest.mark.slow
def test_memory_kept_after_a_case_of_real_sizes_is_no_leak() -> None:
    detector = make_detector(
        0,
        MAX_MEMORY_GROWTH,
        MAX_MEMORY_GROWTH,
        2 * MAX_MEMORY_GROWTH,
        2 * MAX_MEMORY_GROWTH,
        2 * MAX_MEMORY_GROWTH,
    )
    detector.check_released()
    detector.expect_growth()
    detector.check_released()
    with pytest.raises(Violation, match="more bytes of memory"):
        detector.check_released(timeout=0.0)


def test_thread_of_python_counts_under_its_own_name() -> None:
    stop_event = threading.Event()
    thread = threading.Thread(target=stop_event.wait, name="test.left-over")
    thread.start()
    try:
        assert process_usage().thread_names.count("test.left-over") == 1
    finally:
        stop_event.set()
        thread.join()
