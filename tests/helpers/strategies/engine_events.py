"""Builds engine events for tests of event sinks."""

from dataclasses import replace

import numpy as np

from equipoise.balancer.experts.placement import (
    ExpertShape,
    Layout,
    Load,
    Placement,
    even_shares,
    initial_placement,
)
from equipoise.balancer.experts.runtime.events import (
    NO_READS,
    Event,
    LoadReduced,
    RebalanceEnded,
    RebalanceRecord,
    StateChanged,
    StepDone,
)

SHAPE = ExpertShape(layers=2, experts=4, slots=6, ranks=2)
SUB_WINDOW = 2
SLOT_BYTES = 100


class RecordingSink:
    """An event sink that keeps the events it receives."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1


def record(**other: object) -> RebalanceRecord:
    """Returns the record of a committed rebalance, with the fields in `other` replaced."""
    committed = RebalanceRecord(
        number=3,
        opened_at=5,
        ended_at=9,
        outcome="committed",
        layers=2,
        short_of_staging=0,
        chunks=1,
        copies=2,
        bytes_moved=2 * SLOT_BYTES,
        bytes_received=0,
        phase_seconds={"planning": 0.25, "proposed": 0.5},
        imbalance_before=0.4,
        predicted_imbalance=0.1,
    )
    return replace(committed, **other)  # type: ignore[arg-type]


def placements(expert: int = 3) -> tuple[Placement, Placement]:
    """The initial placement, and one in which slot 0 of layer 0 (rank 0) holds `expert`."""
    before = initial_placement(SHAPE)
    after = before.copy()
    after[0, 0] = expert
    return before, after


def rebalance_ended(rank: int = 0, **other: object) -> RebalanceEnded:
    return RebalanceEnded(
        record(**other), 1.0, 2.0, placements(), NO_READS, rank, SHAPE, SLOT_BYTES
    )


def load_reduced(step: int, load: Load) -> LoadReduced:
    placement = initial_placement(SHAPE)
    layout = Layout(placement, even_shares(placement, SHAPE.experts))
    return LoadReduced(step, SUB_WINDOW, load, layout, SHAPE, lambda _, at, __: at.shares)


def rows(*first: int) -> Load:
    """Returns the same rows for every layer."""
    return np.tile(np.array(first, dtype=np.int64), (SHAPE.layers, 1))


def steps(first: int, *seconds: float) -> list[Event]:
    """Returns steps with these durations."""
    return [StepDone(first + rank, 0.0, length) for rank, length in enumerate(seconds)]


def state_changed(state: str, rebalance: int | None = None) -> Event:
    return StateChanged(0, 0.0, state, rebalance)
