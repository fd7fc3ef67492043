"""Reads a file, gzip or not, as a stream of bytes or whole lines, never all of it in memory."""

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
"""Bytes per read: large enough that numpy's cost per block does not matter."""
MAX_LINE_BYTES = 1 << 24
"""Upper limit of a line: a prompt of a million tokens has only 2000 hashes."""
GZIP_MAGIC = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class LineBlock:
    """A block of whole lines.

    Attributes:
        first_line: number of the first line, counted from 1.
        data: bytes of the lines, without the last line break.
    """

    first_line: int
    data: bytes


class TraceFile:
    """A file that is read once, from beginning to end.

    Attributes:
        path: the path as passed.
        head: the first bytes, from which the format is detected; reading still yields them.
    """

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self.path = path
        self._stream = stream
        self.head = self._read(READ_BYTES).removeprefix(BOM)
        self._unread = self.head

    def error(self, what: str, line: int | None = None) -> FormatError:
        """Returns an error that names the file and the line."""
        return FormatError(str(self.path), what if line is None else f"line {line}: {what}")

    def pieces(self) -> Iterator[bytes]:
        """Yields the whole file in pieces. Raises `FormatError` if it cannot be read."""
        piece, self._unread = self._unread, b""
        while piece:
            yield piece
            piece = self._read(READ_BYTES)

    def blocks(self) -> Iterator[LineBlock]:
        """Yields the file in blocks of whole lines. Raises `FormatError`, also for a long line."""
        line, tail = 1, b""
        for piece in self.pieces():
            whole, ended, tail = (tail + piece).rpartition(b"\n")
            if ended:
                yield LineBlock(line, whole)
                line += whole.count(b"\n") + 1
            if len(tail) > MAX_LINE_BYTES:
                raise self.error(f"is longer than {MAX_LINE_BYTES} bytes", line)
        if tail:
            yield LineBlock(line, tail)

    def _read(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self.error(f"is not a whole gzip file: {str(error)[:80]}") from None
        except OSError as error:
            raise self.error(f"cannot be read: {error.strerror or error}") from None


@contextmanager
def open_trace_file(path: Path) -> Iterator[TraceFile]:
    """Opens a file, compressed by gzip or not. Raises `FormatError`, also for a folder."""
    with _open(path) as raw:
        # By content, since a downloaded file may have lost its suffix.
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
            # Reading a pipe could block for ever, and a device may never end.
            raise FormatError(str(path), "is not a regular file")
        return path.open("rb")
    except OSError as error:
        raise FormatError(str(path), f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a path with a NUL byte
        raise FormatError(repr(str(path)), f"cannot be read: {error}") from None
