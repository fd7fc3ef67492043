"""The asynchronous event sink: no fault of a sink reaches the thread that emits."""

import logging
import threading

import pytest
from helpers.strategies.engine_events import (
    RecordingSink,
    load_reduced,
    rebalance_ended,
    rows,
    state_changed,
    steps,
)
from helpers.watchdog import WATCHDOG

from equipoise.balancer.experts.runtime.events import (
    BalanceMeasured,
    Event,
    EventsDropped,
    RebalanceMeasured,
    StepDone,
)
from equipoise.balancer.observe.async_sink import AsyncEventSink


class FailingSink(RecordingSink):
    """Raises on every call."""

    def emit(self, event: Event) -> None:
        raise RuntimeError("out of ink")

    def close(self) -> None:
        raise RuntimeError("out of ink again")


class BlockingSink(RecordingSink):
    """Blocks in `emit` until the gate opens."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self._gate = gate

    def emit(self, event: Event) -> None:
        assert self._gate.wait(WATCHDOG)
        super().emit(event)


def test_async_sink_delivers_events_in_order_and_closes_sinks() -> None:
    receivers = [RecordingSink(), RecordingSink()]
    sink = AsyncEventSink(receivers)
    sent_events: list[Event] = [state_changed("idle"), *steps(0, 1.0, 2.0)]
    for event in sent_events:
        sink.emit(event)
    sink.close()
    for receiver in receivers:
        assert receiver.events == sent_events
        assert receiver.closed == 1


def test_async_sink_delivers_derived_events_after_their_source() -> None:
    recording = RecordingSink()
    sink = AsyncEventSink([recording])
    sink.emit(rebalance_ended(ended_at=9))
    sink.emit(load_reduced(12, rows(1, 2, 3, 4)))
    sink.close()
    assert [type(event) for event in recording.events][2:] == [BalanceMeasured, RebalanceMeasured]


def test_async_sink_reports_failing_sink_once_and_serves_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recording = RecordingSink()
    sink = AsyncEventSink([FailingSink(), recording])
    with caplog.at_level(logging.ERROR):
        for event in steps(0, 1.0, 1.0, 1.0):
            sink.emit(event)
        sink.close()
    assert len(recording.events) == 3
    assert recording.closed == 1
    assert sink.failures == 4
    assert [record.message for record in caplog.records] == [
        "FailingSink failed; further failures are only counted"
    ]
    assert caplog.records[0].exc_info is not None


def test_async_sink_counts_unprocessable_entry_and_goes_on() -> None:
    recording = RecordingSink()
    sink = AsyncEventSink([recording])
    sink.emit(load_reduced(8, rows(1, 2, 3)))  # an expert is missing
    sink.emit(StepDone(1, 0.0, 1.0))
    sink.close()
    assert sink.failures == 1
    assert isinstance(recording.events[-1], StepDone)


def test_async_sink_drops_overflow_and_reports_it(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    blocking_sink = BlockingSink(gate)
    sink = AsyncEventSink([blocking_sink], capacity=4)
    with caplog.at_level(logging.WARNING):
        for event in steps(0, *[1.0] * 20):
            sink.emit(event)
        gate.set()
        sink.close()
    dropped_count = sum(
        event.count for event in blocking_sink.events if isinstance(event, EventsDropped)
    )
    delivered_events = [event for event in blocking_sink.events if isinstance(event, StepDone)]
    assert sink.dropped == dropped_count
    assert len(delivered_events) + dropped_count == 20
    assert 4 <= len(delivered_events) <= 5
    assert len([record for record in caplog.records if "dropped" in record.message]) == 1


def test_async_sink_emit_does_not_block_and_close_is_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()
    sink = AsyncEventSink([BlockingSink(gate)])
    for event in steps(0, 1.0, 1.0):
        sink.emit(event)
    with caplog.at_level(logging.WARNING):
        sink.close(timeout=0.01)
    assert "did not keep up" in caplog.text
    gate.set()
    sink.close()


def test_async_sink_counts_events_after_close_as_lost() -> None:
    recording = RecordingSink()
    sink = AsyncEventSink([recording])
    sink.close()
    sink.emit(StepDone(1, 0.0, 1.0))
    sink.close()
    assert sink.dropped == 1
    assert recording.events == []


def test_async_sink_refuses_zero_capacity() -> None:
    with pytest.raises(ValueError, match="capacity"):
        AsyncEventSink([], capacity=0)
