"""One expert of one layer: what it weighs, and what a row costs."""

from dataclasses import dataclass

from equipoise.report.advice.hardware import PRECISIONS

MATRICES = 3
"""Of an expert with a gate: up, gate and down."""


@dataclass(frozen=True)
class Expert:
    """Weights of one expert in one layer, scales left out.

    Attributes:
        size: bytes.
        precision: of the weights, a key of `PRECISIONS`.
    """

    size: int
    precision: str

    @classmethod
    def of_dimensions(cls, hidden: int, intermediate: int, precision: str) -> "Expert":
        """Three matrices of hidden x intermediate."""
        bits = MATRICES * hidden * intermediate * PRECISIONS[precision]
        return cls(-(-bits // 8), precision)

    @property
    def operations_per_row(self) -> int:
        """A multiplication and an addition for each weight."""
        return 2 * self.size * 8 // PRECISIONS[self.precision]
