"""Files as bytes: read whole, written whole or not at all."""

import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import TypeVar
from uuid import uuid4

from equipoise.hal.errors import FileWriteFailed, FormatError

MAX_FILE_BYTES = 1 << 30
"""Bytes of a file at most: more is another kind of file, or an attack on memory."""
Outcome = TypeVar("Outcome")


def is_folder(path: Path) -> bool:
    """Whether there is a folder. Raises `FormatError` where that cannot be seen."""
    return stat.S_ISDIR(_mode(path))


def read_bytes(path: Path) -> bytes:
    """The whole of a regular file. Raises `FormatError`, for a folder too."""
    mode = _mode(path)
    if stat.S_ISDIR(mode):
        raise FormatError(str(path), "is a folder, not a file")
    if not stat.S_ISREG(mode):
        # A pipe would block for ever, and a device never end.
        raise FormatError(str(path), "is not a regular file")

    def read() -> bytes:
        with path.open("rb") as stream:
            return stream.read(MAX_FILE_BYTES + 1)

    data = _with_file_errors(path, "read", read)
    if len(data) > MAX_FILE_BYTES:
        raise FormatError(str(path), f"is larger than {MAX_FILE_BYTES} bytes")
    return data


def read_text(path: Path, data: bytes) -> str:
    """Bytes of a file as UTF-8. Raises `FormatError` that says where they are not."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(str(path), f"is not UTF-8 at byte {error.start}") from None


def list_folder(folder: Path) -> list[str]:
    """Names in a folder, sorted. Raises `FormatError`."""
    return sorted(_with_file_errors(folder, "read", lambda: os.listdir(folder)))


def write_bytes(path: Path, data: bytes) -> None:
    """Make or replace a file. Raises `FormatError`; then what was there before is still there."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise FormatError(str(path), "is there already, and is not a regular file")
    beside = _temporary_path(target)

    def write() -> None:
        _write_synced(beside, data)
        beside.replace(target)

    try:
        _with_file_errors(path, "written", write)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder of files, all of them or none. Raises `FormatError`, where it has files too."""
    beside = _temporary_path(path)

    def write() -> None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FormatError(str(path), "is there already, and is not an empty folder")
        beside.mkdir()
        for name, data in files.items():
            _write_synced(beside / name, data)
        beside.replace(path)

    try:
        _with_file_errors(path, "written", write)
    finally:
        rmtree(beside, ignore_errors=True)


def _temporary_path(path: Path) -> Path:
    # In the same folder, so that renaming is one step; hidden, and named by nobody else.
    return path.parent / f".{path.name[:100]}.{uuid4().hex}"


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _mode(path: Path) -> int:
    return _with_file_errors(path, "read", path.stat).st_mode


def _with_file_errors(path: Path, what: str, action: Callable[[], Outcome]) -> Outcome:
    kind = FileWriteFailed if what == "written" else FormatError
    try:
        return action()
    except OSError as error:
        raise kind(str(path), f"cannot be {what}: {error.strerror or error}") from None
    except ValueError as error:  # a name with a zero byte
        raise kind(repr(str(path)), f"cannot be {what}: {error}") from None
