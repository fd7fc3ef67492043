"""Training text and held-out text of each kind, sharing no window."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.sources import KINDS, Kind
from training.windows import BLOCK, WINDOW, shared_windows

HELD_OUT_BYTES = 64 * 1024
LARGEST_PART = 32 * 1024
TRAINED_BYTES = 700 * 1000
CHUNK_BYTES = 8 * 1024


@dataclass(frozen=True)
class Corpus:
    """Both texts of one kind."""

    name: str
    held_out: bytes
    trained: bytes

    def digests(self) -> str:
        """One line: both sizes and SHA-256 sums."""
        held_out_digest, trained_digest = (
            hashlib.sha256(t).hexdigest() for t in (self.held_out, self.trained)
        )
        return (
            f"{self.name}: held out {len(self.held_out)} bytes sha256 {held_out_digest}, "
            f"trained {len(self.trained)} bytes sha256 {trained_digest}"
        )


def build(root: Path) -> tuple[Corpus, ...]:
    """The corpus of every kind, from packages unpacked below `root`.

    Raises ValueError where a file is missing, or where training and held-out text still share
    `WINDOW` bytes.
    """
    held_out = {kind.name: _held_out(kind, root) for kind in KINDS}
    everything = b"\0".join(held_out.values())
    corpora = [
        Corpus(kind.name, held_out[kind.name], _trained(kind, root, everything)) for kind in KINDS
    ]
    for corpus in corpora:
        refuse_shared(everything, corpus)
    return tuple(corpora)


def refuse_shared(held_out: bytes, corpus: Corpus) -> None:
    """ValueError where any window of `WINDOW` bytes is in both texts."""
    offsets = shared_windows(held_out, corpus.trained, WINDOW)
    if offsets:
        text = held_out[offsets[0] : offsets[0] + WINDOW]
        raise ValueError(f"{corpus.name}: {len(offsets)} shared windows, the first is {text!r}")


def _held_out(kind: Kind, root: Path) -> bytes:
    files = kind.held_out_files(root)
    texts = [_sampled(kind.read(path), LARGEST_PART) for path in files]
    return _cut("".join(texts).encode(), HELD_OUT_BYTES)


def _trained(kind: Kind, root: Path, held_out: bytes) -> bytes:
    texts = [_sampled(kind.read(path), kind.largest) for path in kind.trained_files(root)]
    every = _without_shared("".join(texts).encode(), held_out)
    return _sampled(every.decode(), TRAINED_BYTES).encode()


def _sampled(text: str, size: int) -> str:
    """Evenly spaced chunks of whole lines, about `size` bytes; all of it where it is smaller."""
    data = text.encode()
    if len(data) <= size:
        return text
    parts = size // CHUNK_BYTES
    starts = [i * len(data) // parts for i in range(parts)]
    return "".join(_chunk(data, start).decode() for start in starts)


def _chunk(data: bytes, start: int) -> bytes:
    begin = data.rfind(b"\n", 0, start) + 1
    return _cut(data[begin:], CHUNK_BYTES)


def _cut(data: bytes, size: int) -> bytes:
    """The first whole lines, `size` bytes at most."""
    return data if len(data) <= size else data[: data.rindex(b"\n", 0, size) + 1]


def _without_shared(text: bytes, held_out: bytes) -> bytes:
    """Training text without the lines that touch a block which is held out.

    Blocks, not windows: so the packed hashes of what is left raise no suspicion either.
    """
    letters = np.ones(len(text) + 1, np.int64)
    for offset in shared_windows(text, held_out, BLOCK):
        letters[offset : offset + BLOCK] = 0
    lines, kept_lines, place = text.splitlines(keepends=True), [], 0
    for line in lines:
        if letters[place : place + len(line)].all():
            kept_lines.append(line)
        place += len(line)
    joined = b"".join(kept_lines)
    # Joining lines across a gap can make a shared block anew: go on until none is left.
    return joined if len(kept_lines) == len(lines) else _without_shared(joined, held_out)
