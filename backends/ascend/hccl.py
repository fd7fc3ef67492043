"""The entry point `equipoise.communicators: hccl`."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from equipoise.backends.ascend import native
from equipoise.backends.ascend.group import HIGH_PRIORITY_STREAMS, HcclGroup, make_group, plain
from equipoise.backends.ascend.introduction import Introduction
from equipoise.backends.ascend.lanes import lanes
from equipoise.backends.ascend.ledger import taken
from equipoise.backends.ascend.settings import group_buffer, link_buffer, obstacle, sums
from equipoise.backends.devices.collectives.fabric import DeviceCommunicators
from equipoise.backends.devices.collectives.library import Greet, Greeting, Membership
from equipoise.backends.devices.collectives.operands import MOVED
from equipoise.backends.devices.collectives.talk import Talk
from equipoise.backends.devices.runtime import Device, DeviceRuntime
from equipoise.hal.capabilities import CommunicatorCapabilities, Probe, Unavailable
from equipoise.hal.errors import Unsupported


class Hccl:
    """HCCL, through torch_npu's process groups."""

    name = "hccl"
    title = "HCCL"
    runtime: DeviceRuntime = native.RUNTIME
    one_at_a_time = True
    """The first operation of a group blocks torch_npu's launch queue, the process's, until every
    member has issued it; and the stream of a group is the next one of a pool."""

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """What HCCL can do, as the environment sets it up."""
        return CommunicatorCapabilities(
            stream_ordered=True,
            independent_groups=False,  # HCCL promises nothing about communicators of one device
            abort=False,  # torch_npu's gives the communicator back, and what is in flight hangs
            rebuild=True,
            shared_devices=False,  # HCCL refuses the second rank of a device
            dtypes=MOVED,
            reductions=sums(),
        )

    def probe(self) -> Probe:
        """Whether torch_npu is here and sees a device, and is not set to block the host."""
        return Unavailable(why) if (why := obstacle()) else native.probe()

    def device(self, rank: int) -> int:
        """What this process has opened, else what the rank's number gives it."""
        opened = self.runtime.chosen()
        return rank % self.runtime.devices() if opened is None else opened

    def capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured."""
        return self.runtime.capturing()

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Nothing in a private format: its bytes are not what its shape says."""
        if not plain(tensors):
            raise Unsupported("a tensor in a private format does not travel; send its storage")

    def promise(self, index: int) -> Any:
        """A `torch.npu.ExternalEvent`, of the calling thread's device."""
        return native.npu().ExternalEvent()

    def bell(self, index: int) -> Any:
        """The first stream of HCCL's pool."""
        return lanes(native.npu(), index).bell

    def takes(self, link: bool) -> int:
        """Bytes of two buffers."""
        return taken(link_buffer() if link else group_buffer())

    def meet(
        self, membership: Membership, device: Device, talk: Talk, greet: Greet
    ) -> tuple[HcclGroup, Greeting]:
        """Make a group; its first operation blocks until every member has called it."""
        store, account = Introduction(talk), lanes(native.npu(), device.index)
        with HIGH_PRIORITY_STREAMS, device.runtime.current(account.aim()):
            group = HcclGroup(make_group(store, membership), store, account)
            greeting = greet(group, membership.rank, len(membership.ranks), device.torch)
        store.forget()
        group.settle(device.torch, membership.name)
        return group, greeting


HCCL = DeviceCommunicators(Hccl())
