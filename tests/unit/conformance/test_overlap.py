"""Overlap is measured and never judged."""

from equipoise.backends.cpu import BACKEND
from equipoise.backends.virtual import BACKEND as VIRTUAL
from equipoise.hal.conformance import overlap
from equipoise.hal.conformance.device import DeviceSubject
from equipoise.hal.conformance.search import Effort, Reported, search
from equipoise.hal.conformance.suite import find
from equipoise.hal.conformance.virtual import ControlledSubject


def test_measuring_on_real_threads_violates_nothing() -> None:
    claim = find("copies-and-computation-overlap")
    assert isinstance(search(claim, DeviceSubject(BACKEND), Effort(cases=1)), Reported)


def test_without_a_clock_there_is_nothing_to_measure() -> None:
    subject = ControlledSubject(VIRTUAL)
    assert not overlap.a_clock(subject.traits)
