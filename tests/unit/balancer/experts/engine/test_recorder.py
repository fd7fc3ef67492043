"""What boundaries come to, with a clock that somebody else winds."""

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.strategies.engine_events import SHAPE, RecordingSink, placements

from equipoise.balancer.experts.engine import recorder as module
from equipoise.balancer.experts.engine.recorder import EventRecorder, proposal_of
from equipoise.balancer.experts.engine.states import (
    Draining,
    Failed,
    Idle,
    Planning,
    Proposed,
    RebalanceId,
    RebalanceReport,
    Staged,
    State,
    TransferProgress,
    Transferring,
)
from equipoise.balancer.experts.placement import Layout, even_shares
from equipoise.balancer.experts.planning.proposal import Proposal
from equipoise.balancer.experts.planning.rebalance_plan import RebalancePlan
from equipoise.balancer.experts.runtime.events import (
    BoundaryDone,
    RebalanceEnded,
    StateChanged,
    TraceSpan,
)

REBALANCE = RebalanceId(3, 5)
UNDONE: Any = None
"""A task that nobody looks at."""
UNUSED_ROUTER: Any = SimpleNamespace(shares=None, rank_rows=None)
BEFORE, AFTER = (Layout(p, even_shares(p, SHAPE.experts)) for p in placements())
PARTS = np.array([0, 1 << 16]), np.array([0, 1 << 14])
PROPOSAL = Proposal(RebalancePlan(AFTER, (1,), *PARTS), (), "digest")
PROGRESS = TransferProgress(UNDONE, REBALANCE, UNDONE, 0, 5, ())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A clock that advances by one second per reading."""
    ticks = count()
    monkeypatch.setattr(module, "now", lambda: float(next(ticks)))
    return iter(())


def record_states(sink: RecordingSink, states: list[State], report: RebalanceReport | None) -> None:
    """Records a boundary per state; the rebalance, if any, ends at the last."""
    recorder = EventRecorder(sink, SHAPE, 0, 100, 2, UNUSED_ROUTER)
    for step, state in enumerate(states):
        recorder.begin_boundary(step)
        if report is not None and step == len(states) - 1:
            recorder.rebalance_ended(states[step - 1], report)
        recorder.end_boundary(state, AFTER if state is states[-1] else BEFORE)


def test_recorder_adds_up_seconds_of_repeated_phases(clock: None) -> None:
    sink = RecordingSink()
    transferring_state, staged_state = Transferring(PROGRESS), Staged(PROGRESS, ())
    proposed_state = Proposed(REBALANCE, PROPOSAL)
    states: list[State] = [
        Planning(REBALANCE, UNDONE),
        transferring_state,
        staged_state,
        transferring_state,
        transferring_state,
        staged_state,
    ]
    record_states(
        sink, [*states, proposed_state, Idle()], RebalanceReport(3, 5, 9, "committed", 2, 200)
    )
    (rebalance_end,) = [entry for entry in sink.events if isinstance(entry, RebalanceEnded)]
    # A boundary takes two looks at the clock, so a state that is entered at one and left at the
    # next lasts two seconds.
    assert rebalance_end.record.phase_seconds == {
        "planning": 2,
        "transferring": 6,
        "staged": 4,
        "proposed": 2,
    }
    assert rebalance_end.end - rebalance_end.begin == 14
    assert (rebalance_end.record.imbalance_before, rebalance_end.record.predicted_imbalance) == (
        0.5,
        0.125,
    )
    assert rebalance_end.record.layers == 1
    assert rebalance_end.record.short_of_staging == 0
    assert [placement.tolist() for placement in rebalance_end.placements] == [
        BEFORE.placement.tolist(),
        AFTER.placement.tolist(),
    ]


def test_recorder_records_each_boundary_and_each_state_change(clock: None) -> None:
    sink = RecordingSink()
    planning_state = Planning(REBALANCE, UNDONE)
    record_states(sink, [Idle(), planning_state, planning_state, planning_state], None)
    boundaries = [entry for entry in sink.events if isinstance(entry, BoundaryDone)]
    assert [(entry.step, entry.end - entry.begin) for entry in boundaries] == [
        (i, 1) for i in range(4)
    ]
    assert [(e.step, e.state, e.rebalance) for e in sink.events if isinstance(e, StateChanged)] == [
        (1, "planning", 3)
    ]


def test_recorder_excludes_draining_from_rebalance_seconds(clock: None) -> None:
    sink = RecordingSink()
    planning_state, draining_state = Planning(REBALANCE, UNDONE), Draining(())
    record_states(
        sink, [planning_state, draining_state], RebalanceReport(3, 5, 6, "planner failed", 0, 0)
    )
    (rebalance_end,) = [entry for entry in sink.events if isinstance(entry, RebalanceEnded)]
    assert rebalance_end.record.phase_seconds == {"planning": 2}
    assert (rebalance_end.record.imbalance_before, rebalance_end.record.predicted_imbalance) == (
        None,
        None,
    )
    names = [entry.name for entry in sink.events if isinstance(entry, TraceSpan)]
    assert names == ["planning", "rebalance 3: aborted"]


def test_recorder_ignores_end_of_rebalance_it_did_not_see_open(clock: None) -> None:
    sink = RecordingSink()
    record_states(sink, [Idle(), Idle()], RebalanceReport(3, 5, 6, "committed", 0, 0))
    assert [entry for entry in sink.events if isinstance(entry, RebalanceEnded)] == []


@pytest.mark.parametrize(
    ("state", "has_proposal"),
    [
        (Idle(), False),
        (Draining(()), False),
        (Planning(REBALANCE, UNDONE), False),
        (Failed(REBALANCE, "no", Draining(())), False),
        (Failed(REBALANCE, "no", Planning(REBALANCE, UNDONE)), False),
        (Proposed(REBALANCE, PROPOSAL), True),
        (Transferring(TransferProgress(UNDONE, REBALANCE, PROPOSAL, 0, 5, ())), True),  # type: ignore[arg-type]
        (Failed(REBALANCE, "no", TransferProgress(UNDONE, REBALANCE, PROPOSAL, 0, 5, ())), True),  # type: ignore[arg-type]
    ],
)
def test_proposal_of_state_is_known_from_agreeing_on(state: State, has_proposal: bool) -> None:
    assert (proposal_of(state) is PROPOSAL) == has_proposal
