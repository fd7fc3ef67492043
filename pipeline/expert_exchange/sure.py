"""Steps on the fast exchange, and again on the sure one where they did not fit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from equipoise.hal.stream import Stream
from equipoise.pipeline.expert_exchange.fixed import FixedExchange
from equipoise.pipeline.expert_exchange.verbs import TokenExchange
from equipoise.pipeline.expert_exchange.words import Fitted, Overflowed

T = TypeVar("T")


@dataclass(frozen=True)
class Tally:
    """What became of the steps so far.

    Attributes:
        fitted: steps that ran once.
        rerun: steps that ran again, because some rank had more rows than fit.
        rows: the most rows by which a message exceeded its capacity.
        results: the most results by which one did.
        stray: choices of this rank that fell on inactive ranks, in steps that ran once.
    """

    fitted: int = 0
    rerun: int = 0
    rows: int = 0
    results: int = 0
    stray: int = 0

    def with_step(self, verdict: Fitted | Overflowed) -> "Tally":
        """One step more."""
        match verdict:
            case Fitted(stray=stray):
                return Tally(
                    self.fitted + 1, self.rerun, self.rows, self.results, self.stray + stray
                )
            case Overflowed(rows=rows, results=results):
                most = max(self.rows, rows), max(self.results, results)
                return Tally(self.fitted, self.rerun + 1, *most, self.stray)


class SureExchange:
    """Runs whole steps; all ranks come to the same verdict, so all run again or none does.

    Args:
        fast: has a capacity, and says behind the step whether it was enough.
        sure: carries any number of rows.
        stream: on which the words are read, behind the step.
    """

    def __init__(self, fast: FixedExchange, sure: TokenExchange, stream: Stream) -> None:
        self._fast = fast
        self._sure = sure
        self._stream = stream
        self._tally = Tally()

    @property
    def tally(self) -> Tally:
        """What became of the steps so far."""
        return self._tally

    def run(self, step: Callable[[TokenExchange], T], timeout: float) -> T:
        """One step.

        Args:
            step: dispatches, combines and releases; what else it writes it writes again when it
                runs again. Nothing of it may be used, or shown, before this returns.
            timeout: seconds that the host waits for the words.

        Raises:
            GenerationMismatch: a rank dispatched with tables of another generation.
            StreamTimeout: the words were not read in time.
        """
        value = step(self._fast)
        verdict = self._fast.read(self._stream).result(timeout)
        self._tally = self._tally.with_step(verdict)
        match verdict:
            case Fitted():
                return value
            case Overflowed():
                return step(self._sure)
