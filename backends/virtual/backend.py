"""The virtual backend: a healthy one, and whatever is made from other parts."""

from equipoise.backends.virtual.accelerator import VirtualAccelerator
from equipoise.backends.virtual.parts import HEALTHY, Parts
from equipoise.backends.virtual.world import EagerWorld, World
from equipoise.hal.capabilities import Available, Capabilities, Probe, SlotFormat
from equipoise.hal.errors import BackendUnavailable
from equipoise.hal.stream import Role

EVERYTHING = Capabilities(
    streams=len(Role),
    stream_lock=True,
    copy_independent_of_launch=True,
    graph_capture=True,
    pinned_memory=True,
    slot_formats=frozenset(SlotFormat),
)
"""All that an accelerator can declare."""


class VirtualBackend:
    """The entry point `equipoise.accelerators: virtual`.

    Args:
        parts: what its worlds are made from.
        capabilities: what its devices declare.
    """

    name = "virtual"
    communicator = "virtual"

    def __init__(self, parts: Parts = HEALTHY, capabilities: Capabilities = EVERYTHING) -> None:
        self._parts = parts
        self._capabilities = capabilities

    @property
    def capabilities(self) -> Capabilities:
        """As it was made."""
        return self._capabilities

    @property
    def parts(self) -> Parts:
        """What its worlds are made from."""
        return self._parts

    def probe(self) -> Probe:
        """Always there."""
        return Available("one thread, no clock; every interleaving is chosen by a schedule")

    def open(self, index: int) -> VirtualAccelerator:
        """The device of a world of one rank, in which everything moves at once."""
        if index != 0:
            raise BackendUnavailable(f"the virtual backend opens device 0 only, not {index}")
        return EagerWorld(1, b"", self._parts, self._capabilities).accelerator(0)

    def world(self, size: int, schedule: bytes) -> World:
        """Ranks on a schedule."""
        return World(size, schedule, self._parts, self._capabilities)
