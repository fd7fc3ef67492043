"""Communicators that nobody wants any more, and that cannot be given back.

Some libraries can end no operation, and torch_npu ends a process that gives back a communicator in
use. So what still has something under way when its fabric closes is kept, and given back when a
later look finds it idle, or never. Where the library can abort, it is aborted, and kept until that
has an effect.
"""

import atexit
import faulthandler
import threading

from equipoise.backends.devices.collectives.channel import Channel
from equipoise.hal.errors import CommunicatorFailed

GUARD = 5.0
"""Seconds that the vendor gets to end the process while something hangs on the device."""


class Stranded:
    """The channels of this process that are kept. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Channel] = []
        self._guarded = False

    def keep(self, channel: Channel) -> None:
        """Nobody but this list uses it from now on."""
        channel.abort(CommunicatorFailed(f"{channel.membership.name} was given up"))
        with self._lock:
            self._kept.append(channel)
            if not self._guarded:
                self._guarded = True
                atexit.register(self._guard)

    def sweep(self) -> None:
        """Give back what has become idle by now."""
        with self._lock:
            self._kept = [channel for channel in self._kept if not _over(channel)]

    def names(self) -> tuple[str, ...]:
        """What is kept."""
        with self._lock:
            return tuple(channel.membership.name for channel in self._kept)

    def _guard(self) -> None:
        """Vendors wait for the whole device when the interpreter ends; that may be for ever."""
        self.sweep()
        if self.names():
            faulthandler.dump_traceback_later(GUARD, exit=True)


def _over(channel: Channel) -> bool:
    """Whether it was idle, and was given back."""
    if channel.reap():
        channel.close()
    return channel.gone()


STRANDED = Stranded()
"""Of this process."""
