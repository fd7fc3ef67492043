"""Writes output files whole or not at all, and tries beforehand whether they can be written."""

import os
from contextlib import suppress
from pathlib import Path
from stat import S_IMODE
from uuid import uuid4

from equipoise.hal.errors import EquipoiseError, UsageError

DEVICES = "/dev"
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
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, data)
    except OSError as error:
        raise EquipoiseError(f"{path} cannot be written: {error.strerror}") from error
    return place


def _replace(path: Path, data: bytes) -> None:
    """By a new file in the same folder and a rename: a full disk or a kill leaves no half file."""
    target = Path(os.path.realpath(path))  # of a link, what it points to is replaced
    there = target.exists()
    if path.is_relative_to(DEVICES) or (there and not target.is_file()):
        path.write_bytes(data)  # /dev/stdout, a pipe
        return
    temporary = target.parent / f".{target.name[:100]}.{uuid4().hex}"
    try:
        with temporary.open("xb") as stream:
            if there:
                temporary.chmod(S_IMODE(target.stat().st_mode))
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())  # some disks say only now that they are full
        temporary.replace(target)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


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
    new_folders: list[Path] = []
    try:
        for folder in reversed([one for one in path.parents if not one.exists()]):
            with suppress(FileExistsError):  # made meanwhile by a process that tries the same
                folder.mkdir()
                new_folders.append(folder)
        _try(path)
    except OSError as error:
        raise UsageError(f"{flag}: {label} cannot be written: {error.strerror}") from error
    finally:
        for folder in reversed(new_folders):
            with suppress(OSError):  # another process has put something there meanwhile: keep it
                folder.rmdir()


def _try(path: Path) -> None:
    if path.is_file():
        path.open("ab").close()
    elif not os.path.lexists(path):  # a pipe would wait for its reader; a device is written or not
        with suppress(FileExistsError):  # another process tries the same, and has succeeded
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            path.unlink()
