"""Events of an engine, and the protocol of sinks that receive them.

An event is a small frozen record of what happened, with times in seconds of one clock, `now()`. A
sink must not block the step, so sinks that write do so on their own thread
(`balancer/observe/async_sink.py`). The default sink drops all events.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import (
    BatchCounts,
    ExpertShape,
    Layout,
    Load,
    Placement,
    RankRows,
    Shares,
)

Ids = npt.NDArray[np.int32]
SlotReads: TypeAlias = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""Layer, slot, and the slot of that layer that it is read from: int32 (moves,) each."""
NO_READS: SlotReads = np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int32)
COMMITTED = "committed"
"""Outcome of a rebalance that changed slots."""
UNCHANGED = "unchanged"
"""Outcome of a rebalance whose plan left every slot as it was."""
COMPLETED = COMMITTED, UNCHANGED
"""Outcomes of rebalances that were not aborted."""


def now() -> float:
    """Returns seconds of a monotonic clock, the same for all processes of a machine."""
    return perf_counter()


class Track(StrEnum):
    """The thread or stream of a span in a trace."""

    COMPUTE = "compute stream"
    COPY = "copy stream"
    BOUNDARY = "boundary"
    REBALANCE = "rebalance"
    PLANNER = "planner"
    TRANSFER = "transfer"
    VOTE = "vote"
    SHARES = "shares"
    LOAD = "load"


@dataclass(frozen=True)
class TraceSpan:
    """A span of work on a track.

    Attributes:
        details: further fields, as JSON has them.
    """

    name: str
    track: Track
    begin: float
    end: float
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class StepDone:
    """A step of the model, including its boundary; emitted by the serve loop."""

    step: int
    begin: float
    end: float


@dataclass(frozen=True)
class BoundaryDone:
    """The boundary before `step`, which had work to do."""

    step: int
    begin: float
    end: float


@dataclass(frozen=True)
class StateChanged:
    """The engine changed its state at the boundary before `step`.

    Attributes:
        state: name of the new state in lower case.
        rebalance: number of the open rebalance; None if none is open.
    """

    step: int
    at: float
    state: str
    rebalance: int | None


@dataclass(frozen=True)
class TransferStarted:
    """All ranks agreed on a plan whose weights come from peers; its transfer starts.

    Attributes:
        step: the boundary before which that was settled.
        rebalance: number of the rebalance.
        layers: int32 (copies,), layer of each slot that gets another expert, by chunk.
        experts: int32 (copies,), the expert that it gets.
        sources: int32 (copies,), slot of the same layer that is read.
        slots: int32 (copies,), slot that is filled.
        shape: numbers of layers, experts, slots and ranks.
    """

    step: int
    rebalance: int
    layers: Ids
    experts: Ids
    sources: Ids
    slots: Ids
    shape: ExpertShape


@dataclass(frozen=True)
class RebalanceSkipped:
    """A rebalance was due after the boundary before `step`, while another was still open."""

    step: int


@dataclass(frozen=True)
class LoadReduced:
    """The load of a sub-window was summed over all ranks.

    Attributes:
        step: the boundary at which the sub-window ended.
        steps: number of steps in it.
        load: int64 (layers, experts), rows.
        layout: the layout that was installed when the sum was taken.
        shape: numbers of layers, experts, slots and ranks.
        shares: computes the shares that the router applied, for a load and a layout.
    """

    step: int
    steps: int
    load: Load
    layout: Layout
    shape: ExpertShape
    shares: Callable[[Load, Layout, ExpertShape], Shares]


@dataclass(frozen=True)
class BatchSampled:
    """The counts of one step were gathered from all ranks, once in a sub-window.

    Attributes:
        step: the step.
        counts: int32 (batches, layers, experts), rows of each rank; ranks that route the same rows
            have one batch.
        layout: the layout that the step was routed with.
        shape: numbers of layers, experts, slots and ranks.
        rank_rows: computes the rows that the router gave each rank, int64 (layers, ranks), for the
            counts, the layout, the shape and the step.
    """

    step: int
    counts: BatchCounts
    layout: Layout
    shape: ExpertShape
    rank_rows: Callable[[BatchCounts, Layout, ExpertShape, int], RankRows]


@dataclass(frozen=True, kw_only=True)
class RebalanceRecord:
    """The record of a rebalance.

    Attributes:
        number: number of the rebalance.
        opened_at: the boundary that opened it, one step after its load window was closed.
        ended_at: the boundary at which it was fully committed, or aborted.
        outcome: `committed`, `unchanged`, or the reason of the abort.
        layers: number of layers whose placement the plan changes.
        short_of_staging: number of layers whose imbalance more staging would have lowered.
        chunks: number of chunks in which the plan is committed.
        copies: committed slots whose expert the rank did not hold before, over all ranks.
        bytes_moved: size of those slots.
        bytes_received: bytes of those that this rank received.
        phase_seconds: seconds by phase; a phase is a state of the engine.
        imbalance_before: imbalance (max/mean - 1, mean over layers) of the load window with the
            placement before and its best shares; None if there is no plan.
        predicted_imbalance: imbalance of the load window with the plan; None if there is none.
        actual_imbalance: imbalance in the first whole sub-window after the rebalance, with the
            applied shares; None until it is known, or if it never is.
        stall_seconds: seconds by which its steps were longer than those outside rebalances; None if
            no `StepDone` was emitted.
    """

    number: int
    opened_at: int
    ended_at: int
    outcome: str
    layers: int
    short_of_staging: int
    chunks: int
    copies: int
    bytes_moved: int
    bytes_received: int
    phase_seconds: Mapping[str, float]
    imbalance_before: float | None
    predicted_imbalance: float | None
    actual_imbalance: float | None = None
    stall_seconds: float | None = None


@dataclass(frozen=True)
class RebalanceEnded:
    """A rebalance has ended.

    Attributes:
        record: its record; `bytes_received`, `actual_imbalance` and `stall_seconds` are not set
            yet.
        begin: time at which it was opened.
        end: time at which it ended.
        placements: placements when it was opened, and when it ended; -1 is an empty slot.
        reads: where the plan takes moved slots from; empty if from the host's memory.
        rank_in_group: position of this rank among the ranks that hold slots.
        shape: numbers of layers, experts, slots and ranks.
        slot_bytes: bytes of one slot.
    """

    record: RebalanceRecord
    begin: float
    end: float
    placements: tuple[Placement, Placement]
    reads: SlotReads
    rank_in_group: int
    shape: ExpertShape
    slot_bytes: int


@dataclass(frozen=True)
class EngineClosed:
    """The engine was closed: this is its last event."""


@dataclass(frozen=True)
class RebalanceMeasured:
    """The final record of a rebalance that ended before."""

    record: RebalanceRecord


@dataclass(frozen=True)
class BalanceMeasured:
    """The balance of the sub-window that ended at the boundary before `step`.

    Attributes:
        step: the boundary.
        at: time of the computation.
        imbalance: max/mean - 1 over ranks, mean over layers.
        balancedness: mean/max over ranks, both summed over layers first.
        mean_rows: rows per step of the mean rank, summed over layers.
        max_rows: rows per step of the fullest rank of each layer, summed over layers.
    """

    step: int
    at: float
    imbalance: float
    balancedness: float
    mean_rows: float
    max_rows: float


@dataclass(frozen=True)
class BatchBalanceMeasured:
    """The balance of one step: of its batches as they were routed, and without levelling.

    Attributes:
        step: the step.
        at: time of the computation.
        imbalance: max/mean - 1 over ranks, mean over layers.
        unlevelled_imbalance: the same if the rows of these batches are drawn by the installed
            shares; the same figure where they are drawn by them.
    """

    step: int
    at: float
    imbalance: float
    unlevelled_imbalance: float


@dataclass(frozen=True)
class StepStalled:
    """A step during a rebalance took `seconds` longer than the median step outside."""

    step: int
    seconds: float


@dataclass(frozen=True)
class EventsDropped:
    """`count` events were dropped, because the sinks did not keep up."""

    count: int


EngineEvent = (
    TraceSpan
    | StepDone
    | BoundaryDone
    | StateChanged
    | TransferStarted
    | RebalanceSkipped
    | LoadReduced
    | BatchSampled
    | RebalanceEnded
    | EngineClosed
)
"""Events that engines and serve loops emit."""
DerivedEvent = (
    RebalanceMeasured | BalanceMeasured | BatchBalanceMeasured | StepStalled | EventsDropped
)
"""Events that are derived from others."""
Event = EngineEvent | DerivedEvent


class EventSink(Protocol):
    """Receives events."""

    def emit(self, event: Event) -> None:
        """Receives an event; must return at once if an engine calls it."""
        ...

    def close(self) -> None:
        """Ends the sink; bounded."""
        ...


class NullSink:
    """Drops all events."""

    def emit(self, event: Event) -> None:
        """Drops the event."""

    def close(self) -> None:
        """Does nothing."""


NO_EVENTS = NullSink()
"""The default sink."""
