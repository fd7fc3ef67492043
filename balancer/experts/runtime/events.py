"""Events of an engine, and the sink that takes them.

An event is a small frozen record of what happened, with times. A sink must not keep the step
waiting, so what is behind it works on a thread of its own (`balancer/observe/async_sink.py`); the
default sink drops everything.

All times are seconds of one clock, `now()`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter
from typing import Protocol

from equipoise.balancer.experts.placement import ExpertShape, Layout, Load, Placement, Shares

COMMITTED = "committed"
"""Outcome of an epoch that changed what slots hold."""
UNCHANGED = "unchanged"
"""Outcome of an epoch whose plan left every slot as it was; not counted as committed."""
COMPLETED = COMMITTED, UNCHANGED
"""Outcomes of epochs that were not aborted."""


def now() -> float:
    """Seconds of a clock that never goes back; all processes of one machine read the same."""
    return perf_counter()


class Track(StrEnum):
    """Who did something: a thread or a stream, as the host sees it."""

    COMPUTE = "compute stream"
    COPY = "copy stream"
    BOUNDARY = "boundary"
    REBALANCE = "epoch"
    PLANNER = "planner"
    TRANSFER = "transfer"
    VOTE = "vote"
    SHARES = "shares"
    LOAD = "load"


@dataclass(frozen=True)
class TraceSpan:
    """Something that lasted from `begin` to `end`.

    Attributes:
        details: numbers and words to go with it.
    """

    name: str
    track: Track
    begin: float
    end: float
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class StepDone:
    """A step of the model, its boundary included; told by whoever drives the steps."""

    step: int
    begin: float
    end: float


@dataclass(frozen=True)
class BoundaryDone:
    """The boundary before `step`, which had something to do."""

    step: int
    begin: float
    end: float


@dataclass(frozen=True)
class StateChanged:
    """The engine came into another state at the boundary before `step`.

    Attributes:
        state: its name in lower case.
        rebalance: number of the epoch that the state is of; None outside.
    """

    step: int
    at: float
    state: str
    rebalance: int | None


@dataclass(frozen=True)
class RebalanceSkipped:
    """An epoch was due behind the boundary before `step`; the one before was still open here."""

    step: int


@dataclass(frozen=True)
class LoadReduced:
    """The load of a sub-window, over all ranks, is known.

    Attributes:
        step: the boundary at which the sub-window ended.
        steps: in it.
        load: (layers, experts) rows.
        layout: installed when the sum was taken.
        shape: how many of everything.
        shares: those that the router applied, for a load and a layout.
    """

    step: int
    steps: int
    load: Load
    layout: Layout
    shape: ExpertShape
    shares: Callable[[Load, Layout, ExpertShape], Shares]


@dataclass(frozen=True, kw_only=True)
class RebalanceRecord:
    """How an epoch went.

    Attributes:
        number: of the epoch.
        opened_at: the boundary at which its load window was closed.
        ended_at: the boundary at which it was committed whole, or left.
        outcome: `committed`, `unchanged`, or the reason of the abort.
        layers: whose placement the plan changes.
        short_of_staging: layers that more staging buffers would bring lower in this epoch.
        chunks: parts in which the plan is installed.
        copies: that receiving ranks did not hold, over all ranks, of what was committed.
        bytes: their size.
        bytes_received: bytes of those that came to this rank.
        phase_seconds: by phase; a phase is a state of the engine.
        imbalance_before: imbalance (max/mean - 1, mean over layers) of the placement that was installed, for
            the load planned on and with its best shares; None where no plan was made.
        imbalance_predicted: the same of the plan.
        imbalance_actual: imbalance in the first whole sub-window behind the epoch, with the shares applied;
            None until it is known, and where it never was.
        stall_seconds: seconds by which its steps were longer than those outside epochs; None where no
            step was told.
    """

    number: int
    opened_at: int
    ended_at: int
    outcome: str
    layers: int
    short_of_staging: int
    chunks: int
    copies: int
    bytes: int
    bytes_received: int
    phase_seconds: Mapping[str, float]
    imbalance_before: float | None
    imbalance_predicted: float | None
    imbalance_actual: float | None = None
    stall_seconds: float | None = None


@dataclass(frozen=True)
class RebalanceEnded:
    """An epoch has just ended.

    Attributes:
        record: of it; `here`, `actual` and `stall` are not known yet.
        begin: when it was opened.
        end: when it ended.
        placements: what slots held when it was opened, and when it ended; -1 is nothing.
        rank_in_group: of this rank among those that the slots are divided among.
        shape: how many of everything.
        slot_bytes: of one slot.
    """

    record: RebalanceRecord
    begin: float
    end: float
    placements: tuple[Placement, Placement]
    rank_in_group: int
    shape: ExpertShape
    slot_bytes: int


@dataclass(frozen=True)
class EngineClosed:
    """The engine was closed: nothing more comes from it."""


@dataclass(frozen=True)
class RebalanceMeasured:
    """All is known of an epoch that ended before."""

    record: RebalanceRecord


@dataclass(frozen=True)
class BalanceMeasured:
    """How even the sub-window was that was closed at the boundary before `step`.

    Attributes:
        step: the boundary.
        at: when it was worked out.
        imbalance: max/mean - 1 over ranks, mean over layers.
        balancedness: mean/max over ranks, both summed over layers first.
        mean_rows: rows of a rank, summed over layers, a step.
        max_rows: rows of the fullest rank of each layer, summed over layers, a step.
    """

    step: int
    at: float
    imbalance: float
    balancedness: float
    mean_rows: float
    max_rows: float


@dataclass(frozen=True)
class StepStalled:
    """A step within an epoch took `seconds` longer than steps outside usually do."""

    step: int
    seconds: float


@dataclass(frozen=True)
class EventsDropped:
    """So many entries were dropped, because journals did not keep up."""

    count: int


EngineEvent = (
    TraceSpan
    | StepDone
    | BoundaryDone
    | StateChanged
    | RebalanceSkipped
    | LoadReduced
    | RebalanceEnded
    | EngineClosed
)
"""What happens."""
DerivedEvent = RebalanceMeasured | BalanceMeasured | StepStalled | EventsDropped
"""What it comes to."""
Event = EngineEvent | DerivedEvent


class EventSink(Protocol):
    """Takes entries."""

    def emit(self, entry: Event) -> None:
        """Take one; returns at once where an engine calls."""
        ...

    def close(self) -> None:
        """Nothing more comes; bounded."""
        ...


class NullSink:
    """Forgets everything."""

    def emit(self, entry: Event) -> None:
        """Forget it."""

    def close(self) -> None:
        """Nothing to do."""


NO_EVENTS = NullSink()
"""The journal of whoever asks for none."""
