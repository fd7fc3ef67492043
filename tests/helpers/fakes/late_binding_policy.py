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
class Known:
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
        self._known: dict[RequestId, Known] = {}
        self._orders = 0
        self.reports: list[tuple[int, WorkerReport]] = []
        self.refused: list[str] = []

    def on_arrival(self, request: Request) -> Decision:
        self._demand(request.id not in self._known, f"{request} arrived twice")
        self._demand(request.size >= 1, f"{request} has no size")
        if request.worker is not None:
            serves = self._states[request.worker] is WorkerState.SERVING
            self._demand(serves, f"{request} is for a worker that takes nothing")
        self._orders += 1
        self._known[request.id] = Known(request, self._orders)
        return self._decide()

    def on_tokens(
        self, counts: Mapping[RequestId, int], finished: Iterable[RequestId] = ()
    ) -> Decision:
        for name, count in counts.items():
            known = self._find(name)
            self._demand(count >= 1, f"{name} made {count}")
            self._demand(known.state != "pooled", f"{name} made tokens in the pool")
            known.state = "running"
        for name in finished:
            known = self._find(name)
            self._demand(known.state == "running", f"{name} ended while {known.state}")
            del self._known[name]
        return self._decide()

    def on_finish(self, request: RequestId) -> Decision:
        return self.on_tokens({}, [request])

    def on_abort(self, request: RequestId) -> Decision:
        self._find(request)
        del self._known[request]
        return self._decide()

    def on_worker_change(self, change: WorkerChange) -> Decision:
        lost: list[RequestId] = []
        if change.report is not None:
            self.reports.append((change.worker, change.report))
        if change.state is not None:
            nothing = self._states[change.worker] is WorkerState.LOST
            drained = nothing and change.state is WorkerState.DRAINING
            self._demand(not drained, "a lost worker has nothing to drain")
            self._states[change.worker] = change.state
        if change.state is WorkerState.LOST:
            for name, known in list(self._known.items()):
                begun = known.worker == change.worker and known.state == "running"
                if begun or known.request.worker == change.worker:
                    lost.append(name)
                    del self._known[name]
                elif known.worker == change.worker:
                    known.state, known.worker = "pooled", -1
        return Decision(self._decide().assignments, tuple(lost))

    def _decide(self) -> Decision:
        found: list[Assignment] = []
        load = [0] * len(self._slots)
        for known in self._known.values():
            if known.worker >= 0:
                load[known.worker] += 1
        pool = [known for known in self._known.values() if known.state == "pooled"]
        for known in sorted(pool, key=lambda one: one.order):
            free = [
                worker
                for worker, state in enumerate(self._states)
                if state is WorkerState.SERVING and load[worker] < self._slots[worker]
                if known.request.worker in (None, worker)
            ]
            if free:
                known.worker = min(free, key=lambda worker: (load[worker], worker))
                known.state = "bound"
                load[known.worker] += 1
                found.append(Assignment(known.request.id, known.worker))
        return Decision(tuple(found))

    def _find(self, name: RequestId) -> Known:
        self._demand(name in self._known, f"{name} is not known")
        return self._known[name]

    def _demand(self, held: bool, what: str) -> None:
        if not held:
            self.refused.append(what)
            raise OutOfTurn(what)
