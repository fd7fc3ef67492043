"""Releases communicators of the library: together with the other members, or later, or never.

**Together.** A communicator must not be released while a member still uses it: what runs there
would end with an error on every member. So a member whose part is idle announces its release,
and releases the communicator when all members have done so. Nobody waits for it: closing only
starts it, and the watchdog polls. If the library can abort, a member may leave alone: its
announcement says so, and the others abort their parts too, since there is no common end any more.

**Later or never.** Some libraries cannot end an operation, and torch_npu ends the process if it
releases a communicator in use. So what is still busy when its fabric closes is kept by the process,
and released when a later poll finds it idle, or never. If the library can abort, it is aborted, and
kept until that has an effect.
"""

import atexit
import faulthandler
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from equipoise.backends.common.control_plane import StoreControlPlane
from equipoise.backends.devices.collectives.comm_stream import CommStream
from equipoise.hal.errors import BallotIncomplete, CommunicatorFailed, ControlError

EXIT_TIMEOUT = 5.0
"""Seconds that the process may take to exit while something hangs on the device. Vendors wait for
the whole device at exit, without a bound."""


class UnreleasedComms:
    """The communicators of this process that could not be released. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._comm_streams: list[CommStream] = []
        self._guarded = False

    def keep(self, comm_stream: CommStream) -> None:
        """Take over a communicator; the caller does not use it any more."""
        comm_stream.abort(CommunicatorFailed(f"{comm_stream.spec.name} was given up"))
        with self._lock:
            self._comm_streams.append(comm_stream)
            if not self._guarded:
                self._guarded = True
                atexit.register(self._guard)

    def release_idle(self) -> None:
        """Release what has become idle."""
        with self._lock:
            self._comm_streams = [
                comm_stream for comm_stream in self._comm_streams if not _over(comm_stream)
            ]

    def names(self) -> tuple[str, ...]:
        """Names of what is kept."""
        with self._lock:
            return tuple(comm_stream.spec.name for comm_stream in self._comm_streams)

    def _guard(self) -> None:
        """At exit: end the process after `EXIT_TIMEOUT`, since the vendor would wait for the
        device."""
        self.release_idle()
        if self.names():
            faulthandler.dump_traceback_later(EXIT_TIMEOUT, exit=True)


def _over(comm_stream: CommStream) -> bool:
    """Release it if it is idle. Returns whether it is released."""
    if comm_stream.collect_completed():
        comm_stream.close()
    return comm_stream.is_released()


UNRELEASED_COMMS = UnreleasedComms()
"""Of this process."""


PAUSE = 0.005
"""Seconds between two polls of `finish`: a poll asks the device and, where something ended, the
store."""
ABORT_TIMEOUT = 2.0
"""Maximum seconds that a closing fabric waits for what it has aborted; then it is kept."""
ABORTED = b"aborted"
"""The announcement of a member that aborted without waiting for the others."""


@dataclass
class Teardown:
    """A communicator of the library that is being released.

    Attributes:
        comm_stream: the communicator.
        is_announced: whether this member has announced that it releases.
        announcements_read: whether this member has read the announcements of all members.
    """

    comm_stream: CommStream
    is_announced: bool = False
    announcements_read: bool = False


class TeardownQueue:
    """The communicators of one fabric that are being released. Thread-safe.

    Args:
        library: name of the library.
        control: carries the announcements.
    """

    def __init__(self, library: str, control: StoreControlPlane) -> None:
        self._library = library
        self._control = control
        self._lock = threading.Lock()
        self._open: list[Teardown] = []

    def add(self, comm_stream: CommStream) -> None:
        """Release it as soon as all members are idle."""
        with self._lock:
            self._open.append(Teardown(comm_stream))

    def tick(self) -> bool:
        """Advance all without waiting. Returns whether some are left."""
        with self._lock:
            self._open = [teardown for teardown in self._open if not self._advance(teardown)]
            return bool(self._open)

    def finish(self, timeout: Callable[[], float]) -> None:
        """Advance for `timeout()` seconds, then abort what is left, or keep it. The timeout is
        asked again at each poll: it shrinks when a rank is lost meanwhile."""
        self._go_on(timeout)
        if self._abort():
            self._go_on(lambda: ABORT_TIMEOUT)
        with self._lock:
            teardowns, self._open = self._open, []
        for teardown in teardowns:
            UNRELEASED_COMMS.keep(teardown.comm_stream)

    def _go_on(self, timeout: Callable[[], float]) -> None:
        start = time.monotonic()
        while self.tick() and time.monotonic() - start < timeout():
            time.sleep(PAUSE)

    def _abort(self) -> bool:
        """Abort all that are left. Returns whether one could be aborted."""
        with self._lock:
            channels = [teardown.comm_stream for teardown in self._open]
        for comm_stream in channels:
            comm_stream.abort(CommunicatorFailed(f"{comm_stream.spec.name}: its fabric was closed"))
        return any(comm_stream.aborted for comm_stream in channels)

    def _advance(self, teardown: Teardown) -> bool:
        """Advance one. Returns whether it is done."""
        comm_stream = teardown.comm_stream
        idle = comm_stream.collect_completed()
        if not idle and not comm_stream.aborted:
            return False
        try:
            self._announce_release(teardown)
        except BallotIncomplete:
            if comm_stream.can_abort and self._member_lost(comm_stream):
                comm_stream.abort(CommunicatorFailed(f"{comm_stream.spec.name}: a member was lost"))
            return comm_stream.is_released()
        except ControlError:
            UNRELEASED_COMMS.keep(comm_stream)
            return True
        return comm_stream.is_released()

    def _announce_release(self, teardown: Teardown) -> None:
        """Announce that this member releases, and release the communicator once all members have.
        Raises `BallotIncomplete` and `ControlError`."""
        comm_stream, spec = teardown.comm_stream, teardown.comm_stream.spec
        question = f"{self._library}/{spec.name}/release"
        if not teardown.is_announced:
            self._control.cast(question, ABORTED if comm_stream.aborted else b"")
            teardown.is_announced = True
        if teardown.announcements_read:
            return  # read once only: the last member to read them deletes them
        if not comm_stream.aborted:
            if ABORTED in self._control.collect(question, 0.0, spec.ranks):
                comm_stream.abort(CommunicatorFailed(f"{spec.name}: a member has aborted it"))
            comm_stream.close()
        teardown.announcements_read = True
        self._control.forget_together(question, spec.ranks)

    def _member_lost(self, comm_stream: CommStream) -> bool:
        """Whether a member was lost, so that its announcement will never come."""
        loss = self._control.lost_rank(0.0)
        return loss is not None and loss.rank in comm_stream.spec.ranks
