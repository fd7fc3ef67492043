"""How the ranks of one of HCCL's communicators learn where to meet.

The entry point `equipoise.communicators: hccl`.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Store

from equipoise.backends.ascend import npu_runtime
from equipoise.backends.ascend.hccl_comm import HIGH_PRIORITY_STREAMS, HcclGroup, make_group, plain
from equipoise.backends.ascend.hccl_settings import group_buffer, link_buffer, obstacle, sums, taken
from equipoise.backends.ascend.hccl_streams import lanes
from equipoise.backends.devices.collectives.bootstrap import Talk
from equipoise.backends.devices.collectives.ccl import MOVED, Greet, Greeting, Membership
from equipoise.backends.devices.collectives.fabric import DeviceCommunicators
from equipoise.backends.devices.runtime import Device, DeviceRuntime
from equipoise.hal.capabilities import CommunicatorCapabilities, Probe, Unavailable
from equipoise.hal.errors import CommunicatorFailed, Unsupported

LAST = "version_key"
"""What torch_npu calls its last word: HCCL's own meeting comes next."""


class Introduction(Store):
    """What torch_npu takes for a store: its few words travel as ballots of the control plane.

    Torch_npu's first rank says two words and the others hear them, no more. A store of torch's
    would be a connection that lives as long as the group, and a wait in it would block for ever
    where the launcher is stopped.

    HCCL's own meeting has a time-out of two minutes and no other end. So the first rank enters it
    only when all others have heard the last word, which is when they enter it: a rank that was lost
    before strands nobody there.

    Args:
        talk: carries the words; the first of its ranks speaks.
    """

    def __init__(self, talk: Talk) -> None:
        super().__init__()
        self._talk: Talk | None = talk

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Say a word; only the first rank does. Torch gives bytes, whatever its stub says.

        Raises `BallotIncomplete` when somebody does not hear the last one in time.
        """
        talk = self._among(key)
        talk.say(key, bytes(value))
        if key == LAST:
            talk.hear("heard", talk.ranks[1:])

    def get(self, key: str) -> bytes:
        """Hear it. Raises `BallotIncomplete` when it does not come in time."""
        talk = self._among(key)
        (word,) = talk.hear(key, talk.ranks[:1])
        if key == LAST:
            talk.say("heard")
        return word

    def forget(self) -> None:
        """Let go of the control plane: the group lives on, perhaps for ever, and asks no more."""
        self._talk = None

    def _among(self, key: str) -> Talk:
        if self._talk is None:
            raise CommunicatorFailed(f"torch_npu asks for {key!r} after the introduction")
        return self._talk


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
            dtypes=MOVED,
            reductions=sums(),
        )

    def probe(self) -> Probe:
        """Whether torch_npu is here and sees a device, and is not set to block the host."""
        return Unavailable(why) if (why := obstacle()) else npu_runtime.probe()

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
        return npu_runtime.npu().ExternalEvent()

    def bell(self, index: int) -> Any:
        """The first stream of HCCL's pool."""
        return lanes(npu_runtime.npu(), index).bell

    def takes(self, link: bool) -> int:
        """Bytes of two buffers."""
        return taken(link_buffer() if link else group_buffer())

    def meet(
        self, membership: Membership, device: Device, talk: Talk, greet: Greet
    ) -> tuple[HcclGroup, Greeting]:
        """Make a group; its first operation blocks until every member has called it."""
        store, account = Introduction(talk), lanes(npu_runtime.npu(), device.index)
        with HIGH_PRIORITY_STREAMS, device.runtime.current(account.aim()):
            group = HcclGroup(make_group(store, membership), store, account)
            greeting = greet(group, membership.rank, len(membership.ranks), device.torch)
        store.forget()
        group.settle(device.torch, membership.name)
        return group, greeting


HCCL = DeviceCommunicators(Hccl())
