"""What a broken backend is: the healthy one with some attribute of it replaced."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

Patch = Callable[[Any, str, object], None]
"""Replaces an attribute of an object."""


@dataclass(frozen=True, kw_only=True)
class Breakage:
    """One broken behaviour, and who is to notice.

    Attributes:
        name: words with underscores: also the attribute by which rank processes get it.
        broken: one sentence: what the backend does instead.
        property: the property of the suite that must reject it.
        ranks: 1, or how many rank processes it takes.
        clause: the only one that it may be rejected for; None where several are broken.
        plant: breaks the backend of this process.
    """

    name: str
    broken: str
    property: str
    plant: Callable[[Patch], None]
    ranks: int = 1
    clause: str | None = None


@dataclass(frozen=True)
class Sound:
    """What is broken, by name, as it is without that.

    Attributes:
        backend: the accelerator, as PACKAGE:OBJECT.
        communicator: likewise.
    """

    backend: str
    communicator: str


@contextmanager
def planted(breakage: Breakage) -> Iterator[None]:
    """The backend of this process is broken within the block."""
    with ExitStack() as undone:
        breakage.plant(lambda owner, name, value: patch(undone, owner, name, value))
        yield


def patch(undone: ExitStack, owner: Any, name: str, value: object) -> None:
    """Replace an attribute until `undone` is closed."""
    undone.enter_context(mock.patch.object(owner, name, value))
