"""Communicators that nobody wants any more, and that cannot be given back.

Some libraries can end no operation, and torch_npu ends a process that gives back a communicator in
use. So what still has something under way when its fabric closes is kept, and given back when a
later look finds it idle, or never. Where the library can abort, it is aborted, and kept until that
has an effect.

The end of a channel: its members give it back together, or not at all.

A communicator must not be given back while a member still uses it: what runs there would end with
an error, on every member. So a member whose part has ended says so, and gives the channel back when
all have said it. Nobody waits for that: closing only starts it. Where the library can abort, a
member may leave alone: it says that, and the others abort their parts too, for nobody would come to
a common end.
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
"""Seconds that the vendor gets to end the process while something hangs on the device."""


class UnreleasedComms:
    """The channels of this process that are kept. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[CommStream] = []
        self._guarded = False

    def keep(self, comm_stream: CommStream) -> None:
        """Nobody but this list uses it from now on."""
        comm_stream.abort(CommunicatorFailed(f"{comm_stream.spec.name} was given up"))
        with self._lock:
            self._kept.append(comm_stream)
            if not self._guarded:
                self._guarded = True
                atexit.register(self._guard)

    def release_idle(self) -> None:
        """Give back what has become idle by now."""
        with self._lock:
            self._kept = [comm_stream for comm_stream in self._kept if not _over(comm_stream)]

    def names(self) -> tuple[str, ...]:
        """What is kept."""
        with self._lock:
            return tuple(comm_stream.spec.name for comm_stream in self._kept)

    def _guard(self) -> None:
        """Vendors wait for the whole device when the interpreter ends; that may be for ever."""
        self.release_idle()
        if self.names():
            faulthandler.dump_traceback_later(EXIT_TIMEOUT, exit=True)


def _over(comm_stream: CommStream) -> bool:
    """Whether it was idle, and was given back."""
    if comm_stream.collect_completed():
        comm_stream.close()
    return comm_stream.is_released()


UNRELEASED_COMMS = UnreleasedComms()
"""Of this process."""


PAUSE = 0.005
"""Seconds between two looks of `finish`."""
ABORT_TIMEOUT = 2.0
"""Seconds that what was aborted may take to end when a fabric closes."""
ABORTED = b"aborted"
"""The farewell of a member that did not wait for the others."""


@dataclass
class Teardown:
    """A channel that nobody here issues on any more.

    Attributes:
        comm_stream: the channel.
        is_announced: whether the other members know.
        farewells_read: whether this member needs the farewells of the others no more.
    """

    comm_stream: CommStream
    is_announced: bool = False
    farewells_read: bool = False


class TeardownQueue:
    """The channels of one fabric that are being given back. For any number of threads.

    Args:
        library: by its name.
        control: carries the farewells.
    """

    def __init__(self, library: str, control: StoreControlPlane) -> None:
        self._library = library
        self._control = control
        self._lock = threading.Lock()
        self._open: list[Teardown] = []

    def add(self, comm_stream: CommStream) -> None:
        """Give it back when that can be."""
        with self._lock:
            self._open.append(Teardown(comm_stream))

    def tick(self) -> bool:
        """Go as far as possible without waiting; whether something is left."""
        with self._lock:
            self._open = [teardown for teardown in self._open if not self._advance(teardown)]
            return bool(self._open)

    def finish(self, timeout: Callable[[], float]) -> None:
        """Go on for so many seconds, asked each time; then abort what is left, or strand it."""
        self._go_on(timeout)
        if self._abort():
            self._go_on(lambda: ABORT_TIMEOUT)
        with self._lock:
            left, self._open = self._open, []
        for teardown in left:
            UNRELEASED_COMMS.keep(teardown.comm_stream)

    def _go_on(self, timeout: Callable[[], float]) -> None:
        start = time.monotonic()
        while self.tick() and time.monotonic() - start < timeout():
            time.sleep(PAUSE)

    def _abort(self) -> bool:
        """Whether something could be."""
        with self._lock:
            channels = [teardown.comm_stream for teardown in self._open]
        for comm_stream in channels:
            comm_stream.abort(CommunicatorFailed(f"{comm_stream.spec.name}: its fabric was closed"))
        return any(comm_stream.aborted for comm_stream in channels)

    def _advance(self, teardown: Teardown) -> bool:
        """Whether it is over and done with."""
        comm_stream = teardown.comm_stream
        idle = comm_stream.collect_completed()
        if not idle and not comm_stream.aborted:
            return False
        try:
            self._farewell(teardown)
        except BallotIncomplete:
            if comm_stream.can_abort and self._member_lost(comm_stream):
                comm_stream.abort(CommunicatorFailed(f"{comm_stream.spec.name}: a member was lost"))
            return comm_stream.is_released()
        except ControlError:
            UNRELEASED_COMMS.keep(comm_stream)
            return True
        return comm_stream.is_released()

    def _farewell(self, teardown: Teardown) -> None:
        """Begin its end, if that can be now. Raises `BallotIncomplete` and `ControlError`."""
        comm_stream, spec = teardown.comm_stream, teardown.comm_stream.spec
        question = f"{self._library}/{spec.name}/farewell"
        if not teardown.is_announced:
            self._control.cast(question, ABORTED if comm_stream.aborted else b"")
            teardown.is_announced = True
        if teardown.farewells_read:
            return  # the last member may be deleting the farewells
        if not comm_stream.aborted:
            if ABORTED in self._control.collect(question, 0.0, spec.ranks):
                comm_stream.abort(CommunicatorFailed(f"{spec.name}: a member has aborted it"))
            comm_stream.close()
        teardown.farewells_read = True
        self._control.forget_together(question, spec.ranks)

    def _member_lost(self, comm_stream: CommStream) -> bool:
        """Whether a member was lost, and will never say farewell."""
        loss = self._control.lost_rank(0.0)
        return loss is not None and loss.rank in comm_stream.spec.ranks
