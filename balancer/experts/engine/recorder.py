"""Turns what happens at an engine's boundaries into events: states, phases, rebalances, sums.

Called only at boundaries that have something to do. It reads clocks and passes references on;
whatever has to be computed is computed by the event sink, on another thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from equipoise.balancer.experts.engine.states import (
    Draining,
    Failed,
    Idle,
    Proposed,
    State,
    Updating,
    transfer_of,
)
from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    ExpertShape,
    Layout,
    Load,
    Placement,
    Shares,
)
from equipoise.balancer.experts.planning.proposal import Proposal
from equipoise.balancer.experts.runtime.events import (
    COMPLETED,
    BoundaryDone,
    EngineClosed,
    EventSink,
    LoadReduced,
    RebalanceEnded,
    RebalanceRecord,
    RebalanceSkipped,
    StateChanged,
    TraceSpan,
    Track,
    now,
)


class Report(Protocol):
    """What is known of an epoch when it ends; `RebalanceReport` is one."""

    @property
    def number(self) -> int:
        """Of the epoch."""
        ...

    @property
    def opened(self) -> int:
        """The boundary at which it was opened."""
        ...

    @property
    def step(self) -> int:
        """The boundary at which it ended."""
        ...

    @property
    def outcome(self) -> str:
        """`committed`, `unchanged`, or the reason of the abort."""
        ...

    @property
    def slots(self) -> int:
        """Copies that were committed, over all ranks."""
        ...

    @property
    def bytes(self) -> int:
        """Their size."""
        ...


class Recorder(Protocol):
    """Told by an engine at each boundary that has something to do."""

    def begin(self, step: int) -> None:
        """The boundary before `step` begins."""
        ...

    def summed(self, closed: int, load: Load, layout: Layout) -> None:
        """The sum of the sub-window that ended at boundary `closed` was taken."""
        ...

    def ended(self, state: State, report: Report) -> None:
        """An epoch ends at this boundary, out of `state`."""
        ...

    def skipped(self, step: int) -> None:
        """An epoch was due behind the boundary before `step`, and another was still open here."""
        ...

    def end(self, state: State, layout: Layout) -> None:
        """The boundary is over, and leaves the engine in `state` with `layout` installed."""
        ...

    def prepared(self, state: State, layout: Layout) -> None:
        """What could wait for the forward's launch is done, and leaves the engine in `state`."""
        ...

    def close(self) -> None:
        """The engine is closed."""
        ...


class NoRecorder:
    """Of an engine without a journal."""

    def begin(self, step: int) -> None:
        """Nothing to do."""

    def summed(self, closed: int, load: Load, layout: Layout) -> None:
        """Nothing to do."""

    def ended(self, state: State, report: Report) -> None:
        """Nothing to do."""

    def skipped(self, step: int) -> None:
        """Nothing to do."""

    def end(self, state: State, layout: Layout) -> None:
        """Nothing to do."""

    def prepared(self, state: State, layout: Layout) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


NO_RECORDER = NoRecorder()


@dataclass(frozen=True)
class RecorderContext:
    """Whose chronicle it is.

    Attributes:
        shape: how many of everything.
        place: of this rank among those that the slots are divided among.
        slot_bytes: of one slot.
        sub_window: steps summed at a time.
        shares: those that the router applies, for a load and a layout.
    """

    shape: ExpertShape
    place: int
    slot_bytes: int
    sub_window: int
    shares: Callable[[Load, Layout, ExpertShape], Shares]


@dataclass
class _Open:
    """The epoch that is open: since when, over what, and its seconds by phase."""

    number: int
    since: float
    held: Placement
    seconds: dict[str, float]


class EventRecorder:
    """Of an engine with a journal.

    A state lasts from when it was entered, at the end of a boundary or of what is done behind the
    launch, to when the next one was. So the seconds by phase of an epoch add up to the epoch.
    """

    def __init__(self, journal: EventSink, subject: RecorderContext) -> None:
        self._journal = journal
        self._subject = subject
        self._step = 0
        self._began = now()
        self._state: State = Idle()
        self._since = self._began
        self._open: _Open | None = None
        self._end: tuple[State, Report] | None = None

    def begin(self, step: int) -> None:
        """See `Chronicle`."""
        self._step, self._began = step, now()

    def summed(self, closed: int, load: Load, layout: Layout) -> None:
        """See `Chronicle`."""
        of = self._subject
        self._journal.emit(LoadReduced(closed, of.sub_window, load, layout, of.shape, of.shares))

    def ended(self, state: State, report: Report) -> None:
        """See `Chronicle`."""
        self._end = state, report

    def skipped(self, step: int) -> None:
        """See `Chronicle`."""
        self._journal.emit(RebalanceSkipped(step))

    def end(self, state: State, layout: Layout) -> None:
        """See `Chronicle`."""
        at = now()
        self._journal.emit(BoundaryDone(self._step, self._began, at))
        self._turn(state, layout, at)

    def prepared(self, state: State, layout: Layout) -> None:
        """See `Chronicle`."""
        self._turn(state, layout, now())

    def close(self) -> None:
        """See `Chronicle`."""
        self._journal.emit(EngineClosed())

    def _turn(self, state: State, layout: Layout, at: float) -> None:
        if name_of(state) != name_of(self._state) or self._end is not None:
            self._leave(at)
            self._enter(state, layout, at)

    def _leave(self, at: float) -> None:
        """Close the state that was left; inside an epoch it is a phase."""
        name, number = name_of(self._state), epoch_of(self._state)
        details = {} if number is None else {"epoch": number}
        if number is not None or isinstance(self._state, Draining):
            self._journal.emit(TraceSpan(name, Track.REBALANCE, self._since, at, details))
        if self._open is not None:
            phases = self._open.seconds
            phases[name] = phases.get(name, 0.0) + at - self._since

    def _enter(self, state: State, layout: Layout, at: float) -> None:
        if self._end is not None and self._open is not None:
            self._tell_end(*self._end, self._open, layout.placement, at)
        self._end = None
        number = epoch_of(state)
        if number is not None and self._open is None:
            self._open = _Open(number, at, layout.placement, {})
        self._state, self._since = state, at
        self._journal.emit(StateChanged(self._step, at, name_of(state), number))

    def _tell_end(
        self, state: State, report: Report, opened: _Open, held: Placement, at: float
    ) -> None:
        self._open = None
        record = _record(state, report, opened.seconds)
        of = self._subject
        details = {"epoch": record.number, "outcome": record.outcome, "copies": record.copies}
        self._journal.emit(TraceSpan(_title(record), Track.REBALANCE, opened.since, at, details))
        placements = opened.held, held
        self._journal.emit(
            RebalanceEnded(record, opened.since, at, placements, of.place, of.shape, of.slot_bytes)
        )


def name_of(state: State) -> str:
    """Its type's, in lower case."""
    return type(state).__name__.lower()


def epoch_of(state: State) -> int | None:
    """Number of the epoch that the state is in; none where none is open."""
    return None if isinstance(state, Idle | Draining) else state.epoch.number


def proposal_of(state: State) -> Proposal | None:
    """What the epoch of this state would install, once that is known."""
    match state:
        case Proposed(_, proposal) | Updating(_, _, proposal):
            return proposal
        case Idle() | Draining() | Failed(_, _, Draining()):
            return None
    voyage = transfer_of(state)
    return None if voyage is None else voyage.proposal


def _record(state: State, report: Report, seconds: dict[str, float]) -> RebalanceRecord:
    proposal = proposal_of(state)
    drafted = None if proposal is None else proposal.draft
    return RebalanceRecord(
        number=report.number,
        opened=report.opened,
        ended=report.step,
        outcome=report.outcome,
        layers=len(drafted.order) if drafted else 0,
        short_of_staging=len(drafted.short_of_staging) if drafted else 0,
        lots=len(proposal.changes) if proposal else 0,
        copies=report.slots,
        bytes=report.bytes,
        here=0,
        seconds=seconds,
        before=float(drafted.before.mean()) / SHARE_ONE if drafted else None,
        predicted=float(drafted.predicted.mean()) / SHARE_ONE if drafted else None,
    )


def _title(record: RebalanceRecord) -> str:
    how = record.outcome if record.outcome in COMPLETED else "aborted"
    return f"epoch {record.number}: {how}"
