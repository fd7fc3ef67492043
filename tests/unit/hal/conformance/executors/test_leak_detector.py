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


def meter(*memory: int) -> LeakDetector:
    """Reports these bytes, one value per call."""
    found = iter(memory)
    return LeakDetector(lambda: ProcessUsage((), (), next(found), frozenset()))


def test_memory_that_grows_between_cases_is_a_leak() -> None:
    looked_at = meter(0, MAX_MEMORY_GROWTH, MAX_MEMORY_GROWTH, MAX_MEMORY_GROWTH)
    looked_at.check_released()
    with pytest.raises(Violation, match="more bytes of memory"):
        looked_at.check_released(patience=0.0)


def test_memory_kept_after_a_case_of_real_sizes_is_no_leak() -> None:
    looked_at = meter(
        0,
        MAX_MEMORY_GROWTH,
        MAX_MEMORY_GROWTH,
        2 * MAX_MEMORY_GROWTH,
        2 * MAX_MEMORY_GROWTH,
        2 * MAX_MEMORY_GROWTH,
    )
    looked_at.check_released()
    looked_at.expect_growth()
    looked_at.check_released()
    with pytest.raises(Violation, match="more bytes of memory"):
        looked_at.check_released(patience=0.0)


def test_thread_of_python_counts_under_its_own_name() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name="test.left-over")
    thread.start()
    try:
        assert process_usage().thread_names.count("test.left-over") == 1
    finally:
        ended.set()
        thread.join()
