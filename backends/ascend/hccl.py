"""How the ranks of one of HCCL's communicators learn where to meet.

The entry point `equipoise.communicators: hccl`.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Store

from equipoise.backends.ascend import npu_runtime
from equipoise.backends.ascend.hccl_comm import (
    HIGH_PRIORITY_STREAMS,
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
from equipoise.backends.ascend.hccl_streams import hccl_stream_pool
from equipoise.backends.devices.collectives.bootstrap import Bootstrap
from equipoise.backends.devices.collectives.ccl import TRANSFER_DTYPES, CommSpec, Warmup, WarmupOps
from equipoise.backends.devices.collectives.fabric import DeviceCommunicatorBackend
from equipoise.backends.devices.runtime import Device, DeviceRuntime
from equipoise.hal.capabilities import CommunicatorCapabilities, Probe, Unavailable
from equipoise.hal.errors import CommunicatorFailed, Unsupported

LAST_KEY = "version_key"
"""What torch_npu calls its last word: HCCL's own meeting comes next."""


class BootstrapStore(Store):
    """What torch_npu takes for a store: its few words travel as ballots of the control plane.

    Torch_npu's first rank says two words and the others hear them, no more. A store of torch's
    would be a connection that lives as long as the group, and a wait in it would block for ever
    where the launcher is stopped.

    HCCL's own meeting has a time-out of two minutes and no other end. So the first rank enters it
    only when all others have heard the last word, which is when they enter it: a rank that was lost
    before strands nobody there.

    Args:
        bootstrap: carries the words; the first of its ranks speaks.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        super().__init__()
        self._bootstrap: Bootstrap | None = bootstrap

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Say a word; only the first rank does. Torch gives bytes, whatever its stub says.

        Raises `BallotIncomplete` when somebody does not hear the last one in time.
        """
        bootstrap = self._require_bootstrap(key)
        bootstrap.publish(key, bytes(value))
        if key == LAST_KEY:
            bootstrap.wait_for("heard", bootstrap.ranks[1:])

    def get(self, key: str) -> bytes:
        """Hear it. Raises `BallotIncomplete` when it does not come in time."""
        bootstrap = self._require_bootstrap(key)
        (word,) = bootstrap.wait_for(key, bootstrap.ranks[:1])
        if key == LAST_KEY:
            bootstrap.publish("heard")
        return word

    def detach(self) -> None:
        """Let go of the control plane: the group lives on, perhaps for ever, and asks no more."""
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
            dtypes=TRANSFER_DTYPES,
            reductions=sum_dtypes(),
        )

    def probe(self) -> Probe:
        """Whether torch_npu is here and sees a device, and is not set to block the host."""
        return Unavailable(reason) if (reason := blocking_setting()) else npu_runtime.probe()

    def device(self, rank: int) -> int:
        """What this process has opened, else what the rank's number gives it."""
        opened = self.runtime.selected_device()
        return rank % self.runtime.devices() if opened is None else opened

    def capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured."""
        return self.runtime.is_capturing()

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Nothing in a private format: its bytes are not what its shape says."""
        if not are_plain(tensors):
            raise Unsupported("a tensor in a private format does not travel; send its storage")

    def deferred_event(self, index: int) -> Any:
        """A `torch.npu.ExternalEvent`, of the calling thread's device."""
        return npu_runtime.npu().ExternalEvent()

    def release_stream(self, index: int) -> Any:
        """The first stream of HCCL's pool."""
        return hccl_stream_pool(npu_runtime.npu(), index).release_stream

    def estimate_bytes(self, link: bool) -> int:
        """Bytes of two buffers."""
        return comm_bytes(link_buffer_mib() if link else group_buffer_mib())

    def init_comm(
        self, spec: CommSpec, device: Device, bootstrap: Bootstrap, warmup: Warmup
    ) -> tuple[HcclComm, WarmupOps]:
        """Make a group; its first operation blocks until every member has called it."""
        store, account = (
            BootstrapStore(bootstrap),
            hccl_stream_pool(npu_runtime.npu(), device.index),
        )
        with HIGH_PRIORITY_STREAMS, device.runtime.current(account.reserve_next()):
            group = HcclComm(make_process_group(store, spec), store, account)
            ops = warmup(group, spec.rank, len(spec.ranks), device.torch)
        store.detach()
        group.record_stream(device.torch, spec.name)
        return group, ops


HCCL = DeviceCommunicatorBackend(Hccl())
