"""Routers brought into a given state, for one decision."""

from collections.abc import Sequence

from equipoise.balancer.requests.policy import Capacity, Request, WorkerChange
from equipoise.balancer.requests.router import RequestRouter
from equipoise.balancer.requests.rules import PolicySettings


def loaded(settings: PolicySettings, loads: Sequence[int]) -> RequestRouter:
    """Every worker has one request, of its load, and no bound."""
    router = RequestRouter(settings, [Capacity()] * len(loads))
    for worker, load in enumerate(loads):
        router.on_arrival(Request(id=("load", worker), size=load, worker=worker))
    return router


def full(settings: PolicySettings, loads: Sequence[int], sizes: Sequence[int]) -> RequestRouter:
    """The same, with no slot free, and requests 0, 1, ... of these sizes in the pool."""
    router = loaded(settings, loads)
    for worker in range(len(loads)):
        resize(router, worker, 1)
    for name, size in enumerate(sizes):
        assert router.on_arrival(Request(id=name, size=size)).assignments == ()
    return router


def resize(router: RequestRouter, worker: int, slots: int) -> list[tuple[object, int]]:
    """What is bound as the worker has so many slots."""
    change = WorkerChange(worker=worker, capacity=Capacity(slots=slots))
    return [(a.request, a.worker) for a in router.on_worker_change(change).assignments]


def arrivals(router: RequestRouter, sizes: Sequence[int]) -> list[int]:
    """Workers of requests that arrive one by one and are bound at once."""
    bound = []
    for name, size in enumerate(sizes):
        (assignment,) = router.on_arrival(Request(id=name, size=size)).assignments
        bound.append(assignment.worker)
    return bound
