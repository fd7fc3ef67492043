"""How often a layer was entered and left while it has a lock."""

import threading
from collections.abc import Callable

from equipoise.hal.errors import EngineError


class Visits:
    """Counts a layer's entries in the two steps in which it is handed over and taken back.

    A layer may be entered several times in a step: several layers of the model share its weights,
    a draft runs several times, micro-batches come one after another. The lock is taken at the
    first entry of a step and goes back at the last exit. How many there are is known beforehand,
    since nobody can tell from an exit whether it is the last.

    Any thread may enter and leave.

    Args:
        layer: for errors.
        first: the step that hands the layer over; the next one takes it back.
        entries: in each of them.
    """

    def __init__(self, layer: int, first: int, entries: int) -> None:
        self._layer = layer
        self._first = first
        self._entries = entries
        self._mutex = threading.Lock()
        self._entered = 0
        self._left = 0

    def enter(self, step: int, take: Callable[[], None]) -> None:
        """Come in; the first of a step takes the lock, and the others wait until it has.

        Raises:
            EngineError: the step before was not entered as often as was registered, or this one
                is entered more often. What `take` raises. Nothing is counted then.
        """
        with self._mutex:
            before = (step - self._first) * self._entries
            here = self._entered - before
            if here < 0 or (here == 0 and self._left < before):
                raise self._short(step - 1)
            if here >= self._entries:
                raise EngineError(
                    f"layer {self._layer} is entered more than {self._entries} times in step {step}"
                )
            if here == 0:
                take()
            self._entered += 1

    def leave(self, give_back: Callable[[], None]) -> None:
        """Go out; the last of a step gives the lock back."""
        with self._mutex:
            self._left += 1
            if self._left % self._entries == 0:
                give_back()

    def check_over(self) -> None:
        """Raise `EngineError` unless both steps were entered and left as registered."""
        turns = self._left // self._entries
        if turns < 2:
            raise self._short(self._first + turns)

    def _short(self, step: int) -> EngineError:
        """The mover would wait in vain, or write beside a reader."""
        before = (step - self._first) * self._entries
        entered, left = (max(0, count - before) for count in (self._entered, self._left))
        return EngineError(
            f"layer {self._layer} was entered {entered} times and left {left} times in step "
            f"{step}, not {self._entries}"
        )
