"""Closing several things, whatever becomes of one of them."""

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Protocol

from equipoise.hal.errors import EquipoiseError

LOG = logging.getLogger(__name__)


class Closeable(Protocol):
    """Has an end."""

    def close(self) -> None:
        """Bounded."""
        ...


def close_all(closing: Iterable[Closeable]) -> None:
    """Close every one, the last first; raises what the last of them raised that did."""
    with ExitStack() as ends:
        for one in closing:
            ends.callback(one.close)


def close_quietly(closing: Iterable[Closeable]) -> None:
    """The same where an error is on its way that matters more."""
    try:
        close_all(closing)
    except EquipoiseError as error:
        LOG.warning("not closed well, behind another error: %s", error)
