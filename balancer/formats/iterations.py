"""A range of iterations, as operators write it: START-STOP."""

import re
from dataclasses import dataclass

RANGE_PATTERN = re.compile(r"([0-9]{1,12})-([0-9]{1,12})")


@dataclass(frozen=True)
class Iterations:
    """Iterations `start` to `stop` - 1, at least one; raises ValueError for none.

    Half-open, as TensorRT-LLM takes `EXPERT_STATISTIC_ITER_RANGE`: 10-20 are ten iterations, of
    which the last is 19.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"{self.start}-{self.stop} has no iteration")

    @staticmethod
    def parse(text: str) -> "Iterations":
        """From START-STOP in decimal digits. Raises ValueError."""
        match = RANGE_PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not START-STOP")
        return Iterations(int(match[1]), int(match[2]))

    def __len__(self) -> int:
        """How many."""
        return self.stop - self.start

    def __contains__(self, iteration: int) -> bool:
        """Whether it is one of them."""
        return self.start <= iteration < self.stop

    def __str__(self) -> str:
        """As it is written."""
        return f"{self.start}-{self.stop}"
