"""The handle of an operation of `torch.distributed`, translated."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from equipoise.backends.common.library_errors import wait_error
from equipoise.hal.errors import Unsupported
from equipoise.hal.stream import Stream

MIN_WAIT = 0.1
"""Seconds of a wait that must not wait. Zero means to c10d that there is no time-out, and a library
that keeps its groups in processes of their own has to ask there."""


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
            except Exception as error:
                raise wait_error(self._label, error, soft=expiry is not None) from error
