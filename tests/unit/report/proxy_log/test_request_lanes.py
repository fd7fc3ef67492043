"""Which requests a Gantt chart shows: no two on top of each other, and the middle of many."""

from itertools import pairwise

from helpers.strategies.proxy_request_logs import LOGS, logged_request
from hypothesis import given

from equipoise.report.proxy_log.plots import (
    MAX_REQUESTS,
    MAX_WORKERS,
    log_excerpt,
    pack_lanes,
    request_parts,
)
from equipoise.report.proxy_log.requests import ProxyLog


@given(routed=LOGS)
def test_gantt_lanes_do_not_overlap_and_are_minimal(routed: ProxyLog) -> None:
    lanes = pack_lanes(routed.requests)
    assert sorted(map(id, routed.requests)) == sorted(id(one) for lane in lanes for one in lane)
    for lane in lanes:
        assert all(a.ended_at <= b.arrived_at for a, b in pairwise(lane))
    most = max(
        sum(one.arrived_at <= at.arrived_at < one.ended_at or one is at for one in routed.requests)
        for at in routed.requests
    )
    assert len(lanes) <= most


@given(routed=LOGS)
def test_request_parts_are_contiguous_from_arrival_to_end(
    routed: ProxyLog,
) -> None:
    for one in routed.requests:
        parts = list(request_parts(one))
        assert parts[0][1] == one.arrived_at
        assert parts[-1][2] == one.ended_at
        assert all(a[2] == b[1] for a, b in pairwise(parts))


def test_gantt_excerpt_shows_middle_of_many_requests() -> None:
    many = tuple(
        logged_request(arrived_at=float(k), bound_at=k + 1, first_answer_at=k + 2, ended_at=k + 3)
        for k in range(1000)
    )
    excerpt = log_excerpt(ProxyLog("log", many))
    assert excerpt is not None
    assert not excerpt.whole
    shown_requests = [one for lane in excerpt.lanes[0] for one in lane]
    assert len(shown_requests) == MAX_REQUESTS
    assert min(one.arrived_at for one in shown_requests) == many[260].arrived_at


def test_gantt_excerpt_orders_and_limits_workers() -> None:
    routed = ProxyLog("log", tuple(logged_request(worker=f"rank {k}") for k in range(11, -1, -1)))
    excerpt = log_excerpt(routed)
    assert excerpt is not None
    assert excerpt.workers == tuple(f"rank {k}" for k in range(MAX_WORKERS))
    assert not excerpt.whole


def test_gantt_excerpt_is_none_without_bound_requests() -> None:
    assert (
        log_excerpt(
            ProxyLog("log", (logged_request(worker=None, bound_at=None, first_answer_at=None),))
        )
        is None
    )
