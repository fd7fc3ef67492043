"""Holds every expert's weights once per node, in anonymous shared memory.

    Filling -> Sealed -> PoolClosed
    Filling -> PoolClosed           closed early, or sealing failed

The ranks of a node fill the pool together, each its part, and seal it together; each closes by
itself. After sealing, the kernel forbids writes, every part has been read back and compared with
the checksum of what was written, and every rank can read all of it. The memory is freed when the
last process that holds it ends, in whatever way.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
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
from equipoise.balancer.experts.host_pool.shared_memory import HugePages, SharedMapping
from equipoise.hal.accelerator import Topology
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import ExpertPoolError, PoolCorrupted, PoolIncomplete, PoolLeased


@dataclass(frozen=True)
class Filling:
    """The pool is mapped for writing; each rank fills its part.

    Attributes:
        coordinator: exchanges messages with the ranks of the node.
        descriptor: this rank's file descriptor of the memory.
        mapping: mapping of the whole pool.
        contents: the experts in the mapping.
        owners: by expert, the position of the rank that fills it among those that share the pool.
        writers: counts threads that are writing.
        claimed_experts: indices of experts that this rank has begun to fill; guarded by `lock`.
    """

    coordinator: NodeCoordinator
    descriptor: int
    mapping: SharedMapping
    contents: PoolContents
    owners: "Owners"
    writers: "Writers" = field(default_factory=lambda: Writers())
    claimed_experts: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def claim(self, number: int, name: str) -> None:
        """Claims an expert for one writer. Raises `ExpertPoolError` if it was claimed before."""
        with self.lock:
            if number in self.claimed_experts:
                raise ExpertPoolError(f"{name} was filled before")
            self.claimed_experts.add(number)

    def release(self) -> None:
        """Releases the memory, which is freed with its last holder."""
        self.contents.release()
        self.mapping.close_with_last_tensor()
        os.close(self.descriptor)


@dataclass(frozen=True)
class Sealed:
    """No process can write any more; every rank reads all of it."""

    mapping: SharedMapping
    contents: PoolContents

    def release(self) -> None:
        """Releases the memory, which is freed with its last holder."""
        self.contents.release()
        self.mapping.close_with_last_tensor()


@dataclass(frozen=True)
class PoolClosed:
    """Nothing is held, except by tensors that are still in use."""


class Writers:
    """Counts threads that write to a pool, and stops new ones."""

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
        """Refuses further writers. Raises `PoolLeased` if one is still writing."""
        with self._lock:
            self._closed = True
            if self._count:
                raise PoolLeased(f"{self._count} thread(s) have not ended")


Ranks = tuple[int, ...]
Owners = tuple[int, ...]
MAX_EXPERTS_NAMED = 3
"""Maximum number of experts named in an error."""


def owned_experts(layout: PoolLayout, owners: Owners, position: int) -> Iterator[tuple[int, int]]:
    """Yields each (layer, expert) that the rank at `position` fills."""
    for layer in range(layout.layers):
        for expert, owner in enumerate(owners):
            if owner == position:
                yield layer, expert


def interleaved_owners(experts: int, parts: int) -> Owners:
    """Returns owners in turn.

    The memory of every layer is spread over the NUMA nodes of the ranks, which touch it first.
    """
    return tuple(expert % parts for expert in range(experts))


def chosen_owners(layout: PoolLayout, ranks: Ranks, owner_ranks: Sequence[int]) -> Owners:
    """Returns owners by position. Raises `ExpertPoolError` if one does not share the memory."""
    if len(owner_ranks) != layout.experts:
        raise ExpertPoolError(f"{len(owner_ranks)} owners of {layout.experts} experts")
    if absent := sorted({*owner_ranks} - {*ranks}):
        raise ExpertPoolError(f"ranks {absent} cannot share memory with ranks {list(ranks)}")
    return tuple(ranks.index(rank) for rank in owner_ranks)


def map_and_reserve(
    coordinator: NodeCoordinator, layout: PoolLayout, shared: SharedDescriptor, owners: Owners
) -> Filling:
    """Maps the memory and reserves this rank's part; every rank that shares it does so.

    Raises:
        PoolIncomplete: on every rank, if one failed.
    """
    try:
        return _prepare(coordinator, layout, shared, owners)
    except BaseException:
        os.close(shared.descriptor)
        raise


def _prepare(
    coordinator: NodeCoordinator, layout: PoolLayout, shared: SharedDescriptor, owners: Owners
) -> Filling:
    try:
        mapping = SharedMapping.for_writing(shared.descriptor, layout.nbytes)
    except ExpertPoolError as error:
        coordinator.raise_if_any("reserved", str(error), shared.ranks, PoolIncomplete)
        raise
    try:
        own = owned_experts(layout, owners, shared.ranks.index(coordinator.rank))
        complaint = _reserve_pages(coordinator, layout, shared, mapping, own)
        coordinator.raise_if_any("reserved", complaint, shared.ranks, PoolIncomplete)
        contents = PoolContents(layout, mapping.tensor())
        return Filling(coordinator, shared.descriptor, mapping, contents, owners)
    except BaseException:
        mapping.close_with_last_tensor()
        raise


def _reserve_pages(
    coordinator: NodeCoordinator,
    layout: PoolLayout,
    shared: SharedDescriptor,
    mapping: SharedMapping,
    own: Iterable[tuple[int, int]],
) -> str:
    """Reserves this rank's pages, expert by expert; returns an error text, or ""."""
    for layer, expert in own:
        if coordinator.time_left() <= 0.0:
            return f"had no time to reserve expert {expert} of layer {layer} and later ones"
        at = layout.expert_offset(layer, expert)
        if mapping.huge_pages is HugePages.ADVISED:
            mapping.populate(at, layout.stride)
        try:
            shared_memory.reserve(shared.descriptor, at, layout.stride)
        except PoolIncomplete as error:
            return str(error)
    return ""


def seal_pool(state: Filling, layout: PoolLayout, ranks: Ranks, timeout: float) -> Sealed:
    """Seals the pool, on all of `ranks` together.

    Raises as `HostExpertPool.seal`; the memory is released then.
    """
    coordinator, own = state.coordinator, tuple(_own(state, layout, ranks))
    coordinator.renew_deadline(timeout)
    # Each step starts when all ranks have finished the one before: the kernel seals only memory
    # that no process has mapped for writing.
    try:
        _finish_filling(state, layout, ranks, own)
        _seal_memory(state, ranks)
        mapping = _map_read_only(state, layout, ranks)
    except BaseException:
        state.release()
        raise
    os.close(state.descriptor)
    contents = PoolContents(layout, mapping.tensor())
    try:
        coordinator.raise_if_any(
            "verified", _verify_owned(coordinator, own, contents), ranks, PoolCorrupted
        )
    except BaseException:
        contents.release()
        mapping.close_with_last_tensor()
        raise
    return Sealed(mapping, contents)


def _own(state: Filling, layout: PoolLayout, ranks: Ranks) -> Iterator[tuple[int, int]]:
    return owned_experts(layout, state.owners, ranks.index(state.coordinator.rank))


def _finish_filling(
    state: Filling, layout: PoolLayout, ranks: Ranks, own: Sequence[tuple[int, int]]
) -> None:
    """Checks that this rank has filled its part, and unmaps its writable mapping."""
    coordinator = state.coordinator
    missing = [
        expert for expert in own if layout.expert_index(*expert) not in state.claimed_experts
    ]
    complaint = f"has not filled {_format_experts(missing)}" if missing else ""
    try:
        # Writers first: a thread that still writes needs the mapping.
        state.writers.close()
        state.contents.release()
        state.mapping.close()
    except PoolLeased as error:
        complaint = complaint or f"is still filling: {error}"
    coordinator.raise_if_any("filled", complaint, ranks, PoolIncomplete)


def _seal_memory(state: Filling, ranks: Ranks) -> None:
    """Seals the memory on the first rank; the kernel refuses while a process could write."""
    coordinator, complaint = state.coordinator, ""
    if coordinator.rank == ranks[0]:
        try:
            shared_memory.seal(state.descriptor)
        except ExpertPoolError as error:
            complaint = str(error)
        coordinator.publish("sealed", complaint)
    failure = coordinator.collect("sealed", ranks[:1])[ranks[0]]
    if failure:
        raise ExpertPoolError(f"rank {ranks[0]}: {failure}")


def _map_read_only(state: Filling, layout: PoolLayout, ranks: Ranks) -> SharedMapping:
    """Maps the memory read-only, after this rank has checked the seal; publishes a failure."""
    try:
        if not shared_memory.seals(state.descriptor) & shared_memory.WRITE_SEAL:
            raise ExpertPoolError("the pool is not sealed though its first rank said so")
        return SharedMapping.for_reading(state.descriptor, layout.nbytes)
    except ExpertPoolError as error:
        state.coordinator.raise_if_any("verified", str(error), ranks, PoolCorrupted)
        raise


def _verify_owned(
    coordinator: NodeCoordinator, own: Sequence[tuple[int, int]], contents: PoolContents
) -> str:
    """Reads this rank's part back, which can no longer change; returns an error text, or ""."""
    wrong = []
    for layer, expert in own:
        if coordinator.time_left() <= 0.0:
            return f"had no time to verify expert {expert} of layer {layer} and later ones"
        if not contents.verify(layer, expert):
            wrong.append((layer, expert))
    return f"other bytes than were written in {_format_experts(wrong)}" if wrong else ""


def _format_experts(experts: list[tuple[int, int]]) -> str:
    descriptions = [
        f"expert {expert} of layer {layer}" for layer, expert in experts[:MAX_EXPERTS_NAMED]
    ]
    more = len(experts) - len(descriptions)
    return ", ".join(descriptions) + (f" and {more} more" if more else "")


class HostExpertPool:
    """The pool of a node, as held by one rank; see `open`. Any thread may fill and read."""

    def __init__(self, layout: PoolLayout, ranks: tuple[int, ...], state: Filling) -> None:
        self._layout = layout
        self._ranks = ranks
        self._owners, self._position = state.owners, ranks.index(state.coordinator.rank)
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
        owner_ranks: Sequence[int] | None = None,
    ) -> Self:
        """Opens a new pool with as many of `local_ranks` as can share memory.

        All of them call it, with the same arguments, within `timeout` seconds of each other, which
        also bounds how long a rank takes to reserve its part. All pages are reserved here.

        Args:
            control: the control plane.
            local_ranks: this rank and those that may be on its machine: see `ranks_on_node`.
            layout: layout of the pool.
            name: name of the pool, unique on the control plane, for example the model's.
            timeout: seconds.
            owner_ranks: by expert, the rank that fills it in every layer; None: in turn.

        Raises:
            HostMemoryExhausted: the machine has too little memory; none was reserved.
            PoolIncomplete: a rank could not reserve its part.
            RanksDiffer: layouts or owners differ.
            ExpertPoolError: the memory could not be created, or an owner cannot share it. All of
                these are raised on every rank.
            ControlError: a rank did not answer in time.
        """
        coordinator = NodeCoordinator(control, local_ranks, name, timeout)
        owner_text = "in turn" if owner_ranks is None else str(list(owner_ranks))
        coordinator.check_same({**layout.values(), "owners": owner_text})
        shared = join_shared_memory(coordinator, layout)
        try:
            if owner_ranks is None:
                owners = interleaved_owners(layout.experts, len(shared.ranks))
            else:
                owners = chosen_owners(layout, shared.ranks, owner_ranks)
        except BaseException:
            os.close(shared.descriptor)
            raise
        return cls(layout, shared.ranks, map_and_reserve(coordinator, layout, shared, owners))

    @property
    def layout(self) -> PoolLayout:
        """The layout of the pool."""
        return self._layout

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that share the memory, including this one."""
        return self._ranks

    @property
    def huge_pages(self) -> HugePages:
        """Whether the system uses huge pages."""
        return self._huge_pages

    def owned_experts(self) -> Iterator[tuple[int, int]]:
        """Yields each (layer, expert) that this rank has to fill."""
        return owned_experts(self._layout, self._owners, self._position)

    def write(self, layer: int, expert: int, tensors: Sequence[Tensor]) -> None:
        """Stores an expert of this rank's part: a tensor per segment, on any device, any strides.

        Raises:
            ExpertPoolError: before any effect: the expert belongs to another rank or was filled
                before, the tensors do not fit, or the pool is not being filled.
        """
        state = self._state
        if not isinstance(state, Filling):
            raise ExpertPoolError("the pool is not being filled")
        number, name = self._layout.expert_index(layer, expert), f"expert {expert} of layer {layer}"
        if self._owners[expert] != self._position:
            owner = self._ranks[self._owners[expert]]
            raise ExpertPoolError(f"{name} is to be filled by rank {owner}")
        state.contents.check(tensors)
        with state.writers:
            state.claim(number, name)
            state.contents.write(layer, expert, tensors)

    def seal(self, timeout: float) -> None:
        """Seals the pool; collective among the ranks that share the memory.

        Afterwards every rank has filled its part, no process can write, and every byte has been
        read back. If it raises, the pool is closed.

        Raises:
            PoolIncomplete: a rank has not filled all its experts.
            PoolCorrupted: bytes are not those that were written.
            ExpertPoolError: the kernel refused to seal. All of these are raised on every rank.
            ControlError: a rank did not answer within `timeout` seconds.
        """
        state = self._state
        if not isinstance(state, Filling):
            raise ExpertPoolError("the pool is not being filled")
        # Closed meanwhile: if sealing raises, it has released the memory.
        self._state = PoolClosed()
        self._state = seal_pool(state, self._layout, self._ranks, timeout)

    def view(self, layer: int, expert: int) -> tuple[Tensor, ...]:
        """Returns an expert's segments in place, read-only, in the order of the descriptor.

        The kernel kills a process that writes to them. They keep the memory mapped, also after
        `close`. Raises `ExpertPoolError` unless the pool is sealed.
        """
        return self._sealed_state().contents.view(layer, expert)

    def checksum(self, layer: int, expert: int) -> int:
        """Returns `equipoise.hal.checksum` of an expert's bytes, segments concatenated.

        It was computed when the expert was written, and compared when the pool was sealed. Raises
        as `view`.
        """
        return self._sealed_state().contents.checksum(layer, expert)

    def close(self) -> None:
        """Releases the memory; other ranks and views keep it. Can be called again."""
        state = self._state
        self._state = PoolClosed()
        if not isinstance(state, PoolClosed):
            state.release()

    def _sealed_state(self) -> Sealed:
        if not isinstance(self._state, Sealed):
            raise ExpertPoolError(f"the pool is not sealed but {type(self._state).__name__}")
        return self._state


def ranks_on_node(
    control: ControlPlane, topology: Topology, *, name: str, timeout: float
) -> tuple[int, ...]:
    """Returns the ranks whose topology names the same node; collective among all ranks.

    Machines or containers with the same name may be unable to share memory: `HostExpertPool.open`
    detects it. Raises as `ControlPlane.collect`.
    """
    key = f"pool/{name}/node"
    control.cast(key, topology.node.encode())
    nodes = control.collect(key, timeout)
    return tuple(rank for rank, node in enumerate(nodes) if node == topology.node.encode())
