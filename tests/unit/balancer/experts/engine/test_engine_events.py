"""Events of a real engine."""

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import pytest
from helpers.harnesses.rebalancing_model import (
    SHAPE,
    STEPS,
    Pace,
    Story,
    UpdatePathFactory,
    healthy,
    in_place_from_host,
    rebalance,
    staged_from_peers,
    violations,
)
from helpers.mutants.balancer_breakages import FlippedByte, SlowExchange, fabric
from helpers.strategies.engine_events import RecordingSink

from equipoise.balancer.experts.config import ShareMode
from equipoise.balancer.experts.runtime.events import (
    BoundaryDone,
    EngineClosed,
    Event,
    LoadReduced,
    NullSink,
    RebalanceEnded,
    RebalanceMeasured,
    RebalanceSkipped,
    StateChanged,
    TraceSpan,
    Track,
    TransferStarted,
)
from equipoise.balancer.observe.aggregator import EventAggregator
from equipoise.balancer.observe.async_sink import AsyncEventSink
from equipoise.balancer.observe.trace_buffer import slot_copies
from equipoise.hal.errors import EngineError

T = TypeVar("T")
FOLLOWS = {
    "idle": {"planning"},
    "planning": {"proposed", "failed", "draining", "idle", "planning"},
    "proposed": {"transferring", "staged", "updating", "idle", "draining", "planning"},
    "transferring": {"staged", "idle", "draining", "failed", "planning"},
    "staged": {"transferring", "idle", "planning", "proposed", "draining"},
    "updating": {"idle", "planning", "proposed"},
    "failed": {"draining", "idle", "planning"},
    "draining": {"idle", "planning", "failed"},
}
"""Which state may stand behind which after one boundary, in which several changes may happen."""
UPDATE_PATHS: dict[str, UpdatePathFactory] = {
    "staged": staged_from_peers,
    "in_place": in_place_from_host,
}


def of(entries: Sequence[Event], kind: type[T]) -> list[T]:
    return [entry for entry in entries if isinstance(entry, kind)]


def observe_rebalances(
    run: Callable[..., list[Story]] = rebalance, **options: object
) -> tuple[list[Story], list[list[Event]]]:
    """The records of both ranks, and the events that their sinks received."""
    sinks = [RecordingSink() for _ in range(SHAPE.ranks)]
    rank_records = run(event_sinks=sinks.__getitem__, **options)
    assert violations(rank_records) == []
    return rank_records, [sink.events for sink in sinks]


@pytest.fixture(scope="module", params=UPDATE_PATHS)
def observations(request: pytest.FixtureRequest) -> tuple[list[Story], list[list[Event]]]:
    return observe_rebalances(update_path=UPDATE_PATHS[request.param], pace=Pace(0.02))


def test_event_sink_records_every_reported_rebalance(
    observations: tuple[list[Story], list[list[Event]]],
) -> None:
    for rank_record, entries in zip(*observations, strict=True):
        records = [entry.record for entry in of(entries, RebalanceEnded)]
        assert len(records) >= 2
        assert [
            (r.number, r.opened_at, r.ended_at, r.outcome, r.copies, r.bytes_moved) for r in records
        ] == [
            (r.number, r.opened_at, r.step, r.outcome, r.copies, r.bytes_moved)
            for r in rank_record.reports
        ]


def test_event_sink_predicts_lower_imbalance_for_plans_that_move(
    observations: tuple[list[Story], list[list[Event]]],
) -> None:
    for entries in observations[1]:
        records = [entry.record for entry in of(entries, RebalanceEnded) if entry.record.copies]
        assert records
        for record in records:
            assert record.predicted_imbalance is not None
            assert record.imbalance_before is not None
            assert record.predicted_imbalance < record.imbalance_before
            assert record.layers >= 1
            assert record.chunks >= 1


def test_event_sink_bytes_of_all_ranks_add_up_to_bytes_of_rebalance(
    observations: tuple[list[Story], list[list[Event]]],
) -> None:
    by_rank = [
        [entry.record for item in entries for entry in of(digest.process(item), RebalanceMeasured)]
        for entries, digest in ((entries, EventAggregator()) for entries in observations[1])
    ]
    assert any(record.bytes_moved for record in by_rank[0])
    for records in zip(*by_rank, strict=True):
        assert sum(record.bytes_received for record in records) == records[0].bytes_moved


def test_event_sink_transfer_leads_from_first_placement_to_last() -> None:
    _, entries = observe_rebalances()
    ended = {event.record.number: event for event in of(entries[0], RebalanceEnded)}
    transfers = of(entries[0], TransferStarted)
    moved = [number for number, event in ended.items() if event.record.copies]
    assert [event.rebalance for event in transfers] == moved
    assert moved
    for event in transfers:
        before, after = ended[event.rebalance].placements
        sources = before[event.layers, event.sources]
        assert sources.tolist() == event.experts.tolist()
        installed = before.copy()
        installed[event.layers, event.slots] = event.experts
        assert installed.tolist() == after.tolist()


def test_event_sink_actual_imbalance_matches_prediction() -> None:
    _, entries = observe_rebalances()
    digest = EventAggregator()
    records = [e.record for item in entries[0] for e in of(digest.process(item), RebalanceMeasured)]
    # The first rebalance is over, and seen to be so, before the loads change at the half.
    first = records[0]
    assert first.copies
    assert first.ended_at + 4 <= STEPS // 2 + 1
    assert first.actual_imbalance == pytest.approx(first.predicted_imbalance, abs=1e-3)


def test_event_sink_phase_seconds_add_up_to_rebalance_duration(
    observations: tuple[list[Story], list[list[Event]]],
) -> None:
    for entries in observations[1]:
        for entry in of(entries, RebalanceEnded):
            assert sum(entry.record.phase_seconds.values()) == pytest.approx(
                entry.end - entry.begin
            )
            assert min(entry.record.phase_seconds.values()) >= 0


def test_rebalance_copies_name_a_rank_that_held_the_expert(
    observations: tuple[list[Story], list[list[Event]]],
) -> None:
    ended = [entry for entries in observations[1] for entry in of(entries, RebalanceEnded)]
    assert any(entry.record.copies for entry in ended)
    for entry in ended:
        copies, size = slot_copies(entry), entry.shape.slots_per_rank
        assert len(copies) == entry.record.copies
        for copy in copies:
            before, after = (
                placement[copy.layer].reshape(-1, size) for placement in entry.placements
            )
            assert copy.expert in after[copy.to_rank]
            assert copy.expert not in before[copy.to_rank]
            # Without reads in the plan, weights come from the host's memory.
            assert (copy.from_rank is None) == (not len(entry.reads[0]))
            assert copy.from_rank is None or copy.expert in before[copy.from_rank]


def test_event_sink_state_changes_are_legal_and_rebalances_ascend(
    observations: tuple[list[Story], list[list[Event]]],
) -> None:
    for entries in observations[1]:
        states = of(entries, StateChanged)
        names = ["idle", *(entry.state for entry in states)]
        for before, after in pairwise(names):
            assert after in FOLLOWS[before], names
        numbers = [entry.rebalance for entry in states if entry.rebalance is not None]
        assert numbers == sorted(numbers)
        assert [entry.at for entry in states] == sorted(entry.at for entry in states)


def test_event_sink_spans_of_a_track_never_cross(
    observations: tuple[list[Story], list[list[Event]]],
) -> None:
    for entries in observations[1]:
        spans = of(entries, TraceSpan)
        assert {Track.PLANNER, Track.VOTE, Track.REBALANCE, Track.TRANSFER} <= {
            s.track for s in spans
        }
        for track in Track:
            assert crossing([(s.begin, s.end) for s in spans if s.track == track]) == []


def crossing(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans that begin within another and end behind it."""
    open_until: list[float] = []
    crossings = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        if open_until and end > open_until[-1]:
            crossings.append((begin, end))
        open_until.append(end)
    return crossings


def test_event_sink_spans_show_sent_and_received_slots_and_verdicts() -> None:
    _, rank_events = observe_rebalances()
    spans = [span for events in rank_events for span in of(events, TraceSpan)]
    rounds = [span.details for span in spans if span.track is Track.COPY]
    assert sum(int(str(d.get("sent", 0))) for d in rounds) == sum(
        int(str(d.get("received", 0))) for d in rounds
    )
    assert rounds
    assert {span.details.get("verdict") for span in spans if span.name == "vote"} >= {
        "StartTransfer()"
    }


def test_event_sink_spans_of_work_carry_their_rebalance(
    observations: tuple[list[Story], list[list[Event]]],
) -> None:
    for rank, entries in enumerate(observations[1]):
        started_rebalances = {
            entry.rebalance for entry in of(entries, StateChanged) if entry.rebalance is not None
        }
        # The program that drives the engine waits for its workers by jobs that say nothing.
        spans = [span for span in of(entries, TraceSpan) if span.details]
        for name in ("plan", "vote", "move"):
            rebalances = [span.details.get("rebalance") for span in spans if span.name == name]
            assert rebalances, name
            assert set(rebalances) <= started_rebalances, name
        votes = [span for span in spans if span.name == "vote"]
        # The engine may be closed while the last vote is under way, or what is behind it.
        assert all("verdict" in span.details for span in votes[:-1])
        assert len({span.details["step"] for span in votes}) == len(votes)
        moves = [span for span in spans if span.name == "move"]
        assert all(span.details["layers"] for span in moves)
        # Questions are kept by the first rank, which tidies up behind each vote.
        forgets = [span for span in spans if span.name == "forget"]
        assert forgets == [] if rank else len(forgets) in (len(votes) - 1, len(votes))


def test_event_sink_records_abort_reason() -> None:
    rank_records, entries = observe_rebalances(
        lambda event_sinks: rebalance(fabric(".moves", FlippedByte), event_sinks=event_sinks)
    )
    reasons = [entry.record.outcome for entry in of(entries[0], RebalanceEnded)]
    assert "staged bytes differ" in reasons
    assert len(reasons) == len(rank_records[0].reports)


def test_event_sink_records_skipped_rebalance() -> None:
    gate = threading.Event()
    pace = Pace(0.02, hook=lambda step: gate.set() if step == 14 else None)
    slow_exchange = fabric(".moves", lambda inner: SlowExchange(inner, gate))
    _, rank_events = observe_rebalances(
        lambda event_sinks: rebalance(
            slow_exchange, pace=pace, event_sinks=event_sinks
        )  # opens at 5
    )
    for events in rank_events:
        steps = [entry.step for entry in of(events, RebalanceSkipped)]
        assert steps[:2] == [9, 13]
        assert all(step % 4 == 1 for step in steps)
        opening_steps = {
            entry.step for entry in of(events, StateChanged) if entry.state == "planning"
        }
        assert opening_steps.isdisjoint(steps)


def test_event_sink_omits_idle_boundaries() -> None:
    _, entries = observe_rebalances(sub_window=8, window_size=8, step_interval=16)
    boundaries = [entry.step for entry in of(entries[0], BoundaryDone)]
    idle_steps = set(range(1, 8)) | set(range(10, 16))
    assert idle_steps.isdisjoint(boundaries)
    assert {8, 9, 16, 17} <= set(boundaries)
    assert len(boundaries) < STEPS


def test_event_sink_sums_carry_layout_in_force() -> None:
    _, entries = observe_rebalances(shares=ShareMode.LAGGED)
    sums = of(entries[0], LoadReduced)
    assert [entry.step for entry in sums] == list(range(2, STEPS, 2))
    assert {entry.load.sum() for entry in sums} == {SHAPE.layers * 64 * 2 * SHAPE.ranks}
    assert len({entry.layout.digest for entry in sums}) >= 2


def test_event_sink_ends_with_closed_entry() -> None:
    for entries in observe_rebalances()[1]:
        assert isinstance(entries[-1], EngineClosed)


class FailingSink(NullSink):
    """An event sink that raises on every event."""

    def emit(self, entry: Event) -> None:
        raise RuntimeError("out of ink")


def test_serving_is_unaffected_by_failing_event_sink() -> None:
    sinks = [AsyncEventSink([FailingSink()]) for _ in range(SHAPE.ranks)]
    rank_records = rebalance(healthy, event_sinks=sinks.__getitem__)
    for sink in sinks:
        sink.close()
        assert sink.failures > 10
    assert violations(rank_records) == []
    assert len(rank_records[0].commits) >= 2


def test_log_balancedness_requires_an_event_sink() -> None:
    with pytest.raises(EngineError, match="log_balancedness takes an event sink"):
        rebalance(log_balancedness=True)
