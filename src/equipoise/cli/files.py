"""Writing what the user asked for, or saying in one line why not."""

from pathlib import Path

from equipoise.hal.errors import EquipoiseError


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
