"""The time axis of a log: pauses are cut short, and everything else keeps its order and length."""

from itertools import pairwise

import numpy as np
import pytest
from helpers.strategies.proxy_request_logs import LOGS, START, logged_request
from hypothesis import given
from hypothesis import strategies as st

from equipoise.report.proxy_log.active_time import (
    GAP,
    MAX_GAPS,
    NARROW,
    PAUSE,
    ActiveTime,
    clock_text,
    date_time_text,
    duration_text,
    ticks,
)
from equipoise.report.proxy_log.requests import ProxyLog

DAY = 86_400.0


def bursts(begins: list[int]) -> ActiveTime:
    """Requests of six seconds, two at each of these hours."""
    requests = [
        logged_request(arrived_at=begin * 3600.0 + more, ended_at=begin * 3600.0 + 6.0 + more)
        for begin in begins
        for more in (0.0, 2.0)
    ]
    return ActiveTime.of(requests, GAP)


BEGINS = st.lists(st.integers(0, 50), min_size=1, max_size=30, unique=True).map(sorted)


@given(begins=BEGINS)
def test_pauses_are_narrow_and_the_rest_keeps_its_length(begins: list[int]) -> None:
    active = bursts(begins)
    assert len(active.stretches) == len(begins)
    assert active.seconds == pytest.approx(8.0 * len(begins))
    assert active.length <= active.seconds * (1 + MAX_GAPS) + 1e-6
    for begin, end in active.stretches:
        assert active.place(end) - active.place(begin) == pytest.approx(end - begin)
    for begin, end in active.pauses:
        assert active.place(end) - active.place(begin) == pytest.approx(active.gap)


@given(begins=BEGINS, parts=st.lists(st.floats(-0.1, 1.1), min_size=2, max_size=9))
def test_places_keep_the_order_of_times(begins: list[int], parts: list[float]) -> None:
    active = bursts(begins)
    first, last = active.stretches[0][0], active.stretches[-1][1]
    times = sorted(first + part * (last - first) for part in parts)
    assert all(a <= b + 1e-6 for a, b in pairwise(active.place(time) for time in times))


@given(routed=LOGS)
def test_times_of_places_lie_in_stretches(routed: ProxyLog) -> None:
    active = ActiveTime.of(routed.requests)
    places = (np.arange(50) + 0.5) * active.seconds / 50
    for place, time in zip(places.tolist(), active.times(places).tolist(), strict=True):
        assert any(begin - 1e-6 <= time <= end + 1e-6 for begin, end in active.stretches)
        assert active.place(time) == pytest.approx(place, abs=1e-5)
    short = [end - begin for begin, end in active.pauses]
    assert all(pause > PAUSE * active.seconds / 2 for pause in short)


@given(begins=BEGINS)
def test_ticks_do_not_write_over_each_other(begins: list[int]) -> None:
    active = bursts(begins)
    places = [place for place, _ in ticks(active)]
    assert places
    assert all(b - a >= NARROW * active.length for a, b in pairwise(places))


@pytest.mark.parametrize(
    ("time", "step", "text"),
    [(START, 1.0, "08:00:00"), (START + 0.25, 0.05, "08:00:00.250"), 
     (START + 0.2, 0.1, "08:00:00.2"), (START + 59.9999, 1.0, "08:01:00"),
     (9e11, 1.0, "900,000,000,000 s")],
)  # fmt: skip
def test_clock_text(time: float, step: float, text: str) -> None:
    assert clock_text(time, step) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.2 s"), (59.0, "59 s"), (60.0, "1 min"), (3725.0, "1 h 2 min"), (DAY, "1 d"),
     (2 * DAY + 7200.0, "2 d 2 h")],
)  # fmt: skip
def test_duration_text_has_two_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_date_time_text() -> None:
    assert date_time_text(START) == "2027-01-15 08:00:00"
    assert date_time_text(9e11) == "900,000,000,000 s"
