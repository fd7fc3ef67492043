"""The process of a command: its standard streams and the signals that end it.

Output that is closed, full or no longer read must not raise at exit. SIGTERM and SIGHUP end the
program as Ctrl-C does, so that everything that was opened is closed.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


def open_missing_streams() -> None:
    """Give the program somewhere to write where it was started with a closed stream."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def redirect_broken_streams() -> bool:
    """Point every stream that cannot be flushed at the null device.

    What it still holds would otherwise fail again, with a traceback, when the interpreter ends.
    Returns whether standard output was one of them.
    """
    broken = False
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            broken = broken or stream is sys.stdout
            _divert(stream.fileno())
    return broken


def print_stderr(line: str) -> None:
    """One line on standard error, if anybody can read it."""
    try:
        print(f"equipoise: {line}", file=sys.stderr, flush=True)
    except OSError:
        redirect_broken_streams()


def _divert(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, descriptor)
    finally:
        os.close(null)


SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # Not every system has a terminal to hang up.


class TerminatedBySignal(BaseException):
    """A signal ended the program; not an Exception, as KeyboardInterrupt is not."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """What a shell reports of a program that the signal ended."""
        return 128 + self.number


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """Raise `TerminatedBySignal` in the main thread on a signal; restore the handlers at the end.

    A signal that is ignored (`nohup`) or that the caller handles itself is left as it is.
    """
    numbers = _default_ones() if threading.current_thread() is threading.main_thread() else ()
    try:
        for number in numbers:
            signal.signal(number, _raise)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _default_ones() -> tuple[signal.Signals, ...]:
    return tuple(number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    # Closing a terminal sends more than one: the second must not disturb the cleaning up.
    for other in SIGNALS:
        if signal.getsignal(other) is _raise:
            signal.signal(other, signal.SIG_IGN)
    raise TerminatedBySignal(number)
