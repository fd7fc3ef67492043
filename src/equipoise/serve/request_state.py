"""States of a request between client and policy, and what the proxy knows of each worker.

Metrics, retries and health read the latter.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.cancel_scope import CancelReason, CancelScope, ScopeCancelled


@dataclass(frozen=True)
class Queued:
    """No worker has it: it waits in the policy."""


@dataclass(frozen=True, eq=False)
class BoundToWorker:
    """It is to be sent to `worker`, or has been, and nothing of an answer has been passed on.

    One object per binding, so that a task sees that an earlier one is over.
    """

    worker: int


@dataclass(frozen=True)
class Running:
    """Something of an answer by `worker` has been passed on: it is moved no more."""

    worker: int


@dataclass(frozen=True)
class RequestClosed:
    """It ended, and the policy knows, or has ended it itself."""


RequestStatus: TypeAlias = Queued | BoundToWorker | Running | RequestClosed
QUEUED, CLOSED = Queued(), RequestClosed()


class RequestState:
    """Written by the dispatcher; the request's own task reads it, and waits for it.

    Args:
        request_id: what the policy calls it.
        size: prompt tokens, known or estimated.
        required_worker: the only worker that the client lets it go to; None: any.

    Attributes:
        status: see the types above.
        pinned_worker: the only worker that the policy may bind it to; None: any.
        reported_tokens: tokens that the policy knows of, or will at the end of the loop's turn.
        scope: of the part of its task that a lost worker, or a shutdown, ends.
        bound_at: loop's time at which it was bound last.
    """

    def __init__(self, number: int, size: int, wanted: int | None) -> None:
        self.request_id = number
        self.size = size
        self.required_worker = self.pinned_worker = wanted
        self.status: RequestStatus = QUEUED
        self.reported_tokens = 0
        self.scope: CancelScope | None = None
        self.bound_at: float | None = None
        self._binding: asyncio.Future[BoundToWorker] | None = None

    async def wait_until_bound(self) -> BoundToWorker:
        """The worker that it is bound to, as soon as there is one.

        Raises: ScopeCancelled where it is gone: the only worker for it was lost.
        """
        if isinstance(self.status, BoundToWorker):
            return self.status
        if isinstance(self.status, RequestClosed):
            raise ScopeCancelled(CancelReason.WORKER_LOST)
        self._binding = asyncio.get_running_loop().create_future()
        return await self._binding

    def bind(self, worker: int, at: float) -> None:
        """The policy has decided."""
        binding = BoundToWorker(worker)
        self.status, self.bound_at = binding, at
        if self._binding is not None and not self._binding.done():
            self._binding.set_result(binding)

    def unbind(self) -> None:
        """Its worker was lost before the first token: the policy holds it again."""
        self.status, self.reported_tokens = QUEUED, 0
        self.cancel(CancelReason.LOST_BEFORE_FIRST_TOKEN)

    def cancel(self, reason: CancelReason) -> None:
        """End what its task is at."""
        if self.scope is not None:
            self.scope.cancel(reason)


@dataclass
class WorkerView:
    """One worker.

    Attributes:
        state: as it was last reported to the policy.
        health: what was found of it last.
        kv_tokens: tokens in its KV cache; None: unknown.
        manually_drained: whether it is to get no more requests, by hand.
        requests: bound to it or running on it, by number.
        load: their tokens: prompts, and what they made.
        report_failures: times that it was asked for a report in vain.
        last_answer_at: loop's time at which something of an answer came from it last.
    """

    state: WorkerState = WorkerState.SERVING
    health: WorkerState = WorkerState.SERVING
    kv_tokens: int | None = None
    manually_drained: bool = False
    requests: dict[int, RequestState] = field(default_factory=dict)
    load: int = 0
    report_failures: int = 0
    last_answer_at: float = float("-inf")

    @property
    def target_state(self) -> WorkerState:
        """State to report to the policy: what health checks found, unless drained by hand.

        One that is lost, and does not serve yet, stays lost: it has nothing that it could drain.
        """
        aside = self.manually_drained and self.health is WorkerState.SERVING
        due = WorkerState.DRAINING if aside else self.health
        drained = due is WorkerState.DRAINING and self.state is WorkerState.LOST
        return WorkerState.LOST if drained else due

    def add_request(self, state: RequestState) -> None:
        """It was bound to this worker."""
        self.requests[state.request_id] = state
        self.load += state.size + state.reported_tokens

    def remove_request(self, state: RequestState) -> None:
        """It is not any more."""
        if self.requests.pop(state.request_id, None) is not None:
            self.load -= state.size + state.reported_tokens


@dataclass(frozen=True)
class LoadImbalance:
    """How even the load of the workers is that serve.

    Attributes:
        imbalance: G x max - sum, in tokens.
        idle: the part of that of G x max, 0 to 1; 0 where there is no load.
    """

    imbalance: int
    idle: float


def load_imbalance(workers: Sequence[WorkerView]) -> LoadImbalance:
    """As `docs/design/request-balance.md` has it."""
    loads = [one.load for one in workers if one.state is not WorkerState.LOST]
    most = max(loads, default=0) * len(loads)
    return LoadImbalance(most - sum(loads), (most - sum(loads)) / most if most else 0.0)


def least_loaded(workers: Sequence[WorkerView], without: int, size: int = 0) -> int | None:
    """The worker that serves and has least to do, other than `without`; None: there is none.

    Workers with a KV cache too small for `size` are left out.
    """
    candidates = [
        (len(one.requests), one.load, number)
        for number, one in enumerate(workers)
        if one.state is WorkerState.SERVING
        and number != without
        and (one.kv_tokens is None or size <= one.kv_tokens)
    ]
    return min(candidates)[2] if candidates else None
