"""Communicators that nobody wants any more, and that cannot be given back.

HCCL can end no operation, and torch_npu ends a process that gives back a communicator in use. So
what still has something under way when its fabric closes is kept, and given back when a later look
finds it idle, or never.
"""

import atexit
import faulthandler
import threading

from equipoise.backends.ascend.channel import Channel

GUARD = 5.0
"""Seconds that torch_npu gets to end the process while something hangs on the device."""


class Stranded:
    """The channels of this process that are kept. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Channel] = []
        self._guarded = False

    def keep(self, channel: Channel) -> None:
        """Nobody but this list uses it from now on."""
        with self._lock:
            self._kept.append(channel)
            if not self._guarded:
                self._guarded = True
                atexit.register(self._guard)

    def sweep(self) -> None:
        """Give back what has become idle by now."""
        with self._lock:
            idle = [channel for channel in self._kept if channel.reap()]
            self._kept = [channel for channel in self._kept if channel not in idle]
        for channel in idle:
            channel.close()

    def names(self) -> tuple[str, ...]:
        """What is kept."""
        with self._lock:
            return tuple(channel.membership.name for channel in self._kept)

    def _guard(self) -> None:
        """Torch_npu waits for the whole device when the interpreter ends; that may be for ever."""
        self.sweep()
        if self.names():
            faulthandler.dump_traceback_later(GUARD, exit=True)


STRANDED = Stranded()
"""Of this process."""
