import logging
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.harnesses.rebalancing_model import (
    SHAPE,
    STEPS,
    Break,
    Pace,
    Story,
    rebalance,
    violations,
)
from helpers.mutants.balancer_breakages import (
    BlindOnce,
    BrokenUntilBuilt,
    DropsOneCopy,
    FalseLoads,
    FlippedByte,
    MuteOnce,
    NoExchange,
    NoStore,
    SerialGroup,
    SlowExchange,
    SlowToDecide,
    both,
    fabric,
    mirrored,
    negative,
    slightly_off,
    store,
)
from helpers.watchdog import WATCHDOG

from equipoise.balancer.experts.agreement import ballot as vote_module
from equipoise.balancer.experts.agreement.ballot import (
    Abort,
    Ballot,
    ChunkChecksum,
    Commit,
    Verdict,
    tally,
)
from equipoise.balancer.experts.config import BalancerConfig, RoutingRule, ShareMode
from equipoise.balancer.experts.engine import engine, staged_path
from equipoise.balancer.experts.engine.staged_path import StagedPath
from equipoise.balancer.experts.engine.states import Failed, InTransfer, Staged, TransferProgress
from equipoise.balancer.experts.planning import rebalance_plan
from equipoise.balancer.experts.runtime.events import COMPLETED
from equipoise.hal.errors import ConfigError, VoteOutcomeUnknown
from equipoise.hal.shares import SHARE_ONE

START = ((0, 1, 2, 2, 3, 0),) * SHAPE.layers


def final_placements(rank_records: list[Story]) -> set[tuple[tuple[int, ...], ...]]:
    return {rank_record.observations[-1].placement for rank_record in rank_records}


@pytest.mark.parametrize("shares", [ShareMode.STATIC, ShareMode.LAGGED])
def test_engine_commits_same_layout_before_same_step_on_all_ranks(shares: ShareMode) -> None:
    rank_records = rebalance(shares=shares)
    assert violations(rank_records) == []
    assert rank_records[0].commits == rank_records[1].commits
    assert len(rank_records[0].commits) >= 2
    assert final_placements(rank_records) != {START}
    assert sum(report.copies for report in rank_records[0].reports) > 0


@pytest.mark.parametrize("rule", [RoutingRule.VLLM_ROW_HASH, RoutingRule.TRTLLM_ROUND_ROBIN])
def test_engine_moves_experts_under_vllm_and_tensorrt_rules(rule: RoutingRule) -> None:
    rank_records = rebalance(routing_rule=rule)
    assert violations(rank_records) == []
    assert final_placements(rank_records) != {START}


def test_engine_config_refuses_shares_with_a_rule_that_ignores_them() -> None:
    with pytest.raises(ConfigError, match="reads no shares"):
        BalancerConfig(
            name="x",
            shares=ShareMode.LAGGED,
            routing_rule=RoutingRule.VLLM_ROW_HASH,
            window_size=2,
            step_interval=2,
            sub_window=2,
        )


def test_rebalance_report_counts_bytes_of_travelled_slots() -> None:
    (report, *_) = rebalance()[0].reports
    assert report.copies > 0
    assert report.bytes_moved == report.copies * 5 * 4


@pytest.mark.parametrize("shares", [ShareMode.STATIC, ShareMode.LAGGED, ShareMode.EXACT])
def test_engine_rebalances_with_one_slot_of_staging(shares: ShareMode) -> None:
    rank_records = rebalance(shares=shares, staging=1)
    assert violations(rank_records) == []
    assert rank_records[0].commits == rank_records[1].commits != []
    assert final_placements(rank_records) != {START}


def test_engine_rebalances_with_one_slot_of_staging_on_dependent_groups() -> None:
    issuers: set[str] = set()
    serial = [fabric(".moves", lambda inner: SerialGroup(inner, issuers), rank) for rank in (0, 1)]
    rank_records = rebalance(both(*serial), staging=1)
    assert violations(rank_records) == []
    assert final_placements(rank_records) != {START}


def test_rebalance_that_moves_nothing_is_reported_as_unchanged() -> None:
    rank_records = rebalance()
    for rank_record in rank_records:
        moving_outcomes = {report.outcome for report in rank_record.reports if report.copies}
        assert moving_outcomes == {"committed"}
        unmoved = [report for report in rank_record.reports if not report.copies]
        # The load stays the same, so that once all is even there is nothing left to move.
        assert unmoved
        assert {report.outcome for report in unmoved} == {"unchanged"}
        assert rank_record.aborts == {}


@pytest.mark.parametrize("short", [(), (0, 1)])
def test_engine_warns_once_on_one_rank_that_staging_is_short(
    short: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rebalance_plan, "_short_of_staging", lambda *_: short)
    with caplog.at_level(logging.WARNING, engine.LOG.name):
        rank_records = rebalance(staging=1)
    assert len(rank_records[0].reports) > 1
    lines = [record.message for record in caplog.records if "staging" in record.message]
    assert len(lines) == bool(short)
    assert all("each rank has 1 staging buffers; with more, layers 0..1" in line for line in lines)


@pytest.mark.parametrize(
    ("placement", "predicted", "target", "left"),
    [
        ([[0, 1, 2, 3]], 0.5, 0.02, 0.5),
        ([[0, 1, 2, 3]], 0.05, 0.02, None),  # little is left
        ([[0, 1, 2, 3]], 0.5, 0.6, None),
        ([[0, 1, 2, 2]], 0.5, 0.02, None),
    ],
)
def test_imbalance_without_redundancy_is_of_plans_with_one_slot_per_expert(
    placement: list[list[int]], predicted: float, target: float, left: float | None
) -> None:
    plan = SimpleNamespace(predicted_imbalance=np.array([predicted * SHARE_ONE]))
    proposal: Any = SimpleNamespace(
        plan=plan, layout=SimpleNamespace(placement=np.array(placement, dtype=np.int32))
    )
    assert engine.imbalance_without_redundancy(proposal, target) == left


@pytest.mark.parametrize("left", [None, 0.5])
def test_engine_warns_once_on_one_rank_of_missing_redundant_slots(
    left: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "imbalance_without_redundancy", lambda *_: left)
    with caplog.at_level(logging.WARNING, engine.LOG.name):
        rank_records = rebalance()
    assert len(rank_records[0].reports) > 1
    lines = [line for line in caplog.messages if "num_redundant_experts" in line]
    assert len(lines) == (left is not None)


def test_different_plans_keep_installed_placement_on_all_ranks() -> None:
    rank_records = rebalance(fabric(".loads", lambda inner: FalseLoads(inner, mirrored)))
    assert violations(rank_records) == []
    assert final_placements(rank_records) == {START}
    for rank_record in rank_records:
        assert rank_record.commits == []
        assert set(rank_record.aborts) == {"plans differ"}
        assert rank_record.aborts["plans differ"] >= 2


def test_different_shares_abort_the_rebalance() -> None:
    rank_records = rebalance(fabric(".loads", lambda inner: FalseLoads(inner, slightly_off)))
    assert violations(rank_records) == []
    assert all("plans differ" in rank_record.aborts for rank_record in rank_records)


ABORTS: dict[str, tuple[Break, str]] = {
    "planner raises": (fabric(".loads", lambda i: FalseLoads(i, negative)), "planner failed"),
    "staged bytes differ": (fabric(".moves", FlippedByte), "staged bytes differ"),
    "transfer raises": (fabric(".moves", NoExchange), "transfer failed"),
    "ballot lost": (fabric("control", MuteOnce), "no ballot from rank(s) 1"),
}


@pytest.mark.parametrize("name", ABORTS)
def test_fault_before_decision_aborts_on_all_ranks_and_is_counted(name: str) -> None:
    breakage, reason = ABORTS[name]
    rank_records = rebalance(breakage, timeout=20.0)
    assert violations(rank_records) == []
    for rank_record in rank_records:
        assert reason in rank_record.aborts
    assert rank_records[0].commits == rank_records[1].commits
    if name == "ballot lost":  # the only one of these faults that is over after one rebalance
        assert "committed" in [report.outcome for report in rank_records[0].reports]


def test_abort_reasons_are_counted_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_ABORT_REASONS", 0)
    for rank_record in rebalance(fabric(".moves", NoExchange)):
        aborted_reports = [
            report for report in rank_record.reports if report.outcome not in COMPLETED
        ]
        assert rank_record.aborts == {engine.OTHER_REASON: len(aborted_reports)}


def test_slow_rank_commits_together_with_its_peer() -> None:
    gate = threading.Event()
    pace = Pace(patience=0.02, hook=lambda step: gate.set() if step == 14 else None)
    rank_records = rebalance(fabric(".moves", lambda inner: SlowExchange(inner, gate)), pace=pace)
    assert violations(rank_records) == []
    assert rank_records[0].commits == rank_records[1].commits
    assert rank_records[0].commits[0] > 14


@pytest.mark.parametrize("shares", [ShareMode.STATIC, ShareMode.LAGGED])
def test_dependent_groups_issue_all_operations_from_one_thread(shares: ShareMode) -> None:
    """An exchange issued by a worker would come anywhere between the steps' own operations (P4)."""
    issuers: set[str] = set()
    serial = [fabric(".moves", lambda inner: SerialGroup(inner, issuers), rank) for rank in (0, 1)]
    rank_records = rebalance(both(*serial), shares=shares)
    assert violations(rank_records) == []
    assert rank_records[0].commits == rank_records[1].commits
    assert len(rank_records[0].commits) >= 2
    assert not [name for name in issuers if name.startswith("equipoise.")]
    assert issuers


def test_exchange_that_cannot_start_aborts_rebalance_but_not_step() -> None:
    serial_peer = fabric(".moves", lambda inner: SerialGroup(inner, set()), rank=0)
    refusing_exchange = fabric(".moves", lambda inner: NoExchange(SerialGroup(inner, set())))
    rank_records = rebalance(both(serial_peer, refusing_exchange))
    assert violations(rank_records) == []
    assert all("transfer failed" in rank_record.aborts for rank_record in rank_records)


@pytest.mark.slow
def test_communicator_is_rebuilt_after_failed_move() -> None:
    # The peer's exchange stays unmatched until `timeout` and fails its communicator: both build.
    # The victim waits meanwhile for its peer's step, which has a longer deadline.
    rank_records = rebalance(fabric(".moves", BrokenUntilBuilt), timeout=20.0)
    assert violations(rank_records) == []
    for rank_record in rank_records:
        assert rank_record.aborts["transfer failed"] == 1
        assert "committed" in [report.outcome for report in rank_record.reports]
    assert rank_records[0].commits == rank_records[1].commits
    assert rank_records[0].commits


def test_rebalance_aborts_everywhere_when_patience_runs_out() -> None:
    gate = threading.Event()
    pace = Pace(patience=0.02, hook=lambda step: gate.set() if step == STEPS - 1 else None)
    slow_exchange = fabric(".moves", lambda inner: SlowExchange(inner, gate))
    rank_records = rebalance(slow_exchange, pace=pace, max_stalled_steps=3)
    assert violations(rank_records) == []
    assert final_placements(rank_records) == {START}
    assert all("no progress in time" in rank_record.aborts for rank_record in rank_records)
    assert all(
        "a rank still drains an aborted rebalance" in rank_record.aborts
        for rank_record in rank_records
    )


def test_late_plan_is_used_and_rebalances_due_meanwhile_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()

    def plan_late(*args: Any) -> Any:
        gate.wait(WATCHDOG)
        return rebalance_plan.plan_rebalance(*args)

    class UntilPlanned:
        """Steps wait for background work, but not for the plan that is held back."""

        @property
        def patience(self) -> float:
            return Pace.patience if gate.is_set() else 0.02

        def hook(self, step: int) -> None:
            if step == 14:
                gate.set()

    pace: Any = UntilPlanned()
    monkeypatch.setattr(staged_path, "plan_rebalance", plan_late)
    rank_records = rebalance(pace=pace, max_stalled_steps=3)
    assert violations(rank_records) == []
    assert final_placements(rank_records) != {START}
    for rank_record in rank_records:
        assert rank_record.aborts == {}
        first, second = rank_record.reports[:2]
        assert first.outcome == "committed"
        assert first.step > 14
        assert second.number > first.number + 1


@pytest.mark.parametrize("ballot_field", ['"status": "proposed"', '"tables": '])
def test_rank_without_ballots_follows_decision_of_its_peer(ballot_field: str) -> None:
    rank_records = rebalance(
        fabric("control", lambda inner: BlindOnce(inner, ballot_field, delay=0.5))
    )
    assert violations(rank_records) == []
    assert rank_records[0].commits == rank_records[1].commits
    assert rank_records[1].commits
    assert all(rank_record.aborts == {} for rank_record in rank_records)


@pytest.mark.parametrize("ballot_field", ['"status": "proposed"', '"tables": '])
@pytest.mark.slow
def test_rank_with_all_ballots_aborts_when_peer_decided_abort(ballot_field: str) -> None:
    blind_control = fabric("control", lambda inner: BlindOnce(inner, ballot_field, delay=0.0))
    rank_records = rebalance(both(blind_control, fabric("control", SlowToDecide, rank=0)))
    assert violations(rank_records) == []
    assert all(
        rank_record.aborts == {"no ballot from rank(s) 0": 1} for rank_record in rank_records
    )
    assert rank_records[0].commits == rank_records[1].commits
    assert rank_records[0].commits, "the rebalances behind it go on: no exchange was left unmatched"


def test_rank_stops_when_outcome_is_unknown() -> None:
    with pytest.raises(VoteOutcomeUnknown, match="connection lost"):
        rebalance(both(fabric("control", NoStore), fabric("control", NoStore, rank=0)))


class CommitsEarly(StagedPath):
    """Mutant: the victim commits as soon as its own staging is filled, without a vote."""

    def poll(self, progress: TransferProgress) -> InTransfer | Failed:
        after = super().poll(progress)
        if isinstance(after, Staged) and self._rank == 1:
            self.commit(after, len(after.ready_chunks), step=0)
        return after


def trusts_bytes(ballots: list[Ballot]) -> Verdict:
    """Mutant: nobody compares checksums."""
    verdict = tally(ballots)
    chunk_count = min(len(ballot.staged) for ballot in ballots)
    return Commit(chunk_count) if verdict == Abort("staged bytes differ") else verdict


def without_tables(mark: ChunkChecksum) -> ChunkChecksum:
    return replace(mark, tables="")


def trusts_plans(ballots: list[Ballot]) -> Verdict:
    """Mutant: nobody compares digests."""
    ballots_without_digest = [
        replace(b, digest="", staged=tuple(map(without_tables, b.staged))) for b in ballots
    ]
    return tally(ballots_without_digest)


def test_oracle_detects_missing_copy() -> None:
    assert any("holds" in line for line in violations(rebalance(store(DropsOneCopy))))


def test_oracle_detects_commit_without_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.balancer.experts.balancer.StagedPath", CommitsEarly)
    assert any("differ" in line for line in violations(rebalance()))


def test_oracle_detects_unverified_staged_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vote_module, "tally", trusts_bytes)
    assert violations(rebalance(fabric(".moves", FlippedByte))) != []


def test_oracle_detects_uncompared_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vote_module, "tally", trusts_plans)
    false_loads = fabric(".loads", lambda inner: FalseLoads(inner, slightly_off))
    assert any("layouts differ" in line for line in violations(rebalance(false_loads)))


@pytest.mark.parametrize(
    ("bad_options", "message"),
    [
        ({"window_size": 0}, "at least one"),
        ({"sub_window": -1}, "sub_window -1 at least 0"),
        ({"window_size": 3}, "multiples"),
        ({"step_interval": 2}, "shorter"),
    ],
)
def test_engine_config_refuses_inconsistent_cadence(
    bad_options: dict[str, int], message: str
) -> None:
    cadence: dict[str, Any] = {"window_size": 4, "step_interval": 8, "sub_window": 2, **bad_options}
    with pytest.raises(ConfigError, match=message):
        BalancerConfig(name="x", shares=ShareMode.STATIC, **cadence)
