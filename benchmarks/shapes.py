"""The shapes that planners are compared on, and what happens in a comparison."""

from collections.abc import Sequence
from dataclasses import dataclass

from loads import Counts, Model, batches, windows

WINDOWS, BATCHES = 13, 2
"""Windows of a trial, and batches of each."""


@dataclass(frozen=True)
class Shape:
    """How many of everything, and the nodes and groups of the hierarchical rule."""

    layers: int
    experts: int
    slots: int
    ranks: int
    nodes: int
    groups: int

    @property
    def model(self) -> Model:
        """Loads of that shape."""
        return Model(layers=self.layers, experts=self.experts, ranks=self.ranks)


SHAPES = {
    "a": Shape(58, 256, 288, 32, 4, 8),
    "b": Shape(58, 256, 320, 64, 8, 8),
    "c": Shape(94, 128, 160, 32, 4, 8),
    "d": Shape(61, 384, 512, 128, 16, 16),
    "e": Shape(58, 256, 1152, 576, 72, 8),
}


@dataclass(frozen=True)
class Trial:
    """Windows, one after the other.

    Attributes:
        loads: (layers, experts) of each window.
        switched: whether its domain is another than in the window before.
        told: batches of each window, (layers, experts).
    """

    loads: Sequence[Counts]
    switched: Sequence[bool]
    told: Sequence[Sequence[Counts]]


def synthetic(shape: Shape, seed: int) -> Trial:
    """The calibrated loads of `loads.py`."""
    found = list(windows(shape.model, seed, WINDOWS))
    told = [
        list(batches(shape.model, window.odds, seed * 100 + number - 1, BATCHES)) if number else []
        for number, window in enumerate(found)
    ]
    return Trial([window.load for window in found], [window.switched for window in found], told)
