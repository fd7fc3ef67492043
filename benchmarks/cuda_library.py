"""Weights in the host's memory, from which slots are written under locks."""

from collections.abc import Sequence

import torch
from cuda_clock import DEADLINE
from cuda_model import Model
from torch import Tensor

from equipoise.hal.checksum import MASK64
from equipoise.hal.slots import SlotLayout
from equipoise.hal.stream import Role


class Library:
    """This rank's experts in page-locked host memory, as the start layout has them in its slots."""

    def __init__(self, model: Model) -> None:
        place, slots = model.place, model.slots
        self._here = model.sizes.here
        self._parts = [segment.type for segment in slots[0]]
        store = place.accelerator.slot_store(SlotLayout(slots, 0))
        pool = place.accelerator.host_pool(store.layout.slot_bytes, len(slots))
        sums = torch.empty(len(slots), dtype=torch.int64, device=place.accelerator.device)
        store.checksum_slots(range(len(slots)), sums, place.accelerator.stream(Role.COPY))
        place.settle()
        self._sums = [value & MASK64 for value in sums.tolist()]
        self._pages = [pool.take(DEADLINE) for _ in slots]
        for page, slot in zip(self._pages, slots, strict=True):
            pieces = page.data.split([segment.type.nbytes for segment in slot])
            for piece, segment in zip(pieces, slot, strict=True):
                piece.copy_(segment.bytes)

    def view(self, layer: int, expert: int) -> Sequence[Tensor]:
        """Its segments on the page."""
        page = self._pages[layer * self._here + expert].data
        pieces = page.split([kind.nbytes for kind in self._parts])
        return [
            piece.view(kind.dtype).view(kind.shape)
            for piece, kind in zip(pieces, self._parts, strict=True)
        ]

    def checksum(self, layer: int, expert: int) -> int:
        """As the device found it."""
        return self._sums[layer * self._here + expert]
