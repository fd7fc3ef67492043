"""Emits events for what happens at an engine's boundaries: states, phases, rebalances, load sums.

It is called only at boundaries that have work. It reads clocks and passes references; the event
sink computes figures from them, on another thread.
"""

from dataclasses import dataclass

from equipoise.balancer.experts.batch_sampler import BatchSample
from equipoise.balancer.experts.engine.states import (
    Draining,
    Failed,
    Idle,
    Proposed,
    RebalanceReport,
    Staged,
    State,
    TransferProgress,
    Transferring,
    Updating,
    transfer_of,
)
from equipoise.balancer.experts.placement import (
    SHARE_ONE,
    ExpertShape,
    Layout,
    Load,
    Placement,
)
from equipoise.balancer.experts.planning.proposal import Proposal, StagedProposal
from equipoise.balancer.experts.routing.routers import Router
from equipoise.balancer.experts.runtime.events import (
    COMPLETED,
    NO_READS,
    BatchSampled,
    BoundaryDone,
    EngineClosed,
    EventSink,
    LoadReduced,
    RebalanceEnded,
    RebalanceRecord,
    RebalanceSkipped,
    SlotReads,
    StateChanged,
    TraceSpan,
    Track,
    TransferStarted,
    now,
)


@dataclass
class _OpenRebalance:
    """The open rebalance: when it was opened, the placement then, and its seconds by phase."""

    number: int
    opened_at: float
    placement: Placement
    seconds: dict[str, float]


class EventRecorder:
    """Emits the events of one engine to a sink.

    A state lasts from its entry, at the end of a boundary or of `after_launch`, to the entry of the
    next state. So the seconds of the phases add up to the whole rebalance.

    Args:
        sink: receives the events.
        shape: numbers of layers, experts, slots and ranks.
        rank_in_group: position of this rank among the ranks that hold slots.
        slot_bytes: bytes of one slot.
        sub_window: steps per sub-window.
        router: computes the shares that it applies, and the rows that it gives each rank.
    """

    def __init__(
        self,
        sink: EventSink,
        shape: ExpertShape,
        rank_in_group: int,
        slot_bytes: int,
        sub_window: int,
        router: Router,
    ) -> None:
        self._sink = sink
        self._shape = shape
        self._rank_in_group = rank_in_group
        self._slot_bytes = slot_bytes
        self._sub_window = sub_window
        self._router = router
        self._step = 0
        self._boundary_began = now()
        self._state: State = Idle()
        self._since = self._boundary_began
        self._open: _OpenRebalance | None = None
        self._end: tuple[State, RebalanceReport] | None = None

    def begin_boundary(self, step: int) -> None:
        """Notes the start of the boundary before `step`."""
        self._step, self._boundary_began = step, now()

    def load_reduced(self, step: int, load: Load, layout: Layout) -> None:
        """Emits the load of the sub-window that ended at boundary `step`."""
        self._sink.emit(
            LoadReduced(step, self._sub_window, load, layout, self._shape, self._router.shares)
        )

    def batch_sampled(self, sample: BatchSample) -> None:
        """Emits the batches of a step that was sampled."""
        self._sink.emit(
            BatchSampled(
                sample.step, sample.counts, sample.layout, self._shape, self._router.rank_rows
            )
        )

    def rebalance_ended(self, state: State, report: RebalanceReport) -> None:
        """Notes that a rebalance ends at this boundary, in `state`."""
        self._end = state, report

    def rebalance_skipped(self, step: int) -> None:
        """Emits that a rebalance was due after `step`, while another was still open."""
        self._sink.emit(RebalanceSkipped(step))

    def end_boundary(self, state: State, layout: Layout) -> None:
        """Notes the end of the boundary, with the engine in `state` and `layout` installed."""
        at = now()
        self._sink.emit(BoundaryDone(self._step, self._boundary_began, at))
        self._update_state(state, layout, at)

    def after_launch(self, state: State, layout: Layout) -> None:
        """Notes the end of `after_launch`, with the engine in `state`."""
        self._update_state(state, layout, now())

    def close(self) -> None:
        """Emits that the engine is closed."""
        self._sink.emit(EngineClosed())

    def _update_state(self, state: State, layout: Layout, at: float) -> None:
        if state_name(state) != state_name(self._state) or self._end is not None:
            self._leave_state(at)
            self._enter_state(state, layout, at)

    def _leave_state(self, at: float) -> None:
        """Emits the span of the state that ends; within a rebalance it is a phase."""
        name, number = state_name(self._state), rebalance_number(self._state)
        details = {} if number is None else {"rebalance": number}
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
        starts = isinstance(self._state, Proposed)
        self._state, self._since = state, at
        self._sink.emit(StateChanged(self._step, at, state_name(state), number))
        if starts and isinstance(state, Transferring | Staged):
            self._emit_transfer(state.progress)

    def _emit_transfer(self, progress: TransferProgress) -> None:
        """Emits what the migration plan copies."""
        moves, number = progress.proposal.migration.moves, progress.rebalance.number
        copies = moves.layer, moves.expert, moves.source, moves.slot
        self._sink.emit(TransferStarted(self._step, number, *copies, self._shape))

    def _emit_ended(
        self,
        state: State,
        report: RebalanceReport,
        opened: _OpenRebalance,
        placement: Placement,
        at: float,
    ) -> None:
        self._open = None
        record = _rebalance_record(state, report, opened.seconds)
        details = {"rebalance": record.number, "outcome": record.outcome, "copies": record.copies}
        self._sink.emit(
            TraceSpan(_span_name(record), Track.REBALANCE, opened.opened_at, at, details)
        )
        placements = opened.placement, placement
        context = self._rank_in_group, self._shape, self._slot_bytes
        reads = _reads(state)
        self._sink.emit(RebalanceEnded(record, opened.opened_at, at, placements, reads, *context))


def state_name(state: State) -> str:
    """Returns the name of the state's type, in lower case."""
    return type(state).__name__.lower()


def rebalance_number(state: State) -> int | None:
    """Returns the number of the open rebalance; None if none is open."""
    return None if isinstance(state, Idle | Draining) else state.rebalance.number


def proposal_of(state: State) -> Proposal | None:
    """Returns the proposal of the state's rebalance, once there is one."""
    match state:
        case Proposed(_, proposal) | Updating(_, _, proposal):
            return proposal
        case Idle() | Draining() | Failed(_, _, Draining()):
            return None
    progress = transfer_of(state)
    return None if progress is None else progress.proposal


def _rebalance_record(
    state: State, report: RebalanceReport, seconds: dict[str, float]
) -> RebalanceRecord:
    proposal = proposal_of(state)
    plan = None if proposal is None else proposal.plan
    return RebalanceRecord(
        number=report.number,
        opened_at=report.opened_at,
        ended_at=report.step,
        outcome=report.outcome,
        layers=len(plan.changed_layers) if plan else 0,
        short_of_staging=len(plan.short_of_staging) if plan else 0,
        chunks=len(proposal.layer_updates) if proposal else 0,
        copies=report.copies,
        bytes_moved=report.bytes_moved,
        bytes_received=0,
        phase_seconds=seconds,
        imbalance_before=float(plan.imbalance_before.mean()) / SHARE_ONE if plan else None,
        predicted_imbalance=float(plan.predicted_imbalance.mean()) / SHARE_ONE if plan else None,
    )


def _reads(state: State) -> SlotReads:
    """Returns layer, slot and source slot of all moves, as the migration plan has them."""
    proposal = proposal_of(state)
    if not isinstance(proposal, StagedProposal):
        return NO_READS
    moves = proposal.migration.moves
    return moves.layer, moves.slot, moves.source


def _span_name(record: RebalanceRecord) -> str:
    outcome = record.outcome if record.outcome in COMPLETED else "aborted"
    return f"rebalance {record.number}: {outcome}"
