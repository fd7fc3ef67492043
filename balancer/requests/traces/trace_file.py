"""A file as a stream of bytes or of whole lines, gzip or not, never all of it in memory."""

import gzip
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from equipoise.hal.errors import FormatError

READ_BYTES = 1 << 22
"""Bytes read at once."""
MAX_LINE_BYTES = 1 << 24
"""Bytes of a line at most: a prompt of a million tokens has 2000 hashes."""
GZIP_MAGIC = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class LineBlock:
    """Whole lines.

    Attributes:
        first_line: number of the first of them, from 1.
        data: their bytes, without the last line's end.
    """

    first_line: int
    data: bytes


class TraceFile:
    """A file that is read once, from its beginning to its end.

    Attributes:
        path: as it was named.
        head: its first bytes, for whoever asks what it is; they are still to be read.
    """

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self.path = path
        self._stream = stream
        self.head = self._read(READ_BYTES).removeprefix(BOM)
        self._unread = self.head

    def error(self, what: str, line: int | None = None) -> FormatError:
        """To be raised: what is wrong, and in which line."""
        return FormatError(str(self.path), what if line is None else f"line {line}: {what}")

    def pieces(self) -> Iterator[bytes]:
        """All of it. Raises `FormatError` where it cannot be read."""
        piece, self._unread = self._unread, b""
        while piece:
            yield piece
            piece = self._read(READ_BYTES)

    def blocks(self) -> Iterator[LineBlock]:
        """All of it, in blocks of whole lines. Raises `FormatError`, for an endless line too."""
        line, rest = 1, b""
        for piece in self.pieces():
            whole, ended, rest = (rest + piece).rpartition(b"\n")
            if ended:
                yield LineBlock(line, whole)
                line += whole.count(b"\n") + 1
            if len(rest) > MAX_LINE_BYTES:
                raise self.error(f"is longer than {MAX_LINE_BYTES} bytes", line)
        if rest:
            yield LineBlock(line, rest)

    def _read(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self.error(f"is not a whole gzip file: {str(error)[:80]}") from None
        except OSError as error:
            raise self.error(f"cannot be read: {error.strerror or error}") from None


@contextmanager
def open_trace_file(path: Path) -> Iterator[TraceFile]:
    """Open a file, and what gzip made of one. Raises `FormatError`, for a folder too."""
    with _open(path) as raw:
        # By content: a file that was downloaded through something may have lost its suffix.
        packed = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        raw.seek(0)
        source = TraceFile(path, cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw)
        if not source.head:
            raise FormatError(str(path), "is empty")
        yield source


def _open(path: Path) -> IO[bytes]:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise FormatError(str(path), "is a folder, not a file")
        if not stat.S_ISREG(mode):
            # A pipe would block for ever, and a device never end.
            raise FormatError(str(path), "is not a regular file")
        return path.open("rb")
    except OSError as error:
        raise FormatError(str(path), f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a name with a zero byte
        raise FormatError(repr(str(path)), f"cannot be read: {error}") from None
