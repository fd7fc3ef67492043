"""Reads files as bytes and writes them atomically: whole or not at all."""

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import BinaryIO, TypeVar
from uuid import uuid4

from equipoise.hal.errors import FileWriteFailed, FormatError

MAX_FILE_BYTES = 1 << 30
"""Upper limit of a file: a larger one is of another kind, or meant to exhaust memory."""
Outcome = TypeVar("Outcome")


def is_folder(path: Path) -> bool:
    """Returns whether `path` is a folder. Raises `FormatError` if it cannot be read."""
    return stat.S_ISDIR(_mode(path))


def read_bytes(path: Path) -> bytes:
    """Reads a regular file. Raises `FormatError` for anything else."""
    _check_regular(path)

    def read() -> bytes:
        with path.open("rb") as stream:
            # One byte more than allowed, to notice a file that grew since its size was read.
            return stream.read(MAX_FILE_BYTES + 1)

    data = _with_file_errors(path, "read", read)
    if len(data) > MAX_FILE_BYTES:
        raise FormatError(str(path), f"is larger than {MAX_FILE_BYTES} bytes")
    return data


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a regular file of any size to be read in pieces. Raises `FormatError`."""
    _check_regular(path)
    stream = _with_file_errors(path, "read", lambda: path.open("rb"))
    with stream:
        try:
            yield stream
        except OSError as error:
            raise FormatError(str(path), f"cannot be read: {error.strerror or error}") from None


def read_text(path: Path, data: bytes) -> str:
    """Decodes UTF-8. Raises `FormatError` that names the byte at which it is not."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(str(path), f"is not UTF-8 at byte {error.start}") from None


def list_folder(folder: Path) -> list[str]:
    """Returns the names in a folder, sorted, numbers by value: 2.npy is before 10.npy.

    Raises `FormatError`.
    """
    names: list[str] = _with_file_errors(folder, "read", lambda: os.listdir(folder))
    return sorted(names, key=lambda name: (_by_value(name), name))


def _by_value(name: str) -> list[str | int]:
    """Text and numbers in turn."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def write_bytes(path: Path, data: bytes) -> None:
    """Creates or replaces a file. Raises `FormatError`; the previous file is then intact."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise FormatError(str(path), "is there already, and is not a regular file")
    temporary = _temporary_path(target)

    def write() -> None:
        # Synced before the rename: after a crash the name must not refer to an empty file.
        _write_synced(temporary, data)
        temporary.replace(target)

    try:
        _with_file_errors(path, "written", write)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Creates a folder with all files or none. Raises `FormatError`, also if it has files."""
    temporary = _temporary_path(path)

    def write() -> None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FormatError(str(path), "is there already, and is not an empty folder")
        temporary.mkdir()
        for name, data in files.items():
            _write_synced(temporary / name, data)
        temporary.replace(path)

    try:
        _with_file_errors(path, "written", write)
    finally:
        rmtree(temporary, ignore_errors=True)


def _temporary_path(path: Path) -> Path:
    # In the same folder, so that the rename is atomic (same file system); hidden, and unique.
    return path.parent / f".{path.name[:100]}.{uuid4().hex}"


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _check_regular(path: Path) -> None:
    mode = _mode(path)
    if stat.S_ISDIR(mode):
        raise FormatError(str(path), "is a folder, not a file")
    if not stat.S_ISREG(mode):
        # Reading a pipe could block for ever, and a device may never end.
        raise FormatError(str(path), "is not a regular file")


def _mode(path: Path) -> int:
    return _with_file_errors(path, "read", path.stat).st_mode


def _with_file_errors(path: Path, verb: str, action: Callable[[], Outcome]) -> Outcome:
    kind = FileWriteFailed if verb == "written" else FormatError
    try:
        return action()
    except OSError as error:
        raise kind(str(path), f"cannot be {verb}: {error.strerror or error}") from None
    except ValueError as error:  # a path with a NUL byte
        raise kind(repr(str(path)), f"cannot be {verb}: {error}") from None
