"""Requests of a proxy, made up."""

from typing import Any

from hypothesis import strategies as st

from equipoise.report.proxy_log.requests import COMPLETED, LoggedRequest, ProxyLog

START = 1.8e9
"""Seconds since 1970, as logs have them."""


def logged_request(**fields: Any) -> LoggedRequest:
    """Of ten prompt tokens, bound at 1, begun at 2, ended at 6 with five tokens, on `w`."""
    values: dict[str, Any] = {
        "worker": "w", "arrived_at": 0.0, "bound_at": 1.0, "first_answer_at": 2.0, "ended_at": 6.0,
        "prompt": 10, "output": 5, "streamed": True, "outcome": COMPLETED, "attempts": 1,
    } | fields  # fmt: skip
    for key in ("arrived_at", "bound_at", "first_answer_at", "ended_at"):
        if values[key] is not None:
            values[key] += START
    return LoggedRequest(**values)


@st.composite
def logged_requests(draw: st.DrawFn) -> LoggedRequest:
    """Any that a log may hold, in the order in which times come."""
    times = sorted(draw(st.lists(st.integers(0, 64), min_size=4, max_size=4)))
    arrival, bound, first, end = (time / 4 for time in times)
    worker = draw(st.sampled_from(["rank 0", "rank 1", "rank 10", None]))
    has_begun = worker is not None and draw(st.booleans())
    return logged_request(
        worker=worker,
        arrived_at=arrival,
        bound_at=None if worker is None else bound,
        first_answer_at=first if has_begun else None,
        ended_at=end,
        prompt=draw(st.integers(1, 500)),
        output=draw(st.integers(1, 50)) if has_begun else 0,
        streamed=draw(st.booleans()),
        outcome=draw(st.sampled_from([COMPLETED, "worker_lost", "client_disconnected"])),
        attempts=draw(st.integers(0, 3)),
    )


LOGS = st.lists(logged_requests(), min_size=1, max_size=40).map(
    lambda many: ProxyLog("log", tuple(many))
)
