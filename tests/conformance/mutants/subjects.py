"""Virtual devices with some parts replaced, on the executor for controlled worlds."""

import dataclasses
from collections.abc import Callable

from equipoise.backends.virtual.backend import EVERYTHING, VirtualBackend
from equipoise.backends.virtual.parts import HEALTHY
from equipoise.hal.capabilities import Capabilities
from equipoise.hal.conformance.subject import Subject
from equipoise.hal.conformance.virtual import ControlledSubject


def device_with(capabilities: Capabilities = EVERYTHING, **parts: type) -> Callable[[], Subject]:
    """Devices that are healthy except for these parts: for properties of one rank."""

    def subject() -> Subject:
        backend = VirtualBackend(dataclasses.replace(HEALTHY, **parts), capabilities)
        return ControlledSubject(backend)

    return subject


def network_with(**parts: type) -> Callable[[], Subject]:
    """Ranks that are healthy, with the network between them, except for these parts."""

    def subject() -> Subject:
        backend = VirtualBackend(dataclasses.replace(HEALTHY, **parts))
        return ControlledSubject(backend)

    return subject
