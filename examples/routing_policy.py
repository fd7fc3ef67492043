"""A policy of your own for requests: first come, first served, by the worker with the fewest.

    cd examples && equipoise route --workers http://127.0.0.1:8001 http://127.0.0.1:8002 \
        --policy routing_policy:FewestRequests
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from equipoise import Assignment, Decision, Request, WorkerChange, WorkerState


@dataclass
class RequestState:
    """A request that has not ended: where it is, and whether it has made a token."""

    request: Request
    worker: int | None = None
    begun: bool = False


class FewestRequests:
    """Called with the limits of the workers; a front end then reports every event.

    Args:
        slots: requests that each worker runs at once.
        kv_tokens: KV cache of each worker in tokens, None where it is unlimited; not used here.
    """

    def __init__(self, slots: Sequence[int], kv_tokens: Sequence[int | None]) -> None:
        del kv_tokens
        self.slots: list[int | None] = list(slots)
        self.states = [WorkerState.SERVING] * len(slots)
        self.entries: dict[object, RequestState] = {}  # in the order of arrival

    def on_arrival(self, request: Request) -> Decision:
        """A request arrived; without an assignment it waits here."""
        self.entries[request.id] = RequestState(request)
        return self._assign()

    def on_tokens(self, counts: Mapping[object, int], finished: Iterable[object] = ()) -> Decision:
        """A step: new tokens by request, and the requests that ended."""
        for name in counts:
            self.entries[name].begun = True
        for name in finished:
            del self.entries[name]
        return self._assign()

    def on_finish(self, request: object) -> Decision:
        """A request ended."""
        return self.on_tokens({}, [request])

    def on_abort(self, request: object) -> Decision:
        """A request was aborted, while it waited or ran."""
        del self.entries[request]
        return self._assign()

    def on_worker_change(self, change: WorkerChange) -> Decision:
        """A worker was added, or changed its state or capacity."""
        worker = change.worker
        if worker == len(self.slots):
            self.slots.append(0)
            self.states.append(WorkerState.SERVING)
        if change.capacity is not None:
            self.slots[worker] = change.capacity.slots
        lost = []
        if change.state is not None:
            self.states[worker] = change.state
        if change.state is WorkerState.LOST:
            for name, entry in list(self.entries.items()):
                # Its KV cache is gone, or only this worker may serve it: the caller fails it.
                begun = entry.begun and entry.worker == worker
                if begun or entry.request.worker == worker:
                    lost.append(name)
                    del self.entries[name]
                elif entry.worker == worker:
                    entry.worker = None
        return Decision(self._assign().assignments, tuple(lost))

    def _assign(self) -> Decision:
        load = [0] * len(self.slots)
        for entry in self.entries.values():
            if entry.worker is not None:
                load[entry.worker] += 1
        assignments = []
        for name, entry in self.entries.items():
            if entry.worker is not None:
                continue
            open_workers = [
                worker
                for worker, state in enumerate(self.states)
                if state is WorkerState.SERVING and entry.request.worker in (None, worker)
                if (limit := self.slots[worker]) is None or load[worker] < limit
            ]
            if open_workers:
                entry.worker = min(open_workers, key=load.__getitem__)
                load[entry.worker] += 1
                assignments.append(Assignment(name, entry.worker))
        return Decision(tuple(assignments))
