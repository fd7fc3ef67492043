"""Writes weights from host memory into slots that no stream reads, and verifies them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from equipoise.balancer.experts.runtime.jobs import Job, stream_idle
from equipoise.balancer.experts.transfer.copy_threads import CopyHandle, CopyThreadPool, HostCopy
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.checksum import MASK64
from equipoise.hal.errors import SlotError, Unsupported
from equipoise.hal.slots import SlotStore
from equipoise.hal.stream import Role

LOG = logging.getLogger(__name__)


class WeightSource(Protocol):
    """The weights of every expert in host memory, one copy per node."""

    def view(self, layer: int, expert: int) -> Sequence[Tensor]:
        """Returns the segments of a slot, in the order of the descriptor, without copying them."""
        ...

    def checksum(self, layer: int, expert: int) -> int:
        """Returns `equipoise.hal.checksum` of their bytes."""
        ...


class SlotWriter(Protocol):
    """Writes weights into slots."""

    def write(self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]]) -> Job[None]:
        """Writes the segments `sources[i]` into local slot `slots[i]`; ends when all are."""
        ...


@dataclass(frozen=True)
class HostWeights:
    """Weights in host memory, with their writer."""

    source: WeightSource
    writer: SlotWriter


class StreamWriter:
    """Writes with the device's copy engines, on the copy stream.

    Args:
        accelerator: its copy stream is used.
        store: the slots.
    """

    def __init__(self, accelerator: Accelerator, store: SlotStore) -> None:
        self._accelerator = accelerator
        self._store = store
        self._copy = accelerator.stream(Role.COPY)

    def write(self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]]) -> Job[None]:
        """Implements `SlotWriter`."""
        self._store.write(slots, sources, self._copy)
        yield stream_idle(self._accelerator, self._copy)


@dataclass(frozen=True)
class CopyDone:
    """A condition: the copies of a handle are done."""

    handle: CopyHandle

    def ready(self) -> bool:
        """Returns whether they are done, or have failed."""
        return self.handle.done()

    def wait(self, timeout: float) -> None:
        """Raises as `CopyHandle.wait` does."""
        self.handle.wait(timeout)


class CpuWriter:
    """Writes with host threads, into slots in host memory.

    Args:
        pool: the threads.
        store: the slots.
        timeout: seconds that an abandoned copy may take to end.

    Raises:
        Unsupported: slots are in device memory.
    """

    def __init__(self, pool: CopyThreadPool, store: SlotStore, timeout: float) -> None:
        for segment in store.layout.slots[0]:
            if segment.data.device.type != "cpu":
                raise Unsupported(f"segment {segment.name!r} is not in the host's memory")
        self._pool = pool
        self._slots = store.layout.slots
        self._timeout = timeout

    def write(self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]]) -> Job[None]:
        """Implements `SlotWriter`."""
        copies = [
            HostCopy(tensor.view(-1).view(torch.uint8), segment.bytes)
            for slot, tensors in zip(slots, sources, strict=True)
            for tensor, segment in zip(tensors, self._slots[slot], strict=True)
        ]
        handle = self._pool.submit(copies)
        try:
            yield CopyDone(handle)
        finally:
            # Also if the job is closed early: no thread may still write slots after it.
            handle.wait(self._timeout)


WRITE_ATTEMPTS = 2
"""Number of writes before wrong bytes raise: one repetition covers a transient fault."""


def write_and_verify(
    accelerator: Accelerator,
    store: SlotStore,
    host_weights: HostWeights,
    layer: int,
    slots: Sequence[int],
    experts: Sequence[int],
) -> Job[None]:
    """Writes experts of `layer` into local slots and compares checksums.

    Raises:
        SlotError: the slots held other bytes than the source after every attempt.
    """
    if not slots:
        return
    expected = [host_weights.source.checksum(layer, expert) for expert in experts]
    for _ in range(WRITE_ATTEMPTS):
        sources = [host_weights.source.view(layer, expert) for expert in experts]
        yield from host_weights.writer.write(slots, sources)
        if (yield from _slot_checksums(accelerator, store, slots)) == expected:
            return
        LOG.warning("layer %d: slots hold other bytes than were written", layer)
    raise SlotError(
        f"layer {layer}: {WRITE_ATTEMPTS} writes left other bytes in slots {list(slots)}"
    )


def _slot_checksums(
    accelerator: Accelerator, store: SlotStore, slots: Sequence[int]
) -> Job[list[int]]:
    """Returns the checksums of slots, in [0, 2**64)."""
    copy = accelerator.stream(Role.COPY)
    with copy.current():
        sums = torch.empty(len(slots), dtype=torch.int64, device=accelerator.device)
    store.checksum_slots(slots, sums, copy)
    yield stream_idle(accelerator, copy)
    return [value & MASK64 for value in sums.tolist()]
