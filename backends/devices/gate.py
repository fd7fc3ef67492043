"""A lock around everything that is issued: re-entrant, and first come, first served."""

import threading
from collections import deque
from types import TracebackType


class Gate:
    """Held while something is issued, so that what belongs together is issued whole.

    A program runs while the gate is held: a commit of another thread then comes before all of it or
    after all of it (clause V4). A model's thread launches one program after the other, so the gate
    goes to whoever has waited longest; an ordinary lock would go back to the thread that has just
    given it up, and a mover would starve.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._depth = 0
        self._queue: deque[tuple[int, threading.Lock]] = deque()

    def __enter__(self) -> bool:
        mine = threading.get_ident()
        with self._lock:
            if self._owner in (0, mine):
                self._owner = mine
                self._depth += 1
                return True
            turn = threading.Lock()
            turn.acquire()
            self._queue.append((mine, turn))
        self._await((mine, turn))
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._pass_on()

    def _await(self, ticket: tuple[int, threading.Lock]) -> None:
        """Until the gate is handed over; an interrupt leaves no ticket behind."""
        try:
            ticket[1].acquire()
        except BaseException:
            with self._lock:
                if ticket in self._queue:
                    self._queue.remove(ticket)
                else:
                    self._pass_on()
            raise

    def _pass_on(self) -> None:
        self._owner, self._depth = 0, 0
        if self._queue:
            self._owner, turn = self._queue.popleft()
            self._depth = 1
            turn.release()
