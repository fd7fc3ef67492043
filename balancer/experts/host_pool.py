"""Every expert's weights once per node, in shared memory that no name leads to.

The ranks of a node fill it together, each its part, and seal it; from then on the kernel lets
nobody write, every part has been read back against the checksum of what was written, and every
rank reads all of it. The memory ends with the last process that holds it, however that ends.
"""

from collections.abc import Iterator, Sequence
from typing import Self

from torch import Tensor

from equipoise.balancer.experts.host.council import Council
from equipoise.balancer.experts.host.gathering import gather
from equipoise.balancer.experts.host.layout import PoolLayout
from equipoise.balancer.experts.host.memory import HugePages
from equipoise.balancer.experts.host.sealing import owned, prepare, seal
from equipoise.balancer.experts.host.states import Closed, Filling, PoolLease, Sealed
from equipoise.hal.accelerator import Topology
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import ExpertPoolError

CLOSING = 10.0
"""Seconds that leases get to be given back."""


class ExpertPool:
    """One rank's hold on its node's pool; made by `open`. Any thread may fill and read."""

    def __init__(self, layout: PoolLayout, ranks: tuple[int, ...], state: Filling) -> None:
        self._layout = layout
        self._ranks = ranks
        self._place = ranks.index(state.council.rank)
        self._huge_pages = state.mapping.huge_pages
        self._state: Filling | Sealed | Closed = state

    @classmethod
    def open(
        cls,
        control: ControlPlane,
        local_ranks: Sequence[int],
        layout: PoolLayout,
        *,
        name: str,
        timeout: float,
    ) -> Self:
        """A fresh pool with as many of `local_ranks` as can share memory.

        All of them call it, with the same arguments, within `timeout` seconds of each other, which
        also bounds how long a rank takes to reserve its part. The pages are taken here.

        Args:
            control: where the ranks meet.
            local_ranks: this rank and those that may be on its machine: `neighbours` knows.
            layout: what is to be stored.
            name: of the model, say; no two pools of one control plane share one.
            timeout: seconds.

        Raises:
            NoRoom: the machine has not so much memory; before any of it was taken.
            PoolIncomplete: a rank could not reserve its part.
            ExpertPoolError: layouts differ, or the memory could not be made. All of these are
                raised on every rank alike.
            ControlError: a rank did not answer in time.
        """
        council = Council(control, local_ranks, name, timeout)
        _compare(council, layout)
        gathered = gather(council, layout)
        return cls(layout, gathered.ranks, prepare(council, layout, gathered))

    @property
    def layout(self) -> PoolLayout:
        """What is stored, and where."""
        return self._layout

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that share the memory, this one included."""
        return self._ranks

    @property
    def huge_pages(self) -> HugePages:
        """Whether the system was willing to use them."""
        return self._huge_pages

    def mine(self) -> Iterator[tuple[int, int]]:
        """Each (layer, expert) that this rank has to fill."""
        return owned(self._layout, self._place, len(self._ranks))

    def fill(self, layer: int, expert: int, tensors: Sequence[Tensor]) -> None:
        """Store an expert of this rank's part: a tensor per segment, of any device and stride.

        Raises:
            ExpertPoolError: before any effect. The expert is another rank's or was filled before,
                the tensors do not fit, or the pool is not being filled.
        """
        state = self._state
        if not isinstance(state, Filling):
            raise ExpertPoolError("the pool is not being filled")
        number, name = self._layout.number(layer, expert), f"expert {expert} of layer {layer}"
        if expert % len(self._ranks) != self._place:
            owner = self._ranks[expert % len(self._ranks)]
            raise ExpertPoolError(f"{name} is to be filled by rank {owner}")
        state.contents.check(tensors)
        with state.users:
            state.claim(number, name)
            state.contents.write(layer, expert, tensors)

    def seal(self, timeout: float) -> None:
        """End the filling, on all ranks that share the memory: they call it together.

        When it returns, every rank has filled its part, nobody can write to it any more, and every
        byte has been read back. When it raises, the pool is closed.

        Raises:
            PoolIncomplete: a rank has not filled all its experts.
            PoolDamaged: bytes are not those that were written.
            ExpertPoolError: the kernel refused to seal. All of these on every rank alike.
            ControlError: a rank did not answer within `timeout` seconds.
        """
        state = self._state
        if not isinstance(state, Filling):
            raise ExpertPoolError("the pool is not being filled")
        self._state = Closed()
        self._state = seal(state, self._layout, self._ranks, timeout)

    def view(self, layer: int, expert: int) -> tuple[Tensor, ...]:
        """An expert's segments in place, in the order of the descriptor, only to be read.

        The kernel kills a process that writes to them. They keep the memory mapped, also after
        `close`. Raises `ExpertPoolError` unless the pool is sealed.
        """
        return self._sealed().contents.view(layer, expert)

    def lease(self, experts: Sequence[tuple[int, int]]) -> PoolLease:
        """Views of each (layer, expert) that `close` waits for. Raises as `view` does."""
        state = self._sealed()
        return PoolLease(state.users, [state.contents.view(*which) for which in experts])

    def checksum(self, layer: int, expert: int) -> int:
        """`equipoise.hal.checksum` of an expert's bytes, segments back to back.

        That of what was written, which sealing compared with what is stored. Raises as `view`.
        """
        return self._sealed().contents.noted(layer, expert)

    def close(self, timeout: float = CLOSING) -> None:
        """Let go of the memory; the other ranks keep it. Any number of times.

        Raises:
            PoolLeased: a lease was not given back within `timeout` seconds. Nobody gets another,
                and the memory stays until a later `close` succeeds.
        """
        state = self._state
        if isinstance(state, Sealed):
            state.users.drain(timeout)
        self._state = Closed()
        if not isinstance(state, Closed):
            state.release()

    def _sealed(self) -> Sealed:
        if not isinstance(self._state, Sealed):
            raise ExpertPoolError(f"the pool is not sealed but {type(self._state).__name__}")
        return self._state


def neighbours(
    control: ControlPlane, topology: Topology, *, name: str, timeout: float
) -> tuple[int, ...]:
    """Ranks whose topology names the same node as this rank's; every rank calls it.

    A name may be shared by machines or containers that cannot share memory: `ExpertPool.open`
    finds out. Raises as `ControlPlane.collect`.
    """
    question = f"pool/{name}/node"
    control.cast(question, topology.node.encode())
    nodes = control.collect(question, timeout)
    return tuple(rank for rank, node in enumerate(nodes) if node == topology.node.encode())


def _compare(council: Council, layout: PoolLayout) -> None:
    """Raise `ExpertPoolError` on every rank if one has another layout."""
    council.say("layout", layout.digest.hex())
    heard = council.hear("layout", council.ranks)
    first = council.ranks[0]
    others = [str(rank) for rank, digest in heard.items() if digest != heard[first]]
    if others:
        raise ExpertPoolError(f"rank {', '.join(others)}: another layout than rank {first}'s")
