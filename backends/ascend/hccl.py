"""The HCCL backend: the entry point `equipoise.communicators: hccl`."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Store

from equipoise.backends.ascend import npu_runtime
from equipoise.backends.ascend.hccl_comm import (
    HcclComm,
    are_plain,
    make_process_group,
)
from equipoise.backends.ascend.hccl_settings import (
    blocking_setting,
    comm_bytes,
    group_buffer_mib,
    link_buffer_mib,
    sum_dtypes,
)
from equipoise.backends.ascend.hccl_streams import HIGH_PRIORITY_STREAMS, hccl_stream_pool
from equipoise.backends.devices.collectives.bootstrap import Bootstrap
from equipoise.backends.devices.collectives.ccl import TRANSFER_DTYPES, CommSpec, Warmup, WarmupOps
from equipoise.backends.devices.collectives.fabric import DeviceCommunicatorBackend
from equipoise.backends.devices.runtime import Device, DeviceRuntime
from equipoise.hal.capabilities import CommunicatorCapabilities, Probe, Unavailable
from equipoise.hal.errors import CommunicatorFailed, Unsupported

READ = "read "
"""Before a key, the word by which a rank says that it has read it."""


class BootstrapStore(Store):
    """The store that torch_npu's process group gets: its keys travel as ballots of the control
    plane.

    Torch_npu's first rank sets keys and the others get them: one in 2.10, two in 2.13. One of
    torch's stores would be a connection that lives as long as the group, and a wait in it blocks
    for ever if the launcher is stopped.

    HCCL's own rendezvous ends after two minutes at the earliest. So the first rank goes on from a
    key only when all others have read it. After the last one that is when they enter the
    rendezvous, whichever key is the last: a rank that was lost before does not block them there.

    Args:
        bootstrap: carries the keys; only the first of its ranks sets some.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        super().__init__()
        self._bootstrap: Bootstrap | None = bootstrap

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Set a key; only the first rank does. The value is bytes, despite torch's stub.

        Raises `BallotIncomplete` if a rank does not read the key in time.
        """
        bootstrap = self._require_bootstrap(key)
        bootstrap.publish(key, bytes(value))
        bootstrap.wait_for(READ + key, bootstrap.ranks[1:])

    def get(self, key: str) -> bytes:
        """Get a key. Raises `BallotIncomplete` if it is not set in time."""
        bootstrap = self._require_bootstrap(key)
        (word,) = bootstrap.wait_for(key, bootstrap.ranks[:1])
        bootstrap.publish(READ + key)
        return word

    def detach(self) -> None:
        """Drop the control plane: the group keeps this store, perhaps for ever, and does not use it
        again."""
        self._bootstrap = None

    def _require_bootstrap(self, key: str) -> Bootstrap:
        if self._bootstrap is None:
            raise CommunicatorFailed(f"torch_npu asks for {key!r} after the introduction")
        return self._bootstrap


class Hccl:
    """HCCL, through torch_npu's process groups."""

    name = "hccl"
    title = "HCCL"
    runtime: DeviceRuntime = npu_runtime.RUNTIME
    one_at_a_time = True
    """The first operation of a group blocks the process's launch queue in torch_npu until every
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
            dtypes=TRANSFER_DTYPES,
            reductions=sum_dtypes(),
        )

    def probe(self) -> Probe:
        """Whether torch_npu is here and sees a device, and is not set to block the host."""
        return Unavailable(reason) if (reason := blocking_setting()) else npu_runtime.probe()

    def device(self, rank: int) -> int:
        """The device that this process has opened, else the one of the rank's number."""
        device_index = self.runtime.selected_device()
        return rank % self.runtime.devices() if device_index is None else device_index

    def capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured."""
        return self.runtime.is_capturing()

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise `Unsupported` for a private format, whose bytes are not what its shape says."""
        if not are_plain(tensors):
            raise Unsupported("a tensor in a private format does not travel; send its storage")

    def deferred_event(self, index: int) -> Any:
        """A `torch.npu.ExternalEvent`, of the calling thread's device."""
        return npu_runtime.npu().ExternalEvent()

    def release_stream(self, index: int) -> Any:
        """The first stream of HCCL's pool, on which nothing ever waits."""
        return hccl_stream_pool(npu_runtime.npu(), index).release_stream

    def estimate_bytes(self, link: bool) -> int:
        """Bytes of a communicator's two buffers."""
        return comm_bytes(link_buffer_mib() if link else group_buffer_mib())

    def init_comm(
        self, spec: CommSpec, device: Device, bootstrap: Bootstrap, warmup: Warmup
    ) -> tuple[HcclComm, WarmupOps]:
        """Make a group; its first operation blocks until every member has called it."""
        store = BootstrapStore(bootstrap)
        pool = hccl_stream_pool(npu_runtime.npu(), device.index)
        # The stream is reserved right before torch_npu takes it, in the warm-up's first operation.
        with HIGH_PRIORITY_STREAMS, device.runtime.current(pool.reserve_next()):
            group = HcclComm(make_process_group(store, spec), store, pool)
            ops = warmup(group, spec.rank, len(spec.ranks), device.torch)
        store.detach()
        group.record_stream(device.torch, spec.name)
        return group, ops


HCCL = DeviceCommunicatorBackend(Hccl())
