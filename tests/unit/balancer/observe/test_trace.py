"""What is kept of a rank's doings."""

import time

import pytest
from helpers.strategies.journal_entries import record

from equipoise.balancer.experts.runtime.events import (
    BalanceMeasured,
    BoundaryDone,
    RebalanceMeasured,
    TraceSpan,
    Track,
    now,
)
from equipoise.balancer.observe.trace import RecordedSpan, TraceBuffer, wall_clock_offset


def test_span_book_keeps_spans_with_rank_and_wall_clock() -> None:
    book, begin, wall = TraceBuffer(3), now(), time.time()
    book.emit(TraceSpan("vote", Track.VOTE, begin, begin + 2.0, {"verdict": "Pending()"}))
    book.emit(BoundaryDone(7, begin, begin + 1.0))
    vote, boundary = book.spans
    assert vote == RecordedSpan(3, "vote", "vote", vote.begin, vote.end, {"verdict": "Pending()"})
    assert boundary.track == "boundary"
    assert boundary.details == {"step": 7}
    assert vote.end - vote.begin == pytest.approx(2.0)
    assert vote.begin == pytest.approx(wall, abs=60.0)


def test_span_book_drops_and_counts_oldest_spans() -> None:
    book = TraceBuffer(0, most=3)
    for step in range(5):
        book.emit(BoundaryDone(step, 0.0, 1.0))
    assert [span.details["step"] for span in book.spans] == [2, 3, 4]
    assert book.spans_dropped == 2


def test_span_book_keeps_epochs_and_balance_levels() -> None:
    book = TraceBuffer(1)
    book.emit(RebalanceMeasured(record()))
    book.emit(
        BalanceMeasured(8, now(), imbalance=0.25, balancedness=0.75, mean_rows=3.0, max_rows=4.0)
    )
    book.close()
    assert [epoch.number for epoch in book.rebalances] == [3]
    (level,) = book.imbalance_samples
    assert (level.rank, level.imbalance) == (1, 0.25)


def test_wall_clock_lead_is_stable() -> None:
    """With what the clocks say before and after, however long that is."""
    wall, own = time.time(), now()
    lead = wall_clock_offset()
    later, own_later = time.time(), now()
    assert wall - own_later <= lead <= later - own
