"""A machine with two devices, and a communicator that takes one rank on each."""

from dataclasses import replace

from equipoise.backends.cpu.accelerator import CpuBackend
from equipoise.backends.cpu.gloo import GlooBackend
from equipoise.hal.capabilities import CommunicatorCapabilities

DEVICES = 2


class CrowdedBackend(CpuBackend):
    """The CPU, twice."""

    name = "crowded"
    communicator = "helpers.fakes.two_device_backend:LINKS"

    def devices(self) -> int:
        """Two."""
        return DEVICES


class Links(GlooBackend):
    """Gloo, but a device is one rank's."""

    name = "links"

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """Those of gloo, but one."""
        return replace(super().capabilities, shared_devices=False)


BACKEND = CrowdedBackend()
LINKS = Links()
