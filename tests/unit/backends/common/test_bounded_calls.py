import threading

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


def test_bounded_calls_refuse_more_after_timeout() -> None:
    calls, never = BoundedCalls("somebody"), threading.Event()
    with pytest.raises(ControlPlaneLost, match=r"somebody did not answer within 0\.05 s"):
        calls.call(lambda: never.wait(60.0), 0.05)
    with pytest.raises(ControlPlaneLost, match="somebody fell silent"):
        calls.call(lambda: "late", 20.0)
    never.set()
