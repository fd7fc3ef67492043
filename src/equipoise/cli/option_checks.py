"""Checks of options that several commands have; each error is one line naming the option."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from equipoise.hal.errors import BackendUnavailable, UsageError

MAX_RANKS = 64
MAX_PORT = 65_535


def check_devices(backend: str, communicator: str | None, ranks: int) -> None:
    """Raises UsageError where this machine has too few devices for so many ranks to start here."""
    from equipoise.hal import registry
    from equipoise.hal.accelerator import check_device_count
    from equipoise.hal.capabilities import Unavailable

    device_backend = registry.accelerator(backend)
    name = communicator or device_backend.communicator
    if not name:
        return  # a device by itself
    links = registry.communicator(name)
    if links.launcher_rendezvous() is not None or isinstance(device_backend.probe(), Unavailable):
        return  # a launcher has started them; or there is more to say than a number
    try:
        check_device_count(device_backend, links, ranks)
    except UsageError as error:
        raise UsageError(f"--ranks {ranks}: {error}") from error


def check_backend(flag: str, name: str, group: str, find: Callable[[str], object]) -> None:
    """Raises UsageError unless `name` is registered in `group`, or can be imported by `find`."""
    from equipoise.hal import registry

    names = registry.names(group)
    if ":" in name:
        _check_object(flag, name, find)
    elif name not in names:
        raise UsageError(
            f"{flag}: unknown name {name!r}; known: {', '.join(names) or 'none'} "
            f"(or {' or '.join(registry.ways_to_name(group))})"
        )


def _check_object(flag: str, name: str, find: Callable[[str], object]) -> None:
    """A PACKAGE:OBJECT is the user's own module, which may fail to import in any way it likes."""
    try:
        find(name)
    except BackendUnavailable as error:
        raise UsageError(f"{flag}: {error}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{flag}: backend {name!r} does not import: {reason}") from error


def check_folder(flag: str, path: Path) -> None:
    """Raises UsageError unless `path` is a folder that can be written to, or can be made."""
    nearest = next((p for p in (path, *path.absolute().parents) if os.path.lexists(p)), path)
    if not nearest.is_dir():
        raise UsageError(f"{flag}: {nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"{flag}: {nearest} cannot be written to")


def check_file(flag: str, path: Path) -> None:
    """Raises UsageError unless `path` can be written as a file."""
    if path.is_dir():
        raise UsageError(f"{flag}: {path} is a folder, not a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise UsageError(f"{flag}: {path} cannot be written to")
    check_folder(flag, path.parent)


def check_terminal() -> None:
    """Raises UsageError where a live display cannot be drawn on standard output."""
    if not sys.stdout.isatty():
        raise UsageError("--live draws on a terminal, and standard output is none: leave it out")
    if os.environ.get("TERM", "dumb") == "dumb":
        raise UsageError("--live needs a terminal that moves its cursor, and TERM is dumb or unset")
