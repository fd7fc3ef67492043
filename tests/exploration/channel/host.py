"""The thread of control of a rank, as a lane of a virtual world."""

from collections.abc import Callable, Iterator

Condition = Callable[[], bool]
Script = Iterator[Condition]
"""Goes on when what it yielded holds."""


class Host:
    """Carries a script out, from one condition to the next.

    Args:
        rank: whose host it is.
        script: what it does.

    Attributes:
        ended: whether the script has, or has raised.
        error: what it raised.
    """

    def __init__(self, rank: int, script: Script) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self.ended = False
        self.error: Exception | None = None
        self._script = script
        self._condition: Condition = _at_once
        self._running = False

    def ready(self) -> bool:
        return not self.ended and not self._running and self._condition()

    def step(self) -> None:
        self._running = True
        try:
            self._condition = next(self._script)
        except StopIteration:
            self.ended = True
        except Exception as error:
            # Its frames lead to those of the hosts that this one was called beneath, and to their
            # tensors.
            self.ended, self.error = True, error.with_traceback(None)
        finally:
            self._running = False


def _at_once() -> bool:
    return True
