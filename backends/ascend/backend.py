"""The entry point `equipoise.accelerators: ascend`."""

from equipoise.backends.ascend import native
from equipoise.backends.ascend.accelerator import AscendAccelerator
from equipoise.backends.ascend.replica_tables import table_bytes
from equipoise.hal.capabilities import Capabilities, Probe, SlotFormat, Unavailable
from equipoise.hal.errors import BackendUnavailable
from equipoise.hal.stream import Role


class AscendBackend:
    """Ascend NPUs through torch_npu."""

    name = "ascend"
    communicator = "hccl"

    @property
    def capabilities(self) -> Capabilities:
        """What torch_npu and the driver that are installed here can do.

        Streams are the hardware's own; a wait for a value holds up its stream and nothing else.
        """
        locks = native.value_waits()
        return Capabilities(
            streams=len(Role),
            stream_lock=locks,
            copy_independent_of_launch=locks,
            graph_capture=not native.RUNTIME.uncapturable(),
            pinned_memory=True,
            slot_formats=frozenset(SlotFormat),
        )

    def probe(self) -> Probe:
        """Whether torch_npu and CANN are here, and a device; in one line why not."""
        return native.probe()

    def devices(self) -> int:
        """How many devices can be opened."""
        return 0 if isinstance(self.probe(), Unavailable) else native.RUNTIME.devices()

    def routing_bytes(self, layers: int, experts: int, slots: int) -> int:
        """Of the tables of replicas."""
        return table_bytes(layers, experts, slots)

    def open(self, index: int) -> AscendAccelerator:
        """Open that device, and make it the calling thread's."""
        answer = self.probe()
        if isinstance(answer, Unavailable):
            raise BackendUnavailable(answer.reason)
        found = native.RUNTIME.devices()
        if not 0 <= index < found:
            raise BackendUnavailable(f"there are {found} device(s), from 0: no device {index}")
        native.RUNTIME.choose(index)
        return AscendAccelerator(index)
