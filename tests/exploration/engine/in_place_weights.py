"""Weights in the host's memory, and two ways to write them into slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from exploration.engine.case import Case, Path
from exploration.engine.faulty_fabric import RiggedStore
from exploration.engine.forward_model import HALF, WIDTH, mark
from exploration.engine.world_profiles import WORLDS
from torch import Tensor

from equipoise.backends.virtual.accelerator import VirtualAccelerator
from equipoise.balancer.experts.balancer import InPlaceFromHost, StagedFromPeers, UpdatePathConfig
from equipoise.balancer.experts.runtime.jobs import Job
from equipoise.balancer.experts.transfer.host_writes import HostWeights, SlotWriter, StreamWriter
from equipoise.hal.checksum import checksum
from equipoise.hal.slots import SlotStore


@dataclass(frozen=True)
class Marks:
    """Every expert's weights: bytes that name layer and expert."""

    experts: int

    def view(self, layer: int, expert: int) -> tuple[Tensor, ...]:
        """One segment."""
        return (torch.full((WIDTH,), mark(layer, expert, self.experts), dtype=torch.uint8),)

    def checksum(self, layer: int, expert: int) -> int:
        """Of its bytes."""
        return checksum(self.view(layer, expert)[0])


class Ready:
    """Has come: a place where others may move."""

    def ready(self) -> bool:
        return True

    def wait(self, timeout: float) -> None:
        """Nothing comes."""


class CpuWriter:
    """The host itself, half a slot at a time."""

    def __init__(self, store: RiggedStore) -> None:
        self._store = store

    def write(self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]]) -> Job[None]:
        """See `SlotWriter`."""
        self._store.refuse()
        for slot, source in zip(slots, sources, strict=True):
            row, data = self._store.layout.slots[slot][0].data, source[0]
            for half in (slice(0, HALF), slice(HALF, WIDTH)):
                row[half] = data[half]
                yield Ready()
        self._store.spoil(slots, lambda flip: flip())


def update_path(
    case: Case, accelerator: VirtualAccelerator, store: RiggedStore
) -> UpdatePathConfig:
    """How weights come into the slots of a rank."""
    if case.path is Path.STAGED:
        return StagedFromPeers()
    by_stream, slots = case.path is Path.BY_STREAM, cast(SlotStore, store)
    writer: SlotWriter = StreamWriter(accelerator, slots) if by_stream else CpuWriter(store)
    return InPlaceFromHost(
        HostWeights(Marks(case.shape.experts), writer), WORLDS[case.world].capabilities
    )
