"""The chart of one epoch."""

import re
from collections.abc import Callable

import pytest

from equipoise.balancer.observe.trace import RecordedSpan
from equipoise.demo.run_record import RunRecord
from equipoise.report.run.plots import MOST_RANKS, epoch_extent, epoch_gantt, largest_epoch
from equipoise.report.svg import PHASE_COLOURS, WORK_COLOURS

pytestmark = pytest.mark.slow

MakeRecord = Callable[..., RunRecord]


def spans(number: int, ranks: int = 2) -> tuple[RecordedSpan, ...]:
    """An epoch of two seconds on every rank, each a tenth later than the one before."""
    found = []
    for rank in range(ranks):
        at, of = 100.0 + rank / 10, {"epoch": number}
        found += [
            RecordedSpan(rank, "epoch", "planning", at, at + 1, of),
            RecordedSpan(rank, "epoch", "transferring", at + 1, at + 2, of),
            RecordedSpan(rank, "epoch", f"epoch {number}: committed", at, at + 2, of),
            RecordedSpan(rank, "transfer", "move", at + 1.0, at + 1.5),
            RecordedSpan(rank, "compute stream", "step", at - 50, at - 49),
        ]
    return tuple(found)


def test_gantt_shows_epoch_with_most_moves(make_record: MakeRecord) -> None:
    record = make_record(spans=spans(0))
    chosen = largest_epoch(record)
    assert chosen is not None
    assert chosen.slots_moved == max(e.slots_moved for e in record.variants["exact"].epochs)
    picture = epoch_gantt(record)
    assert picture is not None
    assert picture.title == f"Epoch {chosen.number}, rank by rank"
    assert f"{chosen.slots_moved} copies" in picture.caption
    for rank in (0, 1):
        assert f">rank {rank}<" in picture.svg
    assert PHASE_COLOURS["planning"] in picture.svg
    assert WORK_COLOURS["transfer"] in picture.svg


def test_gantt_legend_lists_only_occurring_phases(make_record: MakeRecord) -> None:
    picture = epoch_gantt(make_record(spans=spans(0)))
    assert picture is not None
    assert ">planning<" in picture.svg
    assert ">updating<" not in picture.svg


def test_gantt_omits_spans_outside_epoch(make_record: MakeRecord) -> None:
    picture = epoch_gantt(make_record(spans=spans(0)))
    assert picture is not None
    assert WORK_COLOURS["compute stream"] not in picture.svg


def test_gantt_extent_covers_all_ranks(make_record: MakeRecord) -> None:
    epoch = largest_epoch(make_record())
    assert epoch is not None
    extent = epoch_extent(epoch, spans(epoch.number))
    assert extent is not None
    assert (extent.first, extent.last) == pytest.approx((100.0, 102.1))
    assert extent.begin < extent.first
    assert extent.end > extent.last


@pytest.mark.parametrize("kept", [(), spans(99)])
def test_gantt_is_none_without_spans_of_epoch(
    make_record: MakeRecord, kept: tuple[RecordedSpan, ...]
) -> None:
    assert epoch_gantt(make_record(spans=kept)) is None


def test_gantt_draws_first_ranks_up_to_limit(make_record: MakeRecord) -> None:
    picture = epoch_gantt(make_record(spans=spans(0, ranks=MOST_RANKS + 3)))
    assert picture is not None
    assert len(re.findall(r">rank \d+<", picture.svg)) == MOST_RANKS
