"""Hashes of the blocks of prompts: flat ids, and where those of each request begin.

Two prompts that begin with the same blocks begin with the same ids, so ids tell what a prefix cache
could keep.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from equipoise.hal.errors import UsageError

Counts: TypeAlias = npt.NDArray[np.int64]
Hashes: TypeAlias = tuple[Counts, Counts]
"""int64 [h] ids, none negative, and int64 [n + 1] offsets: of request i are ids[offsets[i] :
offsets[i + 1]]."""


def check_hashes(hashes: Hashes, prompts: Counts, block: int) -> None:
    """Raise `UsageError` unless these are hashes of such prompts, of `block` tokens each."""
    ids, offsets = hashes
    if any(array.ndim != 1 or array.dtype != np.int64 for array in hashes):
        raise UsageError("hashes are two int64 arrays of one axis: ids, and offsets into them")
    if offsets.size != prompts.size + 1:
        raise UsageError(f"{offsets.size} offsets of hashes, expected {prompts.size + 1}")
    if offsets[0] != 0 or offsets[-1] != ids.size or (np.diff(offsets) < 0).any():
        raise UsageError(f"offsets of hashes do not rise from 0 to {ids.size}")
    if ids.size and ids.min() < 0:
        raise UsageError(f"hash {int(np.argmax(ids < 0))} is {ids[ids < 0][0]}, below 0")
    beyond = np.flatnonzero(np.diff(offsets) > -(-prompts // block))
    if beyond.size:
        row = int(beyond[0])
        raise UsageError(
            f"request {row}: {offsets[row + 1] - offsets[row]} hashes for {prompts[row]} tokens in "
            f"blocks of {block}"
        )


def chosen(hashes: Hashes, rows: Counts) -> Hashes:
    """Those of requests `rows` (int64 [m]), in that order."""
    ids, offsets = hashes
    lengths = np.diff(offsets)[rows]
    ends = np.concatenate([[0], np.cumsum(lengths)])
    # Position in the new ids, plus by how much the row that it is of has moved.
    moved = np.repeat(offsets[:-1][rows] - ends[:-1], lengths)
    return ids[np.arange(ends[-1]) + moved], ends
