"""The trace buffer of a rank."""

import time

import pytest
from helpers.strategies.engine_events import rebalance_ended, record

from equipoise.balancer.experts.runtime.events import (
    BalanceMeasured,
    BoundaryDone,
    RebalanceMeasured,
    TraceSpan,
    Track,
    now,
)
from equipoise.balancer.observe.trace_buffer import (
    RecordedSpan,
    SlotCopy,
    TraceBuffer,
    wall_clock_offset,
)


def test_trace_buffer_keeps_spans_with_rank_and_wall_clock() -> None:
    buffer, begin, wall = TraceBuffer(3), now(), time.time()
    buffer.emit(TraceSpan("vote", Track.VOTE, begin, begin + 2.0, {"verdict": "Pending()"}))
    buffer.emit(BoundaryDone(7, begin, begin + 1.0))
    vote, boundary = buffer.spans
    assert vote == RecordedSpan(3, "vote", "vote", vote.begin, vote.end, {"verdict": "Pending()"})
    assert boundary.track == "boundary"
    assert boundary.details == {"step": 7}
    assert vote.end - vote.begin == pytest.approx(2.0)
    assert vote.begin == pytest.approx(wall, abs=60.0)


def test_trace_buffer_drops_and_counts_oldest_spans() -> None:
    buffer = TraceBuffer(0, max_spans=3)
    for step in range(5):
        buffer.emit(BoundaryDone(step, 0.0, 1.0))
    assert [span.details["step"] for span in buffer.spans] == [2, 3, 4]
    assert buffer.spans_dropped == 2


def test_trace_buffer_keeps_rebalances_and_imbalance_samples() -> None:
    buffer = TraceBuffer(1)
    buffer.emit(RebalanceMeasured(record()))
    buffer.emit(
        BalanceMeasured(8, now(), imbalance=0.25, balancedness=0.75, mean_rows=3.0, max_rows=4.0)
    )
    buffer.close()
    assert [rebalance.number for rebalance in buffer.rebalances] == [3]
    (sample,) = buffer.imbalance_samples
    assert (sample.rank, sample.imbalance) == (1, 0.25)


def test_trace_buffer_keeps_copies_of_the_last_rebalances() -> None:
    buffer = TraceBuffer(0, max_spans=2)
    for number in range(4):
        buffer.emit(rebalance_ended(number=number))
    assert list(buffer.copies) == [2, 3]
    assert buffer.copies[3] == (SlotCopy(0, 3, None, 0),)


def test_wall_clock_offset_is_stable() -> None:
    """With what the clocks say before and after, however long that is."""
    wall, own = time.time(), now()
    offset = wall_clock_offset()
    later, own_later = time.time(), now()
    assert wall - own_later <= offset <= later - own
