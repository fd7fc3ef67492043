"""Closes several objects, even if closing one of them raises."""

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Protocol

from equipoise.hal.errors import EquipoiseError

LOG = logging.getLogger(__name__)


class Closeable(Protocol):
    """Has a `close`."""

    def close(self) -> None:
        """Ends it, in bounded time."""
        ...


def close_all(closing: Iterable[Closeable]) -> None:
    """Closes all, the last first; raises the error of the last close that failed."""
    with ExitStack() as ends:
        for item in closing:
            ends.callback(item.close)


def close_quietly(closing: Iterable[Closeable]) -> None:
    """Closes all while another error is raised, which must not be replaced; logs errors."""
    try:
        close_all(closing)
    except EquipoiseError as error:
        LOG.warning("closing failed, after another error: %s", error)
