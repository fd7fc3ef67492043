"""Requests that no worker could hold stand in nobody's way, and are not forgotten."""

import pytest

from equipoise.balancer.requests.policy import (
    Capacity,
    Decision,
    Request,
    RequestId,
    WorkerChange,
    WorkerState,
)
from equipoise.balancer.requests.policy_settings import (
    POLICIES,
    Binding,
    RoutingPolicySettings,
    WhenFull,
)
from equipoise.balancer.requests.request_router import RequestRouter

SMALL = Capacity(slots=100, kv_tokens=10)
LARGE = Capacity(slots=100, kv_tokens=1_000)
WINDOW = 32
GIANTS = range(40)
"""More than the window."""
NAMES = sorted(POLICIES)


def crowded_router(name: str) -> RequestRouter:
    """A router that holds back, with giants at the head of its pool."""
    router = RequestRouter(
        RoutingPolicySettings(name=name, when_full=WhenFull.HOLD, window=WINDOW, candidates=WINDOW),
        [SMALL, SMALL],
    )
    for giant in GIANTS:
        assert router.on_arrival(Request(id=giant, size=11)).assignments == ()
    return router


def assignments_of(decision: Decision) -> list[tuple[RequestId, int]]:
    return [(one.request, one.worker) for one in decision.assignments]


@pytest.mark.parametrize("name", NAMES)
def test_fitting_request_passes_oversized_ones(name: str) -> None:
    router = crowded_router(name)
    assert [
        request for request, _ in assignments_of(router.on_arrival(Request(id=99, size=5)))
    ] == [99]
    assert router.unassigned == len(GIANTS)


@pytest.mark.parametrize("name", NAMES)
def test_oversized_requests_go_to_new_worker_with_room(name: str) -> None:
    router = crowded_router(name)
    assignments = assignments_of(router.on_worker_change(WorkerChange(worker=2, capacity=LARGE)))
    assert {request for request, _ in assignments} == set(GIANTS)
    assert {worker for _, worker in assignments} == {2}
    assert router.unassigned == 0


@pytest.mark.parametrize("state", [WorkerState.DRAINING, WorkerState.LOST])
def test_oversized_requests_unblock_queue_when_their_worker_leaves(state: WorkerState) -> None:
    router = RequestRouter(
        RoutingPolicySettings(window=WINDOW), [SMALL, Capacity(slots=1, kv_tokens=1_000)]
    )
    for giant in GIANTS:
        router.on_arrival(Request(id=giant, size=11))
    assert assignments_of(router.on_arrival(Request(id=98, size=5))) == []
    assignments = assignments_of(router.on_worker_change(WorkerChange(worker=1, state=state)))
    assert [request for request, _ in assignments] == [98]
    for giant in GIANTS:
        router.on_abort(giant)
    assert router.unassigned == 0


def test_push_policies_bind_oversized_request_to_full_worker() -> None:
    push_policies = [name for name in NAMES if POLICIES[name].binding is Binding.PUSH]
    for name in push_policies:
        router = RequestRouter(RoutingPolicySettings(name=name), [SMALL])
        assert assignments_of(router.on_arrival(Request(id=1, size=11))) == [(1, 0)]
