"""Every expert's weights once per node, in shared memory that has no name in any file system.

    Filling -> Sealed -> PoolClosed
    Filling -> PoolClosed           given up, or sealing failed

The ranks of a node fill the pool together, each its part, and seal it; all leave `Filling`
together, in `seal`, and each closes for itself. Once it is sealed the kernel lets nobody write,
every part has been read back against the checksum of what was written, and every rank reads all of
it. The memory ends with the last process that holds it, however that ends.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from equipoise.balancer.experts.host_pool import shared_memory
from equipoise.balancer.experts.host_pool.layout import PoolContents, PoolLayout
from equipoise.balancer.experts.host_pool.rendezvous import (
    NodeCoordinator,
    SharedDescriptor,
    join_shared_memory,
)
from equipoise.balancer.experts.host_pool.shared_memory import HugePages, Mapping
from equipoise.hal.accelerator import Topology
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import ExpertPoolError, PoolDamaged, PoolIncomplete, PoolLeased


@dataclass(frozen=True)
class Filling:
    """Mapped to be written; each rank fills its part.

    Attributes:
        council: where the ranks of the node meet.
        descriptor: of the memory, this rank's own.
        mapping: of the whole pool.
        contents: over the mapping.
        writers: threads that are writing.
        filled: numbers of the experts that this rank has begun to fill; guarded by `lock`.
    """

    council: NodeCoordinator
    descriptor: int
    mapping: Mapping
    contents: PoolContents
    writers: "Writers" = field(default_factory=lambda: Writers())
    filled: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def claim(self, number: int, name: str) -> None:
        """Fill `number`, once. Raises `ExpertPoolError`."""
        with self.lock:
            if number in self.filled:
                raise ExpertPoolError(f"{name} was filled before")
            self.filled.add(number)

    def release(self) -> None:
        """Let go of the memory, which ends with the last that holds it."""
        self.contents.release()
        self.mapping.abandon()
        os.close(self.descriptor)


@dataclass(frozen=True)
class Sealed:
    """Nobody can write any more; everybody reads all of it."""

    mapping: Mapping
    contents: PoolContents

    def release(self) -> None:
        """Let go of the memory, which ends with the last that holds it."""
        self.contents.release()
        self.mapping.abandon()


@dataclass(frozen=True)
class PoolClosed:
    """Nothing is held, except by tensors that somebody has kept."""


class Writers:
    """Threads that write to a pool that is being filled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._lock:
            if self._closed:
                raise ExpertPoolError("the pool takes no more writers")
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1

    def close(self) -> None:
        """Let no further one in. Raises `PoolLeased` where one still writes."""
        with self._lock:
            self._closed = True
            if self._count:
                raise PoolLeased(f"{self._count} thread(s) have not ended")


Ranks = tuple[int, ...]
SHOWN = 3
"""How many experts a complaint names."""


def owned(layout: PoolLayout, place: int, parts: int) -> Iterator[tuple[int, int]]:
    """Each (layer, expert) that the rank at `place` of `parts` fills.

    Every so many-th, so that the memory of every layer is spread over the NUMA nodes of the ranks
    that touch it first.
    """
    for layer in range(layout.layers):
        for expert in range(place, layout.experts, parts):
            yield layer, expert


def map_and_reserve(
    council: NodeCoordinator, layout: PoolLayout, gathered: SharedDescriptor
) -> Filling:
    """Map the memory and reserve this rank's part; so does every rank that holds it.

    Raises:
        PoolIncomplete: on every rank, if one could not.
    """
    try:
        return _prepare(council, layout, gathered)
    except BaseException:
        os.close(gathered.descriptor)
        raise


def _prepare(council: NodeCoordinator, layout: PoolLayout, gathered: SharedDescriptor) -> Filling:
    try:
        mapping = Mapping.to_write(gathered.descriptor, layout.total)
    except ExpertPoolError as error:
        council.raise_if_any("reserved", str(error), gathered.ranks, PoolIncomplete)
        raise
    try:
        complaint = _reserve(council, layout, gathered, mapping)
        council.raise_if_any("reserved", complaint, gathered.ranks, PoolIncomplete)
        return Filling(
            council, gathered.descriptor, mapping, PoolContents(layout, mapping.tensor())
        )
    except BaseException:
        mapping.abandon()
        raise


def _reserve(
    council: NodeCoordinator, layout: PoolLayout, gathered: SharedDescriptor, mapping: Mapping
) -> str:
    """Take this rank's pages, expert by expert; what went wrong, or ""."""
    place, parts = gathered.ranks.index(council.rank), len(gathered.ranks)
    for layer, expert in owned(layout, place, parts):
        if council.left() <= 0.0:
            return f"had no time to reserve expert {expert} of layer {layer} and later ones"
        at = layout.at(layer, expert)
        if mapping.huge_pages is HugePages.ADVISED:
            mapping.populate(at, layout.stride)
        try:
            shared_memory.reserve(gathered.descriptor, at, layout.stride)
        except PoolIncomplete as error:
            return str(error)
    return ""


def seal_pool(state: Filling, layout: PoolLayout, ranks: Ranks, timeout: float) -> Sealed:
    """From filling to sealed, on all of `ranks` together; each step begins when all did the last.

    Raises as `HostExpertPool.seal`; the memory is released then.
    """
    council = state.council
    council.renew(timeout)
    try:
        _finish(state, layout, ranks)
        _forbid(state, ranks)
        mapping = _map(state, layout, ranks)
    except BaseException:
        state.release()
        raise
    os.close(state.descriptor)
    contents = PoolContents(layout, mapping.tensor())
    try:
        council.raise_if_any(
            "verified", _verify(council, layout, ranks, contents), ranks, PoolDamaged
        )
    except BaseException:
        contents.release()
        mapping.abandon()
        raise
    return Sealed(mapping, contents)


def _finish(state: Filling, layout: PoolLayout, ranks: Ranks) -> None:
    """Everything is written, and mapped to be written by nobody."""
    council = state.council
    mine = owned(layout, ranks.index(council.rank), len(ranks))
    missing = [which for which in mine if layout.number(*which) not in state.filled]
    complaint = f"has not filled {_named(missing)}" if missing else ""
    try:
        state.writers.close()
        state.contents.release()
        state.mapping.close()
    except PoolLeased as error:
        complaint = complaint or f"is still filling: {error}"
    council.raise_if_any("filled", complaint, ranks, PoolIncomplete)


def _forbid(state: Filling, ranks: Ranks) -> None:
    """The first rank seals; the kernel does it only if no process could still write."""
    council, complaint = state.council, ""
    if council.rank == ranks[0]:
        try:
            shared_memory.seal(state.descriptor)
        except ExpertPoolError as error:
            complaint = str(error)
        council.publish("sealed", complaint)
    told = council.collect("sealed", ranks[:1])[ranks[0]]
    if told:
        raise ExpertPoolError(f"rank {ranks[0]}: {told}")


def _map(state: Filling, layout: PoolLayout, ranks: Ranks) -> Mapping:
    """To be read, once this rank has seen the seal itself. A failure is told to the others."""
    try:
        if not shared_memory.seals(state.descriptor) & shared_memory.READ_ONLY:
            raise ExpertPoolError("the pool is not sealed though its first rank said so")
        return Mapping.to_read(state.descriptor, layout.total)
    except ExpertPoolError as error:
        state.council.raise_if_any("verified", str(error), ranks, PoolDamaged)
        raise


def _verify(
    council: NodeCoordinator, layout: PoolLayout, ranks: Ranks, contents: PoolContents
) -> str:
    """Read this rank's part back, now that it cannot change; what is wrong with it, or ""."""
    wrong = []
    for layer, expert in owned(layout, ranks.index(council.rank), len(ranks)):
        if council.left() <= 0.0:
            return f"had no time to verify expert {expert} of layer {layer} and later ones"
        if not contents.verify(layer, expert):
            wrong.append((layer, expert))
    return f"other bytes than were written in {_named(wrong)}" if wrong else ""


def _named(experts: list[tuple[int, int]]) -> str:
    named = [f"expert {expert} of layer {layer}" for layer, expert in experts[:SHOWN]]
    more = len(experts) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


class HostExpertPool:
    """One rank's hold on its node's pool; made by `open`. Any thread may fill and read."""

    def __init__(self, layout: PoolLayout, ranks: tuple[int, ...], state: Filling) -> None:
        self._layout = layout
        self._ranks = ranks
        self._place = ranks.index(state.council.rank)
        self._huge_pages = state.mapping.huge_pages
        self._state: Filling | Sealed | PoolClosed = state

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
            AgreementLost: layouts differ.
            ExpertPoolError: the memory could not be made. All of these are raised on every rank
                alike.
            ControlError: a rank did not answer in time.
        """
        council = NodeCoordinator(control, local_ranks, name, timeout)
        council.check_same(layout.values())
        gathered = join_shared_memory(council, layout)
        return cls(layout, gathered.ranks, map_and_reserve(council, layout, gathered))

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

    def owned(self) -> Iterator[tuple[int, int]]:
        """Each (layer, expert) that this rank has to fill."""
        return owned(self._layout, self._place, len(self._ranks))

    def write(self, layer: int, expert: int, tensors: Sequence[Tensor]) -> None:
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
        with state.writers:
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
        self._state = PoolClosed()
        self._state = seal_pool(state, self._layout, self._ranks, timeout)

    def view(self, layer: int, expert: int) -> tuple[Tensor, ...]:
        """An expert's segments in place, in the order of the descriptor, only to be read.

        The kernel kills a process that writes to them. They keep the memory mapped, also after
        `close`. Raises `ExpertPoolError` unless the pool is sealed.
        """
        return self._sealed().contents.view(layer, expert)

    def checksum(self, layer: int, expert: int) -> int:
        """`equipoise.hal.checksum` of an expert's bytes, segments back to back.

        That of what was written, which sealing compared with what is stored. Raises as `view`.
        """
        return self._sealed().contents.checksum(layer, expert)

    def close(self) -> None:
        """Let go of the memory; the other ranks, and views, keep it. Any number of times."""
        state = self._state
        self._state = PoolClosed()
        if not isinstance(state, PoolClosed):
            state.release()

    def _sealed(self) -> Sealed:
        if not isinstance(self._state, Sealed):
            raise ExpertPoolError(f"the pool is not sealed but {type(self._state).__name__}")
        return self._state


def ranks_on_node(
    control: ControlPlane, topology: Topology, *, name: str, timeout: float
) -> tuple[int, ...]:
    """Ranks whose topology names the same node as this rank's; every rank calls it.

    A name may be shared by machines or containers that cannot share memory: `HostExpertPool.open`
    finds out. Raises as `ControlPlane.collect`.
    """
    question = f"pool/{name}/node"
    control.cast(question, topology.node.encode())
    nodes = control.collect(question, timeout)
    return tuple(rank for rank, node in enumerate(nodes) if node == topology.node.encode())
