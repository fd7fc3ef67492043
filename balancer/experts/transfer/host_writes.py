"""Who writes weights from the host's memory into slots that nobody reads."""

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
    """Every expert's weights, in host memory: one copy a node."""

    def view(self, layer: int, expert: int) -> Sequence[Tensor]:
        """The segments of a slot, in the order of the descriptor; they stay where they are."""
        ...

    def checksum(self, layer: int, expert: int) -> int:
        """`equipoise.hal.checksum` of their bytes."""
        ...


class SlotWriter(Protocol):
    """Fills slots."""

    def write(self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]]) -> Job[None]:
        """Fill local slot `slots[i]` with the segments `sources[i]`; ends when it is done."""
        ...


@dataclass(frozen=True)
class HostWeights:
    """The weights, and who writes them."""

    source: WeightSource
    writer: SlotWriter


class StreamWriter:
    """The copy engines, on the copy stream.

    Args:
        accelerator: whose copy stream.
        store: whose slots.
    """

    def __init__(self, accelerator: Accelerator, store: SlotStore) -> None:
        self._accelerator = accelerator
        self._store = store
        self._copy = accelerator.stream(Role.COPY)

    def write(self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]]) -> Job[None]:
        """See `SlotWriter`."""
        self._store.write(slots, sources, self._copy)
        yield stream_idle(self._accelerator, self._copy)


@dataclass(frozen=True)
class CopyDone:
    """A ticket's copies are done."""

    handle: CopyHandle

    def ready(self) -> bool:
        """Whether they are, or have failed."""
        return self.handle.done()

    def wait(self, timeout: float) -> None:
        """Raises as `CopyHandle.wait` does."""
        self.handle.wait(timeout)


class CpuWriter:
    """Threads of the host, into slots that the host can write.

    Args:
        copier: whose threads.
        store: whose slots.
        patience: seconds that a copy may take which nobody waits for any more.

    Raises:
        Unsupported: slots are in memory of a device.
    """

    def __init__(self, copier: CopyThreadPool, store: SlotStore, patience: float) -> None:
        for segment in store.layout.slots[0]:
            if segment.data.device.type != "cpu":
                raise Unsupported(f"segment {segment.name!r} is not in the host's memory")
        self._pool = copier
        self._slots = store.layout.slots
        self._timeout = patience

    def write(self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]]) -> Job[None]:
        """See `SlotWriter`."""
        copies = [
            HostCopy(tensor.view(-1).view(torch.uint8), segment.bytes)
            for slot, tensors in zip(slots, sources, strict=True)
            for tensor, segment in zip(tensors, self._slots[slot], strict=True)
        ]
        ticket = self._pool.submit(copies)
        try:
            yield CopyDone(ticket)
        finally:
            # Whoever is dismissed meanwhile leaves no thread behind that still writes slots.
            ticket.wait(self._timeout)


WRITE_ATTEMPTS = 2
"""Times that slots are written before their bytes count as wrong for good."""


def write_and_verify(
    accelerator: Accelerator,
    store: SlotStore,
    supply: HostWeights,
    layer: int,
    slots: Sequence[int],
    experts: Sequence[int],
) -> Job[None]:
    """Fill local slots with experts of `layer`, and look at what was written.

    Raises:
        SlotError: twice the slots held other bytes than the source.
    """
    if not slots:
        return
    wanted = [supply.source.checksum(layer, expert) for expert in experts]
    for _ in range(WRITE_ATTEMPTS):
        sources = [supply.source.view(layer, expert) for expert in experts]
        yield from supply.writer.write(slots, sources)
        if (yield from _slot_checksums(accelerator, store, slots)) == wanted:
            return
        LOG.warning("layer %d: slots hold other bytes than were written", layer)
    raise SlotError(
        f"layer {layer}: {WRITE_ATTEMPTS} writes left other bytes in slots {list(slots)}"
    )


def _slot_checksums(
    accelerator: Accelerator, store: SlotStore, slots: Sequence[int]
) -> Job[list[int]]:
    """Checksums of slots, in [0, 2**64)."""
    copy = accelerator.stream(Role.COPY)
    with copy.current():
        sums = torch.empty(len(slots), dtype=torch.int64, device=accelerator.device)
    store.checksum_slots(slots, sums, copy)
    yield stream_idle(accelerator, copy)
    return [value & MASK64 for value in sums.tolist()]
