"""The first 64 bytes of every message: which message it is."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.hal.errors import MessageMismatch

WORDS = 8
HEADER_BYTES = 8 * WORDS
_SIGN = 0x4571_7569_706F_6973
"""Begins every header."""
_PACKED = struct.Struct(f"={WORDS}q")


@dataclass(frozen=True)
class Header:
    """Which message this is.

    Attributes:
        sequence: messages of this edge before it.
        shape_class: digest of its class.
        nbytes: of the message: header, payload and description.
        first: bytes of its first part; the rest follows in a part of its own.
        described: bytes behind the payload that describe the class to whoever has not met it.
    """

    sequence: int
    shape_class: int
    nbytes: int
    first: int
    described: int = 0

    def write(self, words: memoryview) -> None:
        """Into int64 [1, 8] in the host's memory."""
        fields = (_SIGN, self.sequence, self.shape_class, self.nbytes, self.first, self.described)
        _PACKED.pack_into(words, 0, *fields, 0, _folded(fields))


def read_header(words: Sequence[int], edge: str) -> Header:
    """From the eight words.

    Raises:
        MessageMismatch: these are not a header's bytes, or not whole.
    """
    *fields, nothing, check = words
    if fields[0] != _SIGN or nothing or _folded(fields) != check:
        raise MessageMismatch(f"{edge}: what arrived does not begin as a message does")
    return Header(*fields[1:])


def _folded(fields: Sequence[int]) -> int:
    folded = 0
    for field in fields:
        folded ^= field
    return folded
