"""A message on its way out."""

from equipoise.hal.errors import CommunicatorError, EquipoiseError, StreamError
from equipoise.hal.stream import Event
from equipoise.hal.work import Work
from equipoise.pipeline.failures import explained


class Departure:
    """The handle of a sent message; dropping it changes nothing.

    The message is packed by a program of the stream, and handed to the communicator by one of
    another; both may run later than the call that asked for it. What fails there is raised here,
    so that the streams go on: a lost peer is no reason to stop computing.

    Args:
        sequence: of the message.
        packed: recorded behind the program that packs it.
        issued: recorded behind the one that hands it to the communicator; by the time that
            `packed` is reached, unless the packing has failed.
        deadline: seconds that `wait` waits for each.
    """

    def __init__(self, sequence: int, packed: Event, issued: Event, deadline: float) -> None:
        self.sequence = sequence
        self._packed = packed
        self._issued = issued
        self._deadline = deadline
        self._works: tuple[Work, ...] = ()
        self._failure: EquipoiseError | None = None
        self._over = False

    def sent(self, work: Work) -> None:
        """The communicator has one more part of the message."""
        self._works += (work,)

    def fail(self, failure: Exception) -> None:
        """A program could not do its part."""
        what = f"message {self.sequence} could not be handed over"
        self._failure = self._failure or explained(failure, what)

    def is_completed(self) -> bool:
        """Whether `wait` would come back, or raise, at once."""
        if self._over or self._failure is not None:
            return True
        # In this order: before its packing has ended the event may stand for an older message.
        if not self._packed.query() or not self._left():
            return False
        self._end(0.0)
        return True

    def wait(self) -> None:
        """Block the host until the message has left its buffer.

        Raises:
            CommunicatorFailed: it could not be sent.
            StreamFailed: the stream failed before it was packed.
            StreamTimeout: it was not packed by the deadline.
            ChannelError: something else failed in a program.
        """
        if not self._over:
            self._follow()
        if self._failure is not None:
            raise self._failure

    @property
    def failed(self) -> bool:
        """Whether it could not be sent, as far as is known."""
        return self._failure is not None

    def _left(self) -> bool:
        if self._failure is not None:
            return True
        return self._issued.query() and all(work.done() for work in self._works)

    def _follow(self) -> None:
        try:
            self._packed.synchronize(self._deadline)
            if self._failure is None:
                self._issued.synchronize(self._deadline)
        except StreamError as failure:
            self._failure = self._failure or failure
        self._end(self._deadline)

    def _end(self, timeout: float) -> None:
        """Hear of every part how it went, and let go of them: they may keep the buffer."""
        for work in self._works:
            try:
                work.result(timeout)
            except CommunicatorError as failure:
                self._failure = self._failure or failure
        self._over, self._works = True, ()
