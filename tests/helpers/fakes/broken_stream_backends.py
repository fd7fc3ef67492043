"""Backends that are wrong in one way each, for the command line."""

from dataclasses import replace

from equipoise.backends.virtual.backend import HEALTHY, VirtualBackend
from equipoise.backends.virtual.stream import VirtualStream
from equipoise.hal.capabilities import Probe
from equipoise.hal.errors import EventNotRecorded
from equipoise.hal.stream import Event


class DeafStream(VirtualStream):
    """Takes an event without a point for one that has been reached, as vendors' streams do."""

    def wait(self, event: Event) -> None:
        """Silently does nothing where it should raise (clause O3)."""
        try:
            super().wait(event)
        except EventNotRecorded:
            return


BACKEND = VirtualBackend(replace(HEALTHY, stream=DeafStream))


class LoudBackend(VirtualBackend):
    """Its probe raises where the vendor is absent, and so does everything that needs it."""

    def probe(self) -> Probe:
        """Lets an error of the vendor's out (clause B1)."""
        raise RuntimeError("the driver is not there")


LOUD = LoudBackend()
