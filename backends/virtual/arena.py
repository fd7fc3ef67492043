"""Memory of the virtual device, overwritten with noise and reused as soon as its last view is
dropped."""

import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Bytes: every block begins at a multiple."""
GAP = 48
"""Bytes at least between two blocks, which belong to nobody."""
CHUNK = 1 << 16
"""Bytes that are taken from the host at a time, if one block does not need more."""

Bytes = NDArray[np.uint8]


def bytes_of(tensor: Tensor) -> Bytes:
    """The bytes of a contiguous tensor, uint8 [nbytes], without a copy; keeps it alive."""
    flat: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


class _Lent(weakref.ref[Bytes]):
    """A block that somebody holds: ends with the last tensor over it."""

    __slots__ = ("size", "whole")

    whole: Bytes
    size: int


class Arena:
    """The memory of one rank.

    A block is never split or joined: what is given back goes to the front of the free list, and
    the next request that fits takes it whole. So a buffer that was dropped too early is written
    over by the very next allocation, and nothing fragments.
    """

    def __init__(self) -> None:
        self._chunk: Bytes = np.empty(0, np.uint8)
        self._chunk_offset = 0
        self._free: list[Bytes] = []
        self._lent: dict[int, _Lent] = {}
        self._pattern = 0

    @property
    def block_count(self) -> int:
        """How many blocks are in somebody's hands."""
        return len(self._lent)

    @property
    def bytes_lent(self) -> int:
        """Bytes of these blocks."""
        return sum(len(blocks.whole) for blocks in self._lent.values())

    def empty(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], contents undefined."""
        whole = self._take(max(nbytes, 1))
        view = whole[:nbytes]
        return self._lend(view, whole)

    def close(self) -> None:
        """Forget what is free; what is lent stays as long as its tensors."""
        self._free.clear()
        self._chunk = self._chunk[:0]
        self._chunk_offset = 0

    def _lend(self, view: Bytes, whole: Bytes) -> Tensor:
        """A tensor whose storage is `view`; `whole` comes back when both are gone."""
        blocks = _Lent(view, self._on_dropped)
        blocks.whole = whole
        self._lent[id(blocks)] = blocks
        return torch.from_numpy(view)

    def _on_dropped(self, blocks: weakref.ref[Bytes]) -> None:
        whole = self._lent.pop(id(blocks)).whole
        self._scribble(whole)
        self._free.insert(0, whole)

    def _scribble(self, block: Bytes) -> None:
        """A pattern of its own each time, so that nothing stale looks right by chance."""
        self._pattern = (self._pattern * 5 + 0x5B) & 0xFF
        block[:] = self._pattern

    def _take(self, nbytes: int) -> Bytes:
        """The first free block that is large enough, or a fresh one."""
        for place, block in enumerate(self._free):
            if len(block) >= nbytes:
                return self._free.pop(place)
        return self._fresh(-(-nbytes // ALIGNMENT) * ALIGNMENT)

    def _fresh(self, size: int) -> Bytes:
        if self._chunk_offset + size > len(self._chunk):
            self._chunk = np.empty(max(CHUNK, size + ALIGNMENT), np.uint8)
            self._chunk_offset = -self._chunk.ctypes.data % ALIGNMENT
        block = self._chunk[self._chunk_offset : self._chunk_offset + size]
        self._chunk_offset += size + GAP
        self._scribble(block)
        return block


class PaddedArena(Arena):
    """Storage is larger than the bytes that were asked for, as of a vendor's private formats."""

    def empty(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] at offset 0 of a storage that goes on after it."""
        return super().empty(nbytes + 2 * ALIGNMENT)[:nbytes]
