"""Overlap is measured and never judged."""

from equipoise.backends.cpu import BACKEND
from equipoise.backends.virtual import BACKEND as VIRTUAL
from equipoise.hal.conformance.executors.controlled import ControlledSubject
from equipoise.hal.conformance.executors.device import DeviceSubject
from equipoise.hal.conformance.properties import overlap
from equipoise.hal.conformance.search import PropertyReported, SearchSettings, search
from equipoise.hal.conformance.suite import find


def test_overlap_property_only_reports_on_real_threads() -> None:
    prop = find("copies-and-computation-overlap")
    assert isinstance(
        search(prop, DeviceSubject(BACKEND), SearchSettings(cases=1)), PropertyReported
    )


def test_overlap_property_needs_a_clock() -> None:
    subject = ControlledSubject(VIRTUAL)
    assert not overlap.has_clock(subject.traits)
