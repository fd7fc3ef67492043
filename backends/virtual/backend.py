"""The virtual backend: a healthy one, and whatever is made from other parts."""

import torch

from equipoise.backends.virtual.accelerator import VirtualAccelerator
from equipoise.backends.virtual.collective import SUMMED
from equipoise.backends.virtual.parts import HEALTHY, Parts
from equipoise.backends.virtual.world import EagerWorld, World
from equipoise.hal.capabilities import (
    Available,
    Capabilities,
    CommunicatorCapabilities,
    Probe,
    SlotFormat,
)
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

EVERY_OPERATION = CommunicatorCapabilities(
    stream_ordered=True,
    independent_groups=True,
    abort=True,
    rebuild=True,
    shared_devices=True,
    dtypes=frozenset(
        {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
        | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
        | {torch.float8_e4m3fn, torch.float8_e5m2}
    ),
    reductions=frozenset(SUMMED),
)
"""All that a communicator can declare."""


class VirtualBackend:
    """The entry point `equipoise.accelerators: virtual`.

    Args:
        parts: what its worlds are made from.
        capabilities: what its devices declare.
        groups: what its communicators declare.
    """

    name = "virtual"
    communicator = "virtual"

    def __init__(
        self,
        parts: Parts = HEALTHY,
        capabilities: Capabilities = EVERYTHING,
        groups: CommunicatorCapabilities = EVERY_OPERATION,
    ) -> None:
        self._parts = parts
        self._capabilities = capabilities
        self._groups = groups

    @property
    def capabilities(self) -> Capabilities:
        """As it was made."""
        return self._capabilities

    @property
    def parts(self) -> Parts:
        """What its worlds are made from."""
        return self._parts

    @property
    def groups(self) -> CommunicatorCapabilities:
        """What its communicators declare."""
        return self._groups

    def probe(self) -> Probe:
        """Always there."""
        return Available("one thread, no clock; every interleaving is chosen by a schedule")

    def devices(self) -> int:
        """One; a world has one for each of its ranks."""
        return 1

    def open(self, index: int) -> VirtualAccelerator:
        """The device of a world of one rank, in which everything moves at once."""
        if index != 0:
            raise BackendUnavailable(f"the virtual backend opens device 0 only, not {index}")
        return self.alone().accelerator(0)

    def alone(self) -> World:
        """A world of one rank, in which everything moves at once."""
        return EagerWorld(1, b"", self._parts, self._capabilities, self._groups)

    def world(self, size: int, schedule: bytes) -> World:
        """Ranks on a schedule."""
        return World(size, schedule, self._parts, self._capabilities, self._groups)
