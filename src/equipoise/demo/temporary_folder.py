"""A temporary folder that is removed even when a signal ends the process."""

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that exists within the block, also where a signal ends the block by raising.

    `tempfile.TemporaryDirectory` first makes the folder and then sees to its removal: what a signal
    raises between the two leaves it in place.
    """
    folder = Path(tempfile.gettempdir()) / f"equipoise-{secrets.token_hex(8)}"
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
