"""The handle of an operation of `torch.distributed`, translated."""

import re
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import DistError

from equipoise.hal.errors import (
    CommunicatorFailed,
    EquipoiseError,
    OperationTimeout,
    ResultPending,
    Unsupported,
)
from equipoise.hal.stream import Stream

MIN_WAIT = 0.001
"""Seconds: the shortest time-out that c10d knows. Zero means to it that there is none."""
FAILURE = re.compile(
    r"time[d-]* ?out|connect|closed|reset by|abort|broken pipe|socket|lost|peer|shut ?down"
    r"|destroyed",
    re.IGNORECASE,
)
"""What libraries say when they fail; anything else raised at a call refuses its arguments."""
TIMEOUT = re.compile(r"time[d-]* ?out(?! caused)", re.IGNORECASE)
"""What they say when the operation itself has timed out. Gloo says "timeout caused pair closure" of
one that comes after such an operation."""


class C10dWork:
    """One operation, or some that were issued together; holds the library's handles, nothing else.

    Args:
        native: the library's handles.
        label: the operation and the purpose of its communicator, for errors.
        timeout: seconds; the library's own time-out.
    """

    def __init__(self, native: Sequence[Any], label: str, timeout: float) -> None:
        self._native = tuple(native)
        self._label = label
        self._expiry = time.monotonic() + timeout

    def done(self) -> bool:
        """`is_completed` of all."""
        return all(work.is_completed() for work in self._native)

    def wait(self, stream: Stream) -> None:
        """`wait` of c10d, launched: on a device it orders the stream, on the CPU it blocks it."""
        if self.done():  # so its wait returns, or raises what the operation has failed with (E10)
            with stream.current():
                self._wait(None)
            return
        stream.launch(lambda: self._wait(None))

    def result(self, timeout: float) -> None:
        """`wait(timeout)` of c10d, or `wait()` where the library's own time-out comes first: a
        longer one would take its place."""
        self._wait(timeout if time.monotonic() + timeout < self._expiry else None)

    def cancel(self) -> None:
        """Not in c10d."""
        raise Unsupported(f"{self._label}: torch.distributed cannot cancel an operation")

    def _wait(self, timeout: float | None) -> None:
        """Wait for all, for `timeout` seconds, or as long as the library itself allows."""
        expiry = None if timeout is None else time.monotonic() + timeout
        for work in self._native:
            try:
                if expiry is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=max(expiry - time.monotonic(), MIN_WAIT)))
            except EquipoiseError:
                raise
            except Exception as error:
                self._raise_translated(error, soft=expiry is not None)

    def _raise_translated(self, error: Exception, soft: bool) -> NoReturn:
        text = first_line(error)
        if not TIMEOUT.search(text):
            raise CommunicatorFailed(f"{self._label} failed: {text}") from error
        if soft:  # the caller's time-out has passed, not yet the operation's
            raise ResultPending(f"{self._label} has not ended: {text}") from error
        raise OperationTimeout(f"{self._label} passed its deadline: {text}") from error


def refusal_or_failure(label: str, error: Exception) -> EquipoiseError:
    """What an error that was raised at a call means: `Unsupported` or `CommunicatorFailed`."""
    text = first_line(error)
    if isinstance(error, DistError) or FAILURE.search(text):
        return CommunicatorFailed(f"{label} failed: {text}")
    return Unsupported(f"{label} is refused: {type(error).__name__}: {text}")


def first_line(error: Exception) -> str:
    """The first line of its text: libraries append stacks."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
