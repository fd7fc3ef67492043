"""Who writes weights from the host's memory into slots that nobody reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from equipoise.balancer.experts.jobs import Job
from equipoise.balancer.experts.waits import all_of
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.slots import SlotStore
from equipoise.hal.stream import Role


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
class Supply:
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
        yield all_of(self._accelerator, self._copy)
