"""A message on its way out."""

from equipoise.hal.errors import CommunicatorError, EquipoiseError, StreamError
from equipoise.hal.stream import Event
from equipoise.hal.work import Work


class Departure:
    """The handle of a sent message; dropping it changes nothing.

    The message is packed and sent by a program of the edge's stream, which may run later than the
    call that asked for it. What fails there is raised here, so that the stream goes on: a lost
    peer is no reason to stop computing.

    Args:
        sequence: of the message.
        passed: recorded behind the program.
        deadline: seconds that `wait` waits.
    """

    def __init__(self, sequence: int, passed: Event, deadline: float) -> None:
        self.sequence = sequence
        self._passed = passed
        self._deadline = deadline
        self._works: tuple[Work, ...] = ()
        self._failure: EquipoiseError | None = None
        self._over = False

    def sent(self, *works: Work) -> None:
        """The program has handed the message to the communicator."""
        self._works += works

    def fail(self, failure: EquipoiseError) -> None:
        """The program could not."""
        self._failure = failure

    def is_completed(self) -> bool:
        """Whether `wait` would come back, or raise, at once."""
        if self._over or self._failure is not None:
            return True
        return self._passed.query() and all(work.done() for work in self._works)

    def wait(self) -> None:
        """Block the host until the message has left its buffer.

        Raises:
            CommunicatorFailed: it could not be sent.
            StreamFailed: the stream failed before it was packed.
            StreamTimeout: it was not packed by the deadline.
        """
        if not self._over:
            self._follow()
            self._over, self._works = True, ()
        if self._failure is not None:
            raise self._failure

    def _follow(self) -> None:
        try:
            self._passed.synchronize(self._deadline)
            for work in self._works:
                work.result(self._deadline)
        except (CommunicatorError, StreamError) as failure:
            self._failure = self._failure or failure
