"""Load over time, out of a log: what it sums up to, and what it is at any moment."""

import numpy as np
import pytest
from helpers.strategies.proxy_request_logs import LOGS, START, logged_request
from hypothesis import given

from equipoise.report.proxy_log.figures import worker_loads
from equipoise.report.proxy_log.requests import LoggedRequest, ProxyLog


def weight(one: LoggedRequest, at: float) -> float:
    """KV tokens of one request at one moment, from first principles."""
    if one.bound_at is None or not one.bound_at <= at < one.ended_at:
        return 0.0
    if one.first_answer_at is None or not one.streamed or at < one.first_answer_at:
        return one.prompt
    part = (at - one.first_answer_at) / (one.ended_at - one.first_answer_at)
    return one.prompt + 1 + (one.output - 1) * part if one.output else one.prompt


@given(routed=LOGS)
def test_worker_load_is_sum_of_request_kv_tokens(routed: ProxyLog) -> None:
    loads = worker_loads(routed, moments=128)  # none of them is one at which anything happens
    if loads is None:
        assert not routed.bound_requests
        return
    for worker, requests in enumerate(routed.by_worker.values()):
        slow = [sum(weight(one, routed.begin + at) for one in requests) for at in loads.times]
        np.testing.assert_allclose(loads.tokens[:, worker], slow, atol=0.05)


@given(routed=LOGS)
def test_idle_share_is_bounded_and_load_below_envelope(routed: ProxyLog) -> None:
    loads = worker_loads(routed, moments=50)
    if loads is None or not loads.busy.any():
        return
    assert 0 <= loads.idle <= 1 - 1 / len(routed.workers) + 1e-9
    assert (loads.tokens.sum(axis=1) <= loads.envelope + 1e-6).all()


def test_idle_share_of_double_load_is_one_quarter() -> None:
    even = {
        "first_answer_at": None,
        "output": 0,
        "arrived_at": 0.0,
        "bound_at": 0.0,
        "ended_at": 8.0,
    }
    late = {"worker": "a", **even, "bound_at": 7.999}
    routed = ProxyLog("log", (
        logged_request(worker="a", prompt=200, **even),
        logged_request(worker="b", prompt=100, **even),
        logged_request(prompt=1, **late),
    ))  # fmt: skip
    loads = worker_loads(routed)
    assert loads is not None
    assert loads.imbalance == pytest.approx(100, rel=1e-3)
    assert loads.idle == pytest.approx(0.25, rel=1e-3)


def test_busy_times_exclude_final_drain() -> None:
    short, long = (
        logged_request(worker="a", ended_at=3.0),
        logged_request(worker="b", ended_at=1000.0),
    )
    loads = worker_loads(
        ProxyLog("log", (short, long, logged_request(worker="a", bound_at=2.9, ended_at=3.0)))
    )
    assert loads is not None
    assert loads.times[loads.busy].max() < 3.0
    assert START not in loads.times
