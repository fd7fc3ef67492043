"""A range of iterations, written START-STOP on the command line."""

import re
from dataclasses import dataclass

RANGE_PATTERN = re.compile(r"([0-9]{1,12})-([0-9]{1,12})")
"""At most twelve digits, so that an int64 holds any iteration."""


@dataclass(frozen=True)
class IterationRange:
    """The iterations `start` to `stop` - 1, at least one. Raises ValueError for none.

    Half-open, as TensorRT-LLM reads `EXPERT_STATISTIC_ITER_RANGE`: 10-20 is ten iterations, of
    which the last is 19.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"{self.start}-{self.stop} has no iteration")

    @staticmethod
    def parse(text: str) -> "IterationRange":
        """Parses START-STOP in decimal digits. Raises ValueError."""
        match = RANGE_PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not START-STOP")
        return IterationRange(int(match[1]), int(match[2]))

    def __len__(self) -> int:
        """Returns the number of iterations."""
        return self.stop - self.start

    def __contains__(self, iteration: int) -> bool:
        """Returns whether `iteration` is in the range."""
        return self.start <= iteration < self.stop

    def __str__(self) -> str:
        """Returns START-STOP."""
        return f"{self.start}-{self.stop}"
