"""`RequestTable`: what it reports to a policy, and which assignments it accepts."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from helpers.fakes.late_binding_policy import LateBinding
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.requests.policy import Assignment, Decision, Request, RequestId
from equipoise.hal.errors import RequestError
from equipoise.integrations.vllm.dp.request_table import (
    POLICY_TRACKED_STATES,
    DpRequest,
    DpRequestState,
    RequestTable,
    mark_sent,
)

WORKERS = 3
MANY = 8
ENDS = st.lists(
    st.tuples(
        st.sampled_from([DpRequestState.RUNNING, DpRequestState.ABORTING]),
        st.integers(0, 2),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=MANY,
)
"""By request: where it was when it ended, and tokens made before that step, and in it."""


class RecordingPolicy(LateBinding):
    """Records the requests that are reported to it as finished, and as aborted."""

    def __init__(self) -> None:
        super().__init__([MANY] * WORKERS)
        self.finished: list[RequestId] = []
        self.aborted: list[RequestId] = []

    def on_tokens(
        self, counts: Mapping[RequestId, int], finished: Iterable[RequestId] = ()
    ) -> Decision:
        self.finished += finished
        return super().on_tokens(counts, finished)

    def on_abort(self, request: RequestId) -> Decision:
        self.aborted.append(request)
        return super().on_abort(request)


class Chooses(LateBinding):
    """Binds to one worker, whichever was asked for."""

    def __init__(self, worker: int) -> None:
        super().__init__([MANY] * WORKERS)
        self.worker = worker

    def on_arrival(self, request: Request) -> Decision:
        return Decision((Assignment(request.id, self.worker),))


async def _nowhere(message: Any) -> None:
    """The engine takes it."""


def add_request(table: RequestTable, name: str, rank: int | None = None) -> DpRequest:
    """A request that has come in."""
    request = DpRequest(
        name, prompt_tokens=1, required_rank=rank, arrived_at=0.0, send=_nowhere, messages=[name]
    )
    table.add(request)
    table.notify_policy(request)
    return request


@given(ENDS)
def test_table_reports_finished_only_for_wanted_requests_with_tokens(
    ends: list[tuple[DpRequestState, int, int]],
) -> None:
    policy = RecordingPolicy()
    table = RequestTable(policy, WORKERS)
    expected = []
    for number, (stage, early, late) in enumerate(ends):
        name = str(number)
        request = add_request(table, name)
        assert mark_sent(request) is not None
        table.on_step({name: early} if early else {}, ())
        request.state = stage
        if stage is DpRequestState.RUNNING and early + late:
            expected.append(name)
    names = [str(number) for number in range(len(ends))]
    table.on_step({name: end[2] for name, end in zip(names, ends, strict=True) if end[2]}, names)
    assert policy.finished == expected
    assert policy.aborted == [name for name in names if name not in expected]
    assert (policy.refused, table.requests) == ([], {})


@given(st.none() | st.integers(0, WORKERS - 1), st.integers(-1, WORKERS))
def test_table_accepts_only_existing_worker_and_pinned_rank(rank: int | None, worker: int) -> None:
    table = RequestTable(Chooses(worker), WORKERS)
    if 0 <= worker < WORKERS and rank in (None, worker):
        assert add_request(table, "one", rank).assigned_rank == worker
        return
    with pytest.raises(RequestError, match="made an invalid assignment"):
        add_request(table, "one", rank)
    assert list(table.take_assigned()) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(DpRequestState),
            st.none() | st.integers(0, WORKERS - 1),
            st.integers(1, 99),
        ),
        max_size=MANY,
    )
)
def test_table_share_sums_size_and_tokens_of_sent_requests(
    request_states: list[tuple[DpRequestState, int | None, int]],
) -> None:
    table = RequestTable(LateBinding([MANY] * WORKERS), WORKERS)
    for number, (stage, worker, size) in enumerate(request_states):
        table.requests[str(number)] = DpRequest(
            str(number), size, None, 0.0, _nowhere, [], stage, worker, generated_tokens=number
        )
    there = [
        [
            (n, size)
            for n, (stage, at, size) in enumerate(request_states)
            if at == w and stage in POLICY_TRACKED_STATES
        ]
        for w in range(WORKERS)
    ]
    assert table.rank_loads() == [(len(one), sum(map(sum, one))) for one in there]
