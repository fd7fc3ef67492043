"""Writing what the user asked for, or saying in one line why not."""

import os
from contextlib import suppress
from pathlib import Path

from equipoise.hal.errors import EquipoiseError, UsageError

LAUNCHED = "WORLD_SIZE"
"""Set where a launcher has started the ranks: by torchrun, or by `join_launcher` for mpiexec."""


def ensure_folder(path: Path) -> Path:
    """`path`, made if it was missing. Raises EquipoiseError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EquipoiseError(f"{path} cannot be made: {error.strerror}") from error
    return path


def write_file(path: Path, text: str) -> None:
    """UTF-8, folders made as needed. Raises EquipoiseError naming the path and the reason."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A path on the command line may hold bytes that are not UTF-8: shown as a question mark.
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise EquipoiseError(f"{path} cannot be written: {error.strerror}") from error


def try_file(flag: str, path: Path) -> None:
    """See that a file can be written there, by making it, before hours are spent on what it holds.

    Permissions do not say it all: the superuser has every one of them below /proc. Leaves nothing
    behind, and what is there as it is. Ranks that are started already do not try: they would run
    into what another one tries. Raises UsageError naming flag, path and reason.
    """
    _try_below(flag, path, path)


def try_folder(flag: str, path: Path) -> None:
    """The same of a folder that files are to be written to."""
    _try_below(flag, path, path / ".tried")


def _try_below(flag: str, said: Path, path: Path) -> None:
    if LAUNCHED in os.environ:
        return
    made: list[Path] = []
    try:
        for folder in reversed([one for one in path.parents if not one.exists()]):
            folder.mkdir()
            made.append(folder)
        _try(path)
    except OSError as error:
        raise UsageError(f"{flag}: {said} cannot be written: {error.strerror}") from error
    finally:
        for folder in reversed(made):
            with suppress(OSError):  # somebody has put something there meanwhile: it is theirs
                folder.rmdir()


def _try(path: Path) -> None:
    if path.is_file():
        path.open("ab").close()
    elif not os.path.lexists(path):  # a pipe would wait for its reader; a device is written or not
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        path.unlink()
