"""The simplest late-binding policy, which is strict: it refuses every event out of turn."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from equipoise.balancer.requests.policy import (
    Assignment,
    Decision,
    Request,
    RequestId,
    WorkerChange,
    WorkerReport,
    WorkerState,
)


class OutOfTurn(Exception):
    """An event that the protocol does not allow there."""


@dataclass
class TrackedRequest:
    """A request that is not gone; `order` is that of arrival."""

    request: Request
    order: int
    state: Literal["pooled", "bound", "running"] = "pooled"
    worker: int = -1


class LateBinding:
    """First come, first served, by the worker with the fewest requests that has a free slot.

    Args:
        slots: of each worker.

    Attributes:
        refused: events out of turn, in words.
    """

    def __init__(self, slots: Sequence[int], rooms: Sequence[int | None] = ()) -> None:
        del rooms
        self._slots = list(slots)
        self._states = [WorkerState.SERVING] * len(slots)
        self._requests: dict[RequestId, TrackedRequest] = {}
        self._orders = 0
        self.reports: list[tuple[int, WorkerReport]] = []
        self.refused: list[str] = []

    def on_arrival(self, request: Request) -> Decision:
        self._demand(request.id not in self._requests, f"{request} arrived twice")
        self._demand(request.size >= 1, f"{request} has no size")
        if request.worker is not None:
            serves = self._states[request.worker] is WorkerState.SERVING
            self._demand(serves, f"{request} is for a worker that takes nothing")
        self._orders += 1
        self._requests[request.id] = TrackedRequest(request, self._orders)
        return self.decide()

    def on_running(self, request: Request, worker: int, tokens: int) -> Decision:
        self._demand(request.id not in self._requests, f"{request} arrived twice")
        self._demand(self._states[worker] is not WorkerState.LOST, f"{request} is on a lost worker")
        self._orders += 1
        state: Literal["bound", "running"] = "running" if tokens else "bound"
        self._requests[request.id] = TrackedRequest(request, self._orders, state, worker)
        return self.decide()

    def on_tokens(
        self, counts: Mapping[RequestId, int], finished: Iterable[RequestId] = ()
    ) -> Decision:
        for name, count in counts.items():
            tracked = self._find(name)
            self._demand(count >= 1, f"{name} made {count}")
            self._demand(tracked.state != "pooled", f"{name} made tokens in the pool")
            tracked.state = "running"
        for name in finished:
            tracked = self._find(name)
            self._demand(tracked.state == "running", f"{name} ended while {tracked.state}")
            del self._requests[name]
        return self.decide()

    def on_finish(self, request: RequestId) -> Decision:
        return self.on_tokens({}, [request])

    def on_abort(self, request: RequestId) -> Decision:
        self._find(request)
        del self._requests[request]
        return self.decide()

    def on_worker_change(self, change: WorkerChange) -> Decision:
        lost_requests: list[RequestId] = []
        self._demand(change.worker <= len(self._slots), f"there is no worker {change.worker}")
        if change.worker == len(self._slots):
            self._slots.append(0)
            self._states.append(WorkerState.SERVING)
        if change.capacity is not None:
            self._slots[change.worker] = change.capacity.slots or 0
        if change.report is not None:
            self.reports.append((change.worker, change.report))
        if change.state is not None:
            nothing = self._states[change.worker] is WorkerState.LOST and change.name is None
            drained = nothing and change.state is WorkerState.DRAINING
            self._demand(not drained, "a lost worker has nothing to drain")
            self._states[change.worker] = change.state
        if change.state is WorkerState.LOST:
            for name, tracked in list(self._requests.items()):
                was_running = tracked.worker == change.worker and tracked.state == "running"
                if was_running or tracked.request.worker == change.worker:
                    lost_requests.append(name)
                    del self._requests[name]
                elif tracked.worker == change.worker:
                    tracked.state, tracked.worker = "pooled", -1
        return Decision(self.decide().assignments, tuple(lost_requests))

    def decide(self) -> Decision:
        assignments: list[Assignment] = []
        load = [0] * len(self._slots)
        for tracked in self._requests.values():
            if tracked.worker >= 0:
                load[tracked.worker] += 1
        pool = [tracked for tracked in self._requests.values() if tracked.state == "pooled"]
        for tracked in sorted(pool, key=lambda one: one.order):
            free = [
                worker
                for worker, state in enumerate(self._states)
                if state is WorkerState.SERVING and load[worker] < self._slots[worker]
                if tracked.request.worker in (None, worker)
            ]
            if free:
                tracked.worker = min(free, key=lambda worker: (load[worker], worker))
                tracked.state = "bound"
                load[tracked.worker] += 1
                assignments.append(Assignment(tracked.request.id, tracked.worker))
        return Decision(tuple(assignments))

    def knows(self, name: RequestId) -> bool:
        """Whether this request has arrived and not ended."""
        return name in self._requests

    def _find(self, name: RequestId) -> TrackedRequest:
        self._demand(name in self._requests, f"{name} is not known")
        return self._requests[name]

    def _demand(self, satisfied: bool, what: str) -> None:
        if not satisfied:
            self.refused.append(what)
            raise OutOfTurn(what)
