"""Writes output files whole or not at all, and tries beforehand whether they can be written."""

import errno
import os
import select
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO
from uuid import uuid4

from equipoise.hal.errors import EquipoiseError, UsageError

PIPE_TIMEOUT, PIPE_POLL = 60, 0.05
"""Seconds that a pipe waits for its reader, and between two looks for one."""
ATTEMPTS = 100
"""At a folder that other processes make and remove meanwhile."""
LAUNCHER_VARIABLE = "WORLD_SIZE"
"""Set where a launcher has started the ranks: by torchrun, or by `join_launcher` for mpiexec."""


def ensure_folder(path: Path) -> Path:
    """`path`, made if it was missing. Raises EquipoiseError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EquipoiseError(f"{path} cannot be made: {error.strerror}") from error
    return path


def describe_path(path: Path, out: Path | None = None) -> str:
    """The path, for messages; says if its folder is new, because the path may be mistyped.

    `out` is a folder that was asked for as one.
    """
    return f"{path}" if path.parent == out or path.parent.exists() else f"{path}, in a new folder"


def write_file(path: Path, text: str, out: Path | None = None) -> str:
    """UTF-8, whole or not at all; the folder is made if it was missing. Returns `describe_path` it.

    Raises EquipoiseError naming the path and the reason; what was there before is still there.
    """
    # A path on the command line may hold bytes that are not UTF-8: shown as a question mark.
    data, place = text.encode("utf-8", errors="replace"), describe_path(path, out)
    try:
        _write(path, data)
    except OSError as error:
        raise EquipoiseError(f"{path} cannot be written: {error.strerror}") from error
    return place


def _write(path: Path, data: bytes) -> None:
    """To a file of that name, or to what is there and is no file."""
    status = _status(path)
    for stream in (sys.stdout, sys.stderr):
        if status is not None and _is_stream(stream, status):
            # Not by its name: a file would be written from its beginning on, over what is in it.
            stream.flush()
            stream.buffer.write(data)
            stream.flush()
            return
    if status is None or stat.S_ISREG(status.st_mode):
        with _new_file_beside(Path(os.path.realpath(path))) as temporary:
            # Of a link, what it points to is replaced.
            _replace(Path(os.path.realpath(path)), temporary, data)
    elif stat.S_ISFIFO(status.st_mode):
        _write_pipe(path, data)
    else:
        path.write_bytes(data)


def _status(path: Path) -> os.stat_result | None:
    """Of what is there, behind links; None for nothing. Raises other OSError than that."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _is_stream(stream: TextIO, status: os.stat_result) -> bool:
    """Whether something is this stream of the process; tests have streams without a number."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), status)
    except (OSError, ValueError):
        return False


@contextmanager
def _new_file_beside(target: Path) -> Iterator[Path]:
    """A new, empty file in the folder of `target`, which is made; removed if it is still there."""
    temporary = target.parent / f".{target.name[:100]}.{uuid4().hex}"
    for attempt in range(ATTEMPTS):
        try:
            if not target.parent.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
            temporary.open("xb").close()
            break
        except FileNotFoundError:
            # A process that has tried the same folder has removed it meanwhile.
            if attempt == ATTEMPTS - 1:
                raise
    try:
        yield temporary
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _replace(target: Path, temporary: Path, data: bytes) -> None:
    """By a rename of a file that is whole: a full disk or a kill leaves no half file."""
    with temporary.open("wb") as stream:
        status = _status(target)
        if status is not None:
            temporary.chmod(stat.S_IMODE(status.st_mode))
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())  # some disks say only now that they are full
    temporary.replace(target)


def _write_pipe(path: Path, data: bytes) -> None:
    """To whoever reads the pipe. Raises OSError where nobody does for `PIPE_TIMEOUT`."""
    descriptor, left = _open_pipe(path), memoryview(data)
    try:
        while left:
            if not select.select([], [descriptor], [], PIPE_TIMEOUT)[1]:
                raise TimeoutError(errno.ETIMEDOUT, f"its reader took nothing for {PIPE_TIMEOUT} s")
            with suppress(BlockingIOError):
                left = left[os.write(descriptor, left[: select.PIPE_BUF]) :]
    finally:
        os.close(descriptor)


def _open_pipe(path: Path) -> int:
    """Its descriptor, as soon as somebody reads."""
    until = time.monotonic() + PIPE_TIMEOUT
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > until:
                raise OSError(errno.ENXIO, f"nobody reads it for {PIPE_TIMEOUT} s") from error
        time.sleep(PIPE_POLL)


def probe_file(flag: str, path: Path) -> None:
    """See that a file can be written there, by making it, before hours are spent on what it holds.

    Permissions do not say it all: the superuser has every one of them below /proc. Leaves nothing
    behind, and what is there as it is. Ranks that are started already do not try: they would run
    into what another one tries. Raises UsageError naming flag, path and reason.
    """
    _try_below(flag, path, path)


def probe_folder(flag: str, path: Path) -> None:
    """The same of a folder that files are to be written to."""
    _try_below(flag, path, path / ".tried")


def _try_below(flag: str, label: Path, path: Path) -> None:
    if LAUNCHER_VARIABLE in os.environ:
        return
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        _try(path)
    except OSError as error:
        raise UsageError(f"{flag}: {label} cannot be written: {error.strerror}") from error
    finally:
        for folder in missing:
            with suppress(OSError):  # another process has put something there meanwhile: keep it
                folder.rmdir()


def _try(path: Path) -> None:
    """With a name of its own: a file of that name may be another process's, which is done."""
    if path.is_file():
        path.open("ab").close()
    if path.is_file() or not os.path.lexists(path):
        # A pipe would wait for its reader; a device is written or not.
        with _new_file_beside(Path(os.path.realpath(path))):
            pass
