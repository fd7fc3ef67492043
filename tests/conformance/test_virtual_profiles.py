"""Traps of vendors: code that handles one keeps the contract, code that does not breaks it."""

from dataclasses import replace

import pytest
from helpers.tiers import DEEP

from equipoise.backends.virtual.backend import HEALTHY, VirtualBackend, VirtualParts
from equipoise.backends.virtual.device import AliasingDevice
from equipoise.backends.virtual.event import LaggingRecording, OneShotRecording, OneShotSignal
from equipoise.backends.virtual.network import Network
from equipoise.backends.virtual.operation import VirtualOperation
from equipoise.backends.virtual.profiles import (
    PROFILES,
    LinkingOutbox,
    SerialCommunicator,
    SerialNetwork,
)
from equipoise.backends.virtual.scheduling import HostNotifications
from equipoise.hal.conformance import suite
from equipoise.hal.conformance.executors.controlled import ControlledSubject
from equipoise.hal.conformance.search import (
    PropertyUnsupported,
    PropertyViolated,
    SearchSettings,
    search,
)

CASES = 10 if DEEP else 3
IMPORT = "importing-a-backend-starts-nothing"
"""A profile does not change it, nor what long slots and large groups of slots come to: those are
played on the healthy device, and in deep on every profile."""


@pytest.mark.parametrize("name", PROFILES)
def test_profile_keeps_declared_contract(name: str) -> None:
    backend = PROFILES[name]
    subject = ControlledSubject(backend)
    applicable = [
        claim
        for claim in suite.properties()
        if claim.applies_to(subject.traits) and (DEEP or not (claim.large or claim.name == IMPORT))
    ]
    verdicts = {
        claim.name: search(claim, subject, SearchSettings(cases=CASES)) for claim in applicable
    }
    assert {claim: v for claim, v in verdicts.items() if isinstance(v, PropertyViolated)} == {}
    assert sum(isinstance(v, PropertyUnsupported) for v in verdicts.values()) < len(verdicts) // 2


class Unread(HostNotifications):
    """Believes a lagging query even when the host has synchronised."""

    def flush(self) -> None:
        """Nothing is delivered early."""


class SharedSignal(OneShotRecording):
    """Lets all waiters share one native event."""

    def await_by(self) -> OneShotSignal:
        return self._signals[0] if self._signals else super().await_by()


class HastyNetwork(SerialNetwork):
    """Counts the deadline of an operation that could not even start."""

    def due(self) -> list[VirtualOperation]:
        return Network.due(self)


TRAPS = {
    "lagging-query": (
        replace(HEALTHY, mark=LaggingRecording, reports=Unread),
        "one-signal-lets-one-waiter-go-on",
    ),
    "shared-signal": (
        replace(HEALTHY, mark=SharedSignal),
        "launches-run-in-the-order-that-streams-and-events-give",
    ),
    "aliasing-pool": (replace(HEALTHY, device=AliasingDevice), "declared-streams-run-side-by-side"),
    "blocking-links": (replace(HEALTHY, outbox=LinkingOutbox), "sends-need-not-wait-for-receives"),
    "serial-groups": (
        replace(HEALTHY, network=HastyNetwork, communicator=SerialCommunicator),
        "an-unmatched-operation-fails-only-its-communicator",
    ),
}
"""Backends that do not cope, and the property that rejects each."""


@pytest.mark.parametrize(("parts", "name"), TRAPS.values(), ids=TRAPS)
def test_profile_trap_violates_property_without_countermeasure(
    parts: VirtualParts, name: str
) -> None:
    backend = VirtualBackend(parts)
    subject = ControlledSubject(backend)
    assert isinstance(
        search(suite.find(name), subject, SearchSettings(cases=400, max_shrinks=0)),
        PropertyViolated,
    )
