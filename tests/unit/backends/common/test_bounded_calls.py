import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from equipoise.backends.common.bounded_wait import BoundedCalls
from equipoise.hal.errors import ControlPlaneLost


def test_bounded_call_returns_result() -> None:
    calls = BoundedCalls("somebody")
    assert [calls.call(lambda n=n: n * n, 20.0) for n in range(4)] == [0, 1, 4, 9]  # type: ignore[misc]


def test_bounded_call_raises_error_and_stays_usable() -> None:
    calls = BoundedCalls("somebody")
    with pytest.raises(ZeroDivisionError):
        calls.call(lambda: 1 // 0, 20.0)
    assert calls.call(lambda: "fine", 20.0) == "fine"


def test_bounded_calls_refuse_more_until_late_one_returns() -> None:
    calls, release, late_ended = BoundedCalls("somebody"), threading.Event(), threading.Event()

    def late() -> str:
        release.wait(60.0)
        late_ended.set()
        return "late"

    with pytest.raises(ControlPlaneLost, match=r"somebody did not answer within 0\.05 s"):
        calls.call(late, 0.05)
    with pytest.raises(ControlPlaneLost, match="somebody fell silent"):
        calls.call(lambda: "too early", 20.0)
    release.set()
    assert late_ended.wait(20.0)
    assert call_until_answered(calls, lambda: "in time") == "in time"


def call_until_answered(calls: BoundedCalls, function: Callable[[], str]) -> str:
    """The late call ends a moment after its function has."""
    while True:
        with suppress(ControlPlaneLost):
            return calls.call(function, 20.0)


def test_call_given_up_before_it_began_is_never_made() -> None:
    calls, release, made = BoundedCalls("somebody"), threading.Event(), list[str]()
    first_began = threading.Event()

    def first() -> None:
        first_began.set()
        release.wait(60.0)

    with ThreadPoolExecutor(1) as pool:
        first_call = pool.submit(calls.call, first, 60.0)
        assert first_began.wait(20.0)
        with pytest.raises(ControlPlaneLost, match="did not answer"):
            calls.call(lambda: made.append("given up"), 0.05)
        release.set()
        first_call.result(20.0)
    calls.call(lambda: made.append("next"), 20.0)
    assert made == ["next"]


def test_closed_calls_fail_at_once() -> None:
    calls = BoundedCalls("somebody")
    calls.close()
    with pytest.raises(ControlPlaneLost, match="the connection to somebody is closed"):
        calls.call(lambda: "fine", 20.0)
