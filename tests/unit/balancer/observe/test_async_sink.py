"""Nothing that a journal does reaches the thread that notes."""

import logging
import threading

import pytest
from helpers.strategies.journal_entries import Kept, ended, entered, rows, steps, summed
from helpers.watchdog import WATCHDOG

from equipoise.balancer.experts.runtime.events import (
    BalanceMeasured,
    Event,
    EventsDropped,
    RebalanceMeasured,
    StepDone,
)
from equipoise.balancer.observe.async_sink import AsyncEventSink


class Broken(Kept):
    """Takes nothing."""

    def emit(self, entry: Event) -> None:
        raise RuntimeError("out of ink")

    def close(self) -> None:
        raise RuntimeError("out of ink again")


class Slow(Kept):
    """Takes nothing before the gate opens."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self._gate = gate

    def emit(self, entry: Event) -> None:
        assert self._gate.wait(WATCHDOG)
        super().emit(entry)


def test_courier_delivers_entries_in_order_and_closes_journals() -> None:
    kept = [Kept(), Kept()]
    courier = AsyncEventSink(kept)
    told: list[Event] = [entered("idle"), *steps(0, 1.0, 2.0)]
    for entry in told:
        courier.emit(entry)
    courier.close()
    for journal in kept:
        assert journal.entries == told
        assert journal.closed == 1


def test_courier_delivers_derived_entries_after_their_source() -> None:
    kept = Kept()
    courier = AsyncEventSink([kept])
    courier.emit(ended(ended_at=9))
    courier.emit(summed(12, rows(1, 2, 3, 4)))
    courier.close()
    assert [type(entry) for entry in kept.entries][2:] == [BalanceMeasured, RebalanceMeasured]


def test_courier_reports_failing_journal_once_and_serves_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = Kept()
    courier = AsyncEventSink([Broken(), kept])
    with caplog.at_level(logging.ERROR):
        for entry in steps(0, 1.0, 1.0, 1.0):
            courier.emit(entry)
        courier.close()
    assert len(kept.entries) == 3
    assert kept.closed == 1
    assert courier.failures == 4
    assert [record.message for record in caplog.records] == [
        "Broken failed; further failures are only counted"
    ]
    assert caplog.records[0].exc_info is not None


def test_courier_counts_undigestible_entry_and_goes_on() -> None:
    kept = Kept()
    courier = AsyncEventSink([kept])
    courier.emit(summed(8, rows(1, 2, 3)))  # an expert is missing
    courier.emit(StepDone(1, 0.0, 1.0))
    courier.close()
    assert courier.failures == 1
    assert isinstance(kept.entries[-1], StepDone)


def test_courier_drops_overflow_and_reports_it(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    slow = Slow(gate)
    courier = AsyncEventSink([slow], capacity=4)
    with caplog.at_level(logging.WARNING):
        for entry in steps(0, *[1.0] * 20):
            courier.emit(entry)
        gate.set()
        courier.close()
    lost = sum(entry.count for entry in slow.entries if isinstance(entry, EventsDropped))
    taken = [entry for entry in slow.entries if isinstance(entry, StepDone)]
    assert courier.dropped == lost
    assert len(taken) + lost == 20
    assert 4 <= len(taken) <= 5
    assert len([record for record in caplog.records if "dropped" in record.message]) == 1


def test_courier_note_does_not_block_and_close_is_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()
    courier = AsyncEventSink([Slow(gate)])
    for entry in steps(0, 1.0, 1.0):
        courier.emit(entry)
    with caplog.at_level(logging.WARNING):
        courier.close(timeout=0.01)
    assert "did not keep up" in caplog.text
    gate.set()
    courier.close()


def test_courier_counts_entries_after_close_as_lost() -> None:
    kept = Kept()
    courier = AsyncEventSink([kept])
    courier.close()
    courier.emit(StepDone(1, 0.0, 1.0))
    courier.close()
    assert courier.dropped == 1
    assert kept.entries == []


def test_courier_refuses_zero_capacity() -> None:
    with pytest.raises(ValueError, match="capacity"):
        AsyncEventSink([], capacity=0)
