"""Words of a lock that are lent again: the signal may come before the acquire, or behind it."""

from helpers.harnesses.devices import backend
from helpers.watchdog import WATCHDOG
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from equipoise.hal.stream import Role


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.booleans(), min_size=2, max_size=6))
@example([True, False])
def test_lock_accepts_alternating_early_and_late_signals(kind: str, early: list[bool]) -> None:
    device = backend(kind).open(0)
    lock, stream = device.stream_lock(WATCHDOG), device.stream(Role.COMPUTE)
    for ahead in early:
        if ahead:
            lock.signal(0)
        lock.acquire(stream)
        if not ahead:
            lock.signal(0)
        lock.release(stream)
        lock.wait(0, WATCHDOG)
    stream.synchronize(WATCHDOG)
    assert lock.drain(WATCHDOG) == 1
    device.close()
