"""How the host waits for a device: looks first, then pauses that double."""

import pytest

from equipoise.backends.common import bounded_wait
from equipoise.backends.common.bounded_wait import MAX_PAUSE, MIN_PAUSE, SPIN_SECONDS, poll


class Clock:
    """Time that passes by looks and pauses alone."""

    def __init__(self, check_seconds: float) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self._check_seconds = check_seconds

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def check_condition(self) -> bool:
        self.now += self._check_seconds
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake_clock = Clock(check_seconds=10e-6)
    monkeypatch.setattr(bounded_wait, "time", fake_clock)
    return fake_clock


def test_poll_looks_without_pause_at_first(clock: Clock) -> None:
    answers = iter([False] * 4 + [True])

    def ready() -> bool:
        clock.check_condition()
        return next(answers)

    assert poll(ready, 1.0)
    assert clock.pauses == []
    assert clock.now <= SPIN_SECONDS + 1e-9


def test_poll_pauses_double_up_to_longest(clock: Clock) -> None:
    assert not poll(clock.check_condition, 0.02)
    assert clock.pauses[:3] == [MIN_PAUSE, 2 * MIN_PAUSE, 4 * MIN_PAUSE]
    assert max(clock.pauses) == MAX_PAUSE
    assert clock.now <= 0.02 + clock._check_seconds + 1e-9


def test_poll_looks_once_without_time(clock: Clock) -> None:
    assert not poll(clock.check_condition, 0.0)
    assert poll(lambda: True, 0.0)
    assert clock.pauses == []
