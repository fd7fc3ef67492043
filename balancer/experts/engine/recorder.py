"""Turns what happens at an engine's boundaries into events: states, phases, rebalances, sums.

Called only at boundaries that have something to do. It reads clocks and passes references on;
whatever has to be computed is computed by the event sink, on another thread.
"""

from collections.abc import Callable
from dataclasses import dataclass

from equipoise.balancer.experts.engine.states import (
    Draining,
    Failed,
    Idle,
    Proposed,
    RebalanceReport,
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


@dataclass
class _OpenRebalance:
    """The epoch that is open: since when, over what, and its seconds by phase."""

    number: int
    opened_at: float
    placement: Placement
    seconds: dict[str, float]


class EventRecorder:
    """Told by an engine at each boundary that has something to do; tells the event sink.

    A state lasts from when it was entered, at the end of a boundary or of what is done behind the
    launch, to when the next one was. So the seconds by phase of an epoch add up to the epoch.

    Args:
        sink: told.
        shape: how many of everything.
        place: of this rank among those that the slots are divided among.
        slot_bytes: of one slot.
        sub_window: steps summed at a time.
        shares: those that the router applies, for a load and a layout.
    """

    def __init__(
        self,
        sink: EventSink,
        shape: ExpertShape,
        place: int,
        slot_bytes: int,
        sub_window: int,
        shares: Callable[[Load, Layout, ExpertShape], Shares],
    ) -> None:
        self._sink = sink
        self._shape = shape
        self._place = place
        self._slot_bytes = slot_bytes
        self._sub_window = sub_window
        self._shares = shares
        self._step = 0
        self._boundary_began = now()
        self._state: State = Idle()
        self._since = self._boundary_began
        self._open: _OpenRebalance | None = None
        self._end: tuple[State, RebalanceReport] | None = None

    def begin_boundary(self, step: int) -> None:
        """The boundary before `step` begins."""
        self._step, self._boundary_began = step, now()

    def load_reduced(self, closed: int, load: Load, layout: Layout) -> None:
        """The sum of the sub-window that ended at boundary `closed` was taken."""
        self._sink.emit(
            LoadReduced(closed, self._sub_window, load, layout, self._shape, self._shares)
        )

    def rebalance_ended(self, state: State, report: RebalanceReport) -> None:
        """An epoch ends at this boundary, out of `state`."""
        self._end = state, report

    def rebalance_skipped(self, step: int) -> None:
        """An epoch was due behind the boundary before `step`, and another was still open here."""
        self._sink.emit(RebalanceSkipped(step))

    def end_boundary(self, state: State, layout: Layout) -> None:
        """The boundary is over, and leaves the engine in `state` with `layout` installed."""
        at = now()
        self._sink.emit(BoundaryDone(self._step, self._boundary_began, at))
        self._update_state(state, layout, at)

    def after_launch(self, state: State, layout: Layout) -> None:
        """What could wait for the forward's launch is done, and leaves the engine in `state`."""
        self._update_state(state, layout, now())

    def close(self) -> None:
        """The engine is closed."""
        self._sink.emit(EngineClosed())

    def _update_state(self, state: State, layout: Layout, at: float) -> None:
        if state_name(state) != state_name(self._state) or self._end is not None:
            self._leave_state(at)
            self._enter_state(state, layout, at)

    def _leave_state(self, at: float) -> None:
        """Close the state that was left; inside an epoch it is a phase."""
        name, number = state_name(self._state), rebalance_number(self._state)
        details = {} if number is None else {"epoch": number}
        if number is not None or isinstance(self._state, Draining):
            self._sink.emit(TraceSpan(name, Track.REBALANCE, self._since, at, details))
        if self._open is not None:
            phases = self._open.seconds
            phases[name] = phases.get(name, 0.0) + at - self._since

    def _enter_state(self, state: State, layout: Layout, at: float) -> None:
        if self._end is not None and self._open is not None:
            self._emit_ended(*self._end, self._open, layout.placement, at)
        self._end = None
        number = rebalance_number(state)
        if number is not None and self._open is None:
            self._open = _OpenRebalance(number, at, layout.placement, {})
        self._state, self._since = state, at
        self._sink.emit(StateChanged(self._step, at, state_name(state), number))

    def _emit_ended(
        self,
        state: State,
        report: RebalanceReport,
        opened: _OpenRebalance,
        held: Placement,
        at: float,
    ) -> None:
        self._open = None
        record = _rebalance_record(state, report, opened.seconds)
        details = {"epoch": record.number, "outcome": record.outcome, "copies": record.copies}
        self._sink.emit(
            TraceSpan(_span_name(record), Track.REBALANCE, opened.opened_at, at, details)
        )
        placements, whose = (opened.placement, held), (self._place, self._shape, self._slot_bytes)
        self._sink.emit(RebalanceEnded(record, opened.opened_at, at, placements, *whose))


def state_name(state: State) -> str:
    """Its type's, in lower case."""
    return type(state).__name__.lower()


def rebalance_number(state: State) -> int | None:
    """Number of the epoch that the state is in; none where none is open."""
    return None if isinstance(state, Idle | Draining) else state.rebalance.number


def proposal_of(state: State) -> Proposal | None:
    """What the epoch of this state would install, once that is known."""
    match state:
        case Proposed(_, proposal) | Updating(_, _, proposal):
            return proposal
        case Idle() | Draining() | Failed(_, _, Draining()):
            return None
    voyage = transfer_of(state)
    return None if voyage is None else voyage.proposal


def _rebalance_record(
    state: State, report: RebalanceReport, seconds: dict[str, float]
) -> RebalanceRecord:
    proposal = proposal_of(state)
    drafted = None if proposal is None else proposal.plan
    return RebalanceRecord(
        number=report.number,
        opened_at=report.opened_at,
        ended_at=report.step,
        outcome=report.outcome,
        layers=len(drafted.changed_layers) if drafted else 0,
        short_of_staging=len(drafted.short_of_staging) if drafted else 0,
        chunks=len(proposal.layer_updates) if proposal else 0,
        copies=report.copies,
        bytes=report.bytes,
        bytes_received=0,
        phase_seconds=seconds,
        imbalance_before=float(drafted.imbalance_before.mean()) / SHARE_ONE if drafted else None,
        imbalance_predicted=float(drafted.imbalance_predicted.mean()) / SHARE_ONE
        if drafted
        else None,
    )


def _span_name(record: RebalanceRecord) -> str:
    how = record.outcome if record.outcome in COMPLETED else "aborted"
    return f"epoch {record.number}: {how}"
