"""Every constant of the stages, links and requests that `pipeline.py` measures on.

- A stage's compute is a timed wait, in proportion to its rows. How long a row takes follows from
  what is swept: the time that the rows' transfer takes on the link, over that of their compute.
- No stage is shorter than `FLOOR`: layers of a large model read their weights for one token, too.
  Four stages were published with 110 ms a token (vllm-ascend pull request 7143), 27 ms each. On a
  link that is quick the transfer of few rows is then less than was asked of it beside compute; the
  table says what part it really was.
- The emulated link has so much latency that small messages, too, take half of a stage and more; its
  rate is a third of what the forwarder manages, so that two cores have time for the ranks.
"""

from dataclasses import dataclass

from link_place import Asked

STAGES = 2
"""Of the main case. Four time-slice on two cores, and are reported."""
HIDDEN = (4096, 5120, 7168)
TOKENS = (1, 8, 64, 256, 512)
RATIOS = (0.5, 0.75, 1.0)
"""Time of a transfer over that of a stage's compute."""
WIDTH = 2
"""Bytes of an element, bfloat16."""
TENSORS = 2
"""That travel in a step: hidden states and residual."""
LINK = Asked(latency=8e-3, rate=400e6)
FLOOR = 16e-3
"""Seconds of a stage's compute at least."""
PREPARE = 0.1
"""Part of a stage's time in which the host prepares the step's inputs and needs no activations."""
WARM, SECONDS, FEWEST, MOST = 8, 0.6, 24, 150
"""Micro-batches before the measured ones; seconds of compute that those take, and their bounds."""


def in_flight(stages: int) -> int:
    """Micro-batches of a pipeline: enough for every stage and every transfer to have one."""
    return 3 * stages


def message_bytes(hidden: int, rows: int) -> int:
    """That travel from one stage to the next."""
    return TENSORS * WIDTH * hidden * rows


@dataclass(frozen=True)
class Point:
    """What is swept.

    Attributes:
        hidden: elements of a row.
        tokens: rows of every micro-batch.
        ratio: seconds of a transfer on the idle link over those of a stage's compute.
    """

    hidden: int
    tokens: int
    ratio: float

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.hidden} x {self.tokens}, {self.ratio:g}"

    def compute(self, transfer: float) -> float:
        """Seconds of a stage, where the transfer takes so many."""
        return max(FLOOR, transfer / self.ratio)


def count(seconds: float) -> int:
    """Measured micro-batches, where a stage takes so long."""
    return max(FEWEST, min(MOST, round(SECONDS / seconds)))


def points() -> tuple[Point, ...]:
    """All."""
    return tuple(Point(h, t, r) for h in HIDDEN for t in TOKENS for r in RATIOS)
