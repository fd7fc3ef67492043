"""The chart of one rebalance."""

import re
from collections.abc import Callable

import pytest

from equipoise.balancer.experts.runtime.events import Track
from equipoise.balancer.observe.trace_buffer import RecordedSpan
from equipoise.demo.run_record import RunRecord
from equipoise.report.run.plots import (
    MAX_RANKS,
    largest_rebalance,
    rebalance_extent,
    rebalance_gantt,
)
from equipoise.report.svg import PHASE_COLOURS, WORK_COLOURS

TRACK = str(Track.REBALANCE)


pytestmark = pytest.mark.slow

MakeRecord = Callable[..., RunRecord]


def spans(number: int, ranks: int = 2) -> tuple[RecordedSpan, ...]:
    """A rebalance of two seconds on every rank, each a tenth later than the one before."""
    recorded_spans = []
    for rank in range(ranks):
        at, of = 100.0 + rank / 10, {TRACK: number}
        recorded_spans += [
            RecordedSpan(rank, TRACK, "planning", at, at + 1, of),
            RecordedSpan(rank, TRACK, "transferring", at + 1, at + 2, of),
            RecordedSpan(rank, TRACK, f"{TRACK} {number}: committed", at, at + 2, of),
            RecordedSpan(rank, "transfer", "move", at + 1.0, at + 1.5),
            RecordedSpan(rank, "compute stream", "step", at - 50, at - 49),
        ]
    return tuple(recorded_spans)


def test_gantt_shows_rebalance_with_most_moves(make_record: MakeRecord) -> None:
    record = make_record(spans=spans(0))
    chosen = largest_rebalance(record)
    assert chosen is not None
    assert chosen.copies == max(e.copies for e in record.variants["exact"].rebalances)
    picture = rebalance_gantt(record)
    assert picture is not None
    assert picture.title == f"Rebalance {chosen.number}, rank by rank"
    assert f"{chosen.copies} copies" in picture.caption
    for rank in (0, 1):
        assert f">rank {rank}<" in picture.svg
    assert PHASE_COLOURS["planning"] in picture.svg
    assert WORK_COLOURS["transfer"] in picture.svg


def test_gantt_legend_lists_only_occurring_phases(make_record: MakeRecord) -> None:
    picture = rebalance_gantt(make_record(spans=spans(0)))
    assert picture is not None
    assert ">planning<" in picture.svg
    assert ">updating<" not in picture.svg


def test_gantt_omits_spans_outside_rebalance(make_record: MakeRecord) -> None:
    picture = rebalance_gantt(make_record(spans=spans(0)))
    assert picture is not None
    assert WORK_COLOURS["compute stream"] not in picture.svg


def test_gantt_extent_covers_all_ranks(make_record: MakeRecord) -> None:
    rebalance = largest_rebalance(make_record())
    assert rebalance is not None
    extent = rebalance_extent(rebalance, spans(rebalance.number))
    assert extent is not None
    assert (extent.first, extent.last) == pytest.approx((100.0, 102.1))
    assert extent.begin < extent.first
    assert extent.end > extent.last


@pytest.mark.parametrize("recorded_spans", [(), spans(99)])
def test_gantt_is_none_without_spans_of_rebalance(
    make_record: MakeRecord, recorded_spans: tuple[RecordedSpan, ...]
) -> None:
    assert rebalance_gantt(make_record(spans=recorded_spans)) is None


def test_gantt_draws_first_ranks_up_to_limit(make_record: MakeRecord) -> None:
    picture = rebalance_gantt(make_record(spans=spans(0, ranks=MAX_RANKS + 3)))
    assert picture is not None
    assert len(re.findall(r">rank \d+<", picture.svg)) == MAX_RANKS
