"""Slots in host memory; every verb is a batch of memory copies."""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise import _native
from equipoise.hal.errors import SlotError
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Stream


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 [nbytes], without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


class CpuSlotStore:
    """Slots as lists of byte views, staging as one block of uint8 [staging, slot_bytes]."""

    def __init__(self, layout: SlotLayout) -> None:
        self._layout = layout
        self._slots = [[_bytes(segment.data) for segment in slot] for slot in layout.slots]
        self._staging = torch.zeros((layout.staging, layout.slot_bytes), dtype=torch.uint8)

    @property
    def layout(self) -> SlotLayout:
        """What the store was made from."""
        return self._layout

    def pack(self, slots: Sequence[int], blob: Tensor, stream: Stream) -> None:
        """Copy slots into a blob, back to back."""
        rows = self._rows(blob, self._known(slots, "slot"))

        def program() -> None:
            for row, slot in zip(rows, slots, strict=True):
                for piece, segment in self._pieces(row, slot):
                    piece.copy_(segment)

        stream.launch(program)

    def unpack(self, blob: Tensor, staging: Sequence[int], stream: Stream) -> None:
        """Copy a blob into staging buffers."""
        rows = self._rows(blob, self._known(staging, "staging"))

        def program() -> None:
            for row, buffer in zip(rows, staging, strict=True):
                self._staging[buffer].copy_(row)

        stream.launch(program)

    def write(
        self, slots: Sequence[int], sources: Sequence[Sequence[Tensor]], stream: Stream
    ) -> None:
        """Fill slots from tensors that match the descriptor."""
        self._known(slots, "slot")
        if len(slots) != len(sources):
            raise SlotError(f"{len(slots)} slots, but sources for {len(sources)}")
        for source in sources:
            self._check_source(source)

        def program() -> None:
            for slot, source in zip(slots, sources, strict=True):
                for view, tensor in zip(self._slots[slot], source, strict=True):
                    view.copy_(_bytes(tensor))

        stream.launch(program)

    def commit(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        """Copy staging buffers into slots, in place."""
        self._known([staging for staging, _ in copies], "staging")
        self._known([slot for _, slot in copies], "slot")

        def program() -> None:
            for staging, slot in copies:
                for piece, segment in self._pieces(self._staging[staging], slot):
                    segment.copy_(piece)

        stream.launch(program)

    def checksum_slots(self, slots: Sequence[int], out: Tensor, stream: Stream) -> None:
        """Checksum of each slot's bytes, segments back to back."""
        self._known(slots, "slot")

        def program() -> None:
            scratch = torch.empty(self._layout.slot_bytes, dtype=torch.uint8)
            for place, slot in enumerate(slots):
                for piece, segment in self._pieces(scratch, slot):
                    piece.copy_(segment)
                out[place] = _signed(_native.checksum(scratch.numpy()))

        stream.launch(program)

    def checksum_staging(self, staging: Sequence[int], out: Tensor, stream: Stream) -> None:
        """Checksum of each staging buffer."""
        self._known(staging, "staging")

        def program() -> None:
            for place, buffer in enumerate(staging):
                out[place] = _signed(_native.checksum(self._staging[buffer].numpy()))

        stream.launch(program)

    def _pieces(self, row: Tensor, slot: int) -> list[tuple[Tensor, Tensor]]:
        """Pairs of (part of a packed row, segment of the slot)."""
        views = self._slots[slot]
        parts = row.split([view.numel() for view in views])
        return list(zip(parts, views, strict=True))

    def _rows(self, blob: Tensor, count: int) -> list[Tensor]:
        size = self._layout.slot_bytes
        if blob.dtype != torch.uint8 or blob.shape != (count * size,):
            raise SlotError(
                f"a blob of {count} slots is uint8 [{count * size}], "
                f"got {blob.dtype} {list(blob.shape)}"
            )
        return list(blob.split(size)) if count else []

    def _known(self, numbers: Sequence[int], what: str) -> int:
        limit = len(self._slots) if what == "slot" else len(self._staging)
        for number in numbers:
            if not 0 <= number < limit:
                raise SlotError(f"{what} {number} is not in [0, {limit})")
        return len(numbers)

    def _check_source(self, source: Sequence[Tensor]) -> None:
        names = [wanted.name for wanted in self._layout.descriptor]
        types = tuple(
            Segment(name, tensor).type for name, tensor in zip(names, source, strict=False)
        )
        if len(source) != len(names) or types != self._layout.descriptor:
            raise SlotError(f"a source is {types}, the slots are {self._layout.descriptor}")


def _signed(checksum: int) -> int:
    """The same 64 bits as torch's int64 holds them."""
    return checksum - (1 << 64) if checksum >> 63 else checksum
