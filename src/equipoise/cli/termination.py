"""SIGTERM and SIGHUP end the program as Ctrl-C does: everything that was opened is closed."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # Not every system has a terminal to hang up.


class Terminated(BaseException):
    """The program was told to end; not an Exception, as KeyboardInterrupt is not."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """What a shell reports of a program that the signal ended."""
        return 128 + self.number


@contextmanager
def terminable() -> Iterator[None]:
    """Within it a signal raises Terminated in the main thread; handlers are restored after it.

    A signal that is ignored (`nohup`) or that the caller handles itself is left as it is.
    """
    taken = _default_ones() if threading.current_thread() is threading.main_thread() else ()
    try:
        for number in taken:
            signal.signal(number, _raise)
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _default_ones() -> tuple[signal.Signals, ...]:
    return tuple(number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    # Closing a terminal sends more than one: the second must not disturb the cleaning up.
    for other in SIGNALS:
        if signal.getsignal(other) is _raise:
            signal.signal(other, signal.SIG_IGN)
    raise Terminated(number)
