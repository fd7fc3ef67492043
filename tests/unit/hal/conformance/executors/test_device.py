"""A device with a stream that stands still: the case that stopped it is reported, and no other."""

import threading
from dataclasses import replace
from typing import Any

import pytest

from equipoise.backends.cpu import stream
from equipoise.backends.cpu.accelerator import CpuAccelerator, CpuBackend
from equipoise.hal.conformance import suite
from equipoise.hal.conformance.context import Play, RankContext
from equipoise.hal.conformance.executors.device import DeviceSubject, play_threads
from equipoise.hal.conformance.program import Case, Program
from equipoise.hal.conformance.search import (
    PropertyHeld,
    PropertyNotJudged,
    PropertyViolated,
    SearchSettings,
    search,
)
from equipoise.hal.errors import StreamTimeout, Violation
from equipoise.hal.stream import Role

FIRST = suite.find("launches-run-in-the-order-that-streams-and-events-give")
SECOND = suite.find("an-event-says-when-its-point-is-reached")


class CountingBackend(CpuBackend):
    """Counts how often a device is opened."""

    opened = 0

    def open(self, index: int) -> CpuAccelerator:
        self.opened += 1
        return super().open(index)


@pytest.fixture
def stuck_roles(monkeypatch: pytest.MonkeyPatch) -> set[Role]:
    """Streams of these roles do not drain; closed streams of other roles say that they are."""
    roles, healthy = {Role.COPY}, stream.CpuStream.synchronize

    def synchronize(self: stream.CpuStream, timeout: float) -> None:
        if self.role in roles:
            raise StreamTimeout("not drained")
        healthy(self, timeout)

    monkeypatch.setattr(stream.CpuStream, "synchronize", synchronize)
    return roles


def test_device_that_stands_still_is_not_shrunk_on(stuck_roles: set[Role]) -> None:
    backend = CountingBackend()
    subject, effort = DeviceSubject(backend), SearchSettings(cases=20)
    first, second = search(FIRST, subject, effort), search(SECOND, subject, effort)
    assert isinstance(first, PropertyViolated)
    assert "stands still though nothing is due" in first.what
    assert second == PropertyNotJudged(f"a stream stands still since {FIRST.name} was played")
    assert backend.opened == 1


def test_device_that_drains_again_is_judged_again(stuck_roles: set[Role]) -> None:
    subject, effort = DeviceSubject(CpuBackend()), SearchSettings(cases=5)
    search(FIRST, subject, effort)
    stuck_roles.clear()
    assert isinstance(search(SECOND, subject, effort), PropertyHeld)


def _event_of_missing_pool(self: CpuAccelerator) -> object:
    return self.no_such_pool.event()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("own_bug", "clause", "what"),
    [
        (False, "R3", "R3: CpuAccelerator has no event"),
        (True, "O1", "O1: raised AttributeError: 'CpuAccelerator' object has no attribute"),
    ],
)
def test_missing_method_breaks_signatures_and_bug_of_backend_does_not(
    monkeypatch: pytest.MonkeyPatch, own_bug: bool, clause: str, what: str
) -> None:
    owner = next(kind for kind in CpuAccelerator.__mro__ if "event" in vars(kind))
    if own_bug:
        monkeypatch.setattr(owner, "event", _event_of_missing_pool)
    else:
        monkeypatch.delattr(owner, "event")
    verdict = search(FIRST, DeviceSubject(CpuBackend()), SearchSettings(cases=20))
    assert isinstance(verdict, PropertyViolated)
    assert verdict.clause == clause
    assert verdict.what.startswith(what)


def test_first_error_of_threads_is_raised_not_that_of_who_waited() -> None:
    failed = threading.Event()

    def play(ctx: RankContext, _: Program) -> Play:
        if ctx.thread == 1:
            try:
                raise Violation("K3", "cause")
            finally:
                failed.set()
        threading.Event().wait(0.05 if failed.wait(10.0) else 0.0)
        raise Violation("C8", "what host 1 was to do never came")
        yield

    absent: Any = None
    ctx = RankContext(0, 1, 0, absent, absent, None, 1.0, 1.0, absent)
    with pytest.raises(Violation, match="cause"):
        play_threads(replace(FIRST, threads=2, play=play), Case(Program(())), ctx)
