"""What is noted of a request while it is in the proxy."""

from dataclasses import dataclass

from equipoise.serve.events import Usage
from equipoise.serve.outcomes import Outcome
from equipoise.serve.record import Record


@dataclass
class Call:
    """Times are the event loop's, in seconds; None: it has not come to that.

    Attributes:
        id: its `X-Request-Id`.
        path: what is asked for.
        arrival: when its head had arrived.
        model: as its body says.
        streamed: whether its answer is to come event by event.
        ready: when its body had been read and checked.
        waited: seconds in which no worker had it.
        sent: when it was first sent to a worker.
        worker: name of the worker that has or had it.
        bound: when it was bound to that worker.
        first: when the first of an answer was passed on.
        passing: seconds from getting the first of an answer to having passed it on.
        attempts: times that it was sent.
        prompt: tokens.
        output: tokens.
        outcome: None while it lasts.
    """

    id: str
    path: str
    arrival: float
    model: str = ""
    streamed: bool = False
    ready: float | None = None
    waited: float = 0.0
    sent: float | None = None
    worker: str | None = None
    bound: float | None = None
    first: float | None = None
    passing: float = 0.0
    attempts: int = 0
    prompt: int = 0
    output: int = 0
    outcome: Outcome | None = None

    def heed(self, usage: Usage) -> None:
        """What a worker says goes before what was estimated and counted."""
        if usage.prompt is not None:
            self.prompt = usage.prompt
        if usage.completion is not None:
            self.output = usage.completion

    @property
    def added(self) -> float | None:
        """Seconds that the proxy itself took before the first of an answer was passed on."""
        if self.ready is None or self.sent is None or self.first is None:
            return None
        return max(0.0, self.sent - self.ready - self.waited) + self.passing

    def record(self, end: float, epoch: float, run: float) -> Record:
        """For the log of a `run`; `epoch` is what the loop's clock is behind the wall's."""
        return Record(
            run=run,
            id=self.id,
            path=self.path,
            model=self.model,
            streamed=self.streamed,
            worker=self.worker,
            attempts=self.attempts,
            arrival=epoch + self.arrival,
            bound=None if self.bound is None else epoch + self.bound,
            first=None if self.first is None else epoch + self.first,
            end=epoch + end,
            prompt=self.prompt,
            output=self.output,
            outcome=self.outcome or Outcome.FAILED,
        )
