"""Entries of a journal, made up."""

from dataclasses import replace

import numpy as np

from equipoise.balancer.experts.placement import (
    Layout,
    Load,
    Placement,
    Shape,
    contiguous,
    even_shares,
)
from equipoise.balancer.experts.runtime.events import (
    Ended,
    Entered,
    Entry,
    EpochRecord,
    Stepped,
    Summed,
)

SHAPE = Shape(layers=2, experts=4, slots=6, ranks=2)
SUB_WINDOW = 2
SLOT_BYTES = 100


class Kept:
    """A journal that keeps what it is told."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.closed = 0

    def note(self, entry: Entry) -> None:
        self.entries.append(entry)

    def close(self) -> None:
        self.closed += 1


def record(**other: object) -> EpochRecord:
    """Of an epoch that was committed, unless `other` says something else."""
    made = EpochRecord(
        number=3,
        opened=5,
        ended=9,
        outcome="committed",
        layers=2,
        short_of_staging=0,
        lots=1,
        copies=2,
        bytes=2 * SLOT_BYTES,
        here=0,
        seconds={"planning": 0.25, "agreeing": 0.5},
        before=0.4,
        predicted=0.1,
    )
    return replace(made, **other)  # type: ignore[arg-type]


def moved(expert: int = 3) -> tuple[Placement, Placement]:
    """The start placement, and one in which slot 0 of layer 0, of rank 0, holds `expert`."""
    before = contiguous(SHAPE)
    after = before.copy()
    after[0, 0] = expert
    return before, after


def ended(place: int = 0, **other: object) -> Ended:
    return Ended(record(**other), 1.0, 2.0, moved(), place, SHAPE, SLOT_BYTES)


def summed(closed: int, load: Load) -> Summed:
    placement = contiguous(SHAPE)
    layout = Layout(placement, even_shares(placement, SHAPE.experts))
    return Summed(closed, SUB_WINDOW, load, layout, SHAPE, lambda _, at, __: at.shares)


def rows(*first: int) -> Load:
    """Every layer alike."""
    return np.tile(np.array(first, dtype=np.int64), (SHAPE.layers, 1))


def steps(first: int, *seconds: float) -> list[Entry]:
    """Steps of these lengths."""
    return [Stepped(first + place, 0.0, length) for place, length in enumerate(seconds)]


def entered(state: str, epoch: int | None = None) -> Entry:
    return Entered(0, 0.0, state, epoch)
