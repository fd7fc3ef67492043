"""A device with a stream that stands still: the case that stopped it is reported, and no other."""

import pytest

from equipoise.backends.cpu.accelerator import CpuAccelerator, CpuBackend
from equipoise.hal.conformance import suite
from equipoise.hal.conformance.executors import device
from equipoise.hal.conformance.executors.device import DeviceSubject
from equipoise.hal.conformance.search import PropertyHeld, PropertyViolated, SearchSettings, search
from equipoise.hal.errors import StreamTimeout

FIRST = suite.find("launches-run-in-the-order-that-streams-and-events-give")
SECOND = suite.find("an-event-says-when-its-point-is-reached")


class StuckAccelerator(CpuAccelerator):
    """Its streams do not drain while the backend says so."""

    def __init__(self, backend: "StuckBackend") -> None:
        super().__init__()
        self._backend = backend

    def synchronize(self, timeout: float) -> None:
        if self._backend.stuck:
            raise StreamTimeout("a stream was not drained")
        super().synchronize(timeout)


class StuckBackend(CpuBackend):
    """Counts how often a device is opened."""

    stuck = True
    opened = 0

    def open(self, index: int) -> CpuAccelerator:
        self.opened += 1
        return StuckAccelerator(self)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> StuckBackend:
    monkeypatch.setattr(device, "STANDSTILL_TIMEOUT", 0.0)
    return StuckBackend()


def test_device_that_stands_still_is_not_shrunk_on(backend: StuckBackend) -> None:
    subject, effort = DeviceSubject(backend), SearchSettings(cases=20)
    first, second = search(FIRST, subject, effort), search(SECOND, subject, effort)
    assert isinstance(first, PropertyViolated)
    assert "stands still though nothing is due" in first.what
    assert isinstance(second, PropertyViolated)
    assert second.what == f"O7: a stream stands still since {FIRST.name} was played"
    assert backend.opened == 1


def test_device_that_drains_again_is_judged_again(backend: StuckBackend) -> None:
    subject, effort = DeviceSubject(backend), SearchSettings(cases=5)
    search(FIRST, subject, effort)
    backend.stuck = False
    assert isinstance(search(SECOND, subject, effort), PropertyHeld)
