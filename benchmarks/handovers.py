"""Who is compared, by name."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from handover import Batch, Handover, Station
from handover_blocking import Blocking
from handover_channel import Channel
from handover_coordinator import Coordinator
from handover_word import Word
from pipeline_loop import LoopedStage
from pipeline_stage import Stage
from token_return import token_return

BLOCKING, COORDINATOR, OURS, WORD = "blocking", "coordinator", "channel", "a word"
THREAD = "channel, one thread"
"""The channel in the loop of the others; `OURS` has the loop of this project."""
BASELINES = BLOCKING, COORDINATOR


class Contestant(Protocol):
    """Serves one run on one stage.

    Attributes:
        messages: that go to the next stage in a step.
        began, ended: instants of every micro-batch.
        wrong: words that were not what they should be.
        cpu: seconds of the processor.
    """

    began: list[float]
    ended: list[float]
    wrong: int
    cpu: float
    messages: int

    def run(self, batches: list[Batch]) -> None:
        """Every micro-batch, in order, until all has arrived everywhere."""
        ...


def one_thread(make: Callable[[Station], Handover], station: Station) -> Stage:
    """A hand-over in the loop that receives, computes and sends in turn."""
    return Stage(station, make(station), token_return(station))


CONTESTANTS: dict[str, Callable[[Station], Contestant]] = {
    BLOCKING: partial(one_thread, Blocking),
    COORDINATOR: partial(one_thread, Coordinator),
    OURS: LoopedStage,
    THREAD: partial(one_thread, Channel),
    WORD: partial(one_thread, Word),
}
"""Every rank makes the one that is named, anew for each run and at the same time as all others."""
