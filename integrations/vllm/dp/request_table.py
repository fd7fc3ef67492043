"""Requests of one client, between the engine's front end and the policy; no input or output.

States of a request (docs/design/vllm.md has the table of who moves it):

    HELD -> BOUND -> SENT -> LEAVING        the policy knows it
      └───────┴────> BESIDE -> PASSED       it does not: the engine's own rule chooses the rank
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any, NamedTuple

from equipoise.balancer.requests.policy import (
    Decision,
    Request,
    RequestId,
    RoutingPolicy,
    WorkerChange,
    WorkerReport,
)
from equipoise.hal.errors import RequestError


@unique
class DpRequestState(Enum):
    """Where a request is."""

    QUEUED = "held"
    """It waits in the policy."""
    ASSIGNED = "bound"
    """The policy has chosen; it is not handed over yet."""
    RUNNING = "sent"
    """The engine has it, and will say when it ended."""
    ABORTING = "leaving"
    """The engine has it, and was told that nobody wants it any more."""
    FALLBACK_QUEUED = "beside"
    """It was taken out of the policy, and is not handed over yet."""
    FALLBACK_RUNNING = "passed"
    """The engine has it, and the policy does not know."""


UNSENT_STATES = frozenset(
    {DpRequestState.QUEUED, DpRequestState.ASSIGNED, DpRequestState.FALLBACK_QUEUED}
)
POLICY_TRACKED_STATES = frozenset({DpRequestState.RUNNING, DpRequestState.ABORTING})
"""The policy is told what becomes of it."""


class RankLoad(NamedTuple):
    """What of one client's a rank has: how many requests, and the tokens of them all."""

    requests: int
    tokens: int


@dataclass(eq=False)
class DpRequest:
    """A request that has not ended.

    Attributes:
        id: the engine's name for it.
        prompt_tokens: prompt tokens, at least 1.
        required_rank: the only one that may serve it; None: any.
        arrived_at: when it arrived, in seconds.
        send: hands a message to the engine as the engine itself would.
        messages: that wait to be handed over, in order; input that streams comes in several.
        state: where it is.
        assigned_rank: that the policy has chosen.
        generated_tokens: that it has made.
    """

    id: str
    prompt_tokens: int
    required_rank: int | None
    arrived_at: float
    send: Callable[[Any], Awaitable[None]]
    messages: list[Any]
    state: DpRequestState = DpRequestState.QUEUED
    assigned_rank: int | None = None
    generated_tokens: int = 0


@dataclass(eq=False)
class RequestTable:
    """The only caller of a policy, and the only writer of tickets' stages but for `mark_sent`.

    Whatever the policy raises comes through; `dissolve` is what to do then.

    Attributes:
        policy: nobody else calls it.
        num_ranks: that it has.
        requests: of requests that have not ended, by id.
        queued: of them, those that wait in the policy, the oldest first.
        assigned: those that the policy chose for since they were taken last.
    """

    policy: RoutingPolicy
    num_ranks: int
    requests: dict[str, DpRequest] = field(default_factory=dict)
    queued: dict[str, DpRequest] = field(default_factory=dict)
    assigned: list[DpRequest] = field(default_factory=list)

    def add(self, request: DpRequest) -> None:
        """It is there; the policy does not know yet."""
        self.requests[request.id] = self.queued[request.id] = request

    def notify_policy(self, request: DpRequest) -> None:
        """Tell the policy of what has entered."""
        arrival = Request(id=request.id, size=request.prompt_tokens, worker=request.required_rank)
        self._apply(self.policy.on_arrival(arrival))

    def on_step(self, counts: Mapping[str, int], ended: Iterable[str]) -> None:
        """Tokens that were made, and requests that ended, since the last step."""
        new_tokens: dict[RequestId, int] = {
            name: count for name, count in counts.items() if self._grown(name, count)
        }
        ended_requests = [
            self.requests.pop(name) for name in dict.fromkeys(ended) if name in self.requests
        ]
        finished = [
            one.id
            for one in ended_requests
            if one.state is DpRequestState.RUNNING and one.generated_tokens
        ]
        if new_tokens or finished:
            self._apply(self.policy.on_tokens(new_tokens, finished))
        for request in ended_requests:
            # To a policy, what made no token was given up.
            if request.state in POLICY_TRACKED_STATES and request.id not in finished:
                self._apply(self.policy.on_abort(request.id))

    def rank_loads(self) -> list[RankLoad]:
        """What of the requests that the policy knows each worker has."""
        counts, tokens = [0] * self.num_ranks, [0] * self.num_ranks
        for request in self.requests.values():
            if request.assigned_rank is not None and request.state in POLICY_TRACKED_STATES:
                counts[request.assigned_rank] += 1
                tokens[request.assigned_rank] += request.prompt_tokens + request.generated_tokens
        return list(map(RankLoad, counts, tokens))

    def on_reports(self, reports: Iterable[WorkerReport]) -> None:
        """What the workers say of themselves, in their order."""
        for worker, report in enumerate(reports):
            self._apply(self.policy.on_worker_change(WorkerChange(worker=worker, report=report)))

    def remove(self, request: DpRequest) -> None:
        """It is over, wherever it is: the engine will say nothing of it."""
        known = self.requests.pop(request.id, None) is not None
        self.queued.pop(request.id, None)
        request.messages.clear()
        if known and request.state not in (
            DpRequestState.FALLBACK_QUEUED,
            DpRequestState.FALLBACK_RUNNING,
        ):
            self._apply(self.policy.on_abort(request.id))

    def fall_back(self, request: DpRequest) -> None:
        """Take one that is held out of the policy, for the engine's own rule to choose."""
        del self.queued[request.id]
        request.state = DpRequestState.FALLBACK_QUEUED
        self._apply(self.policy.on_abort(request.id))

    def fall_back_all(self) -> list[DpRequest]:
        """The policy is not to be called any more; returns what is not handed over."""
        unsent = [one for one in self.requests.values() if one.state in UNSENT_STATES]
        for request in self.requests.values():
            request.state = (
                DpRequestState.FALLBACK_QUEUED
                if request.state in UNSENT_STATES
                else DpRequestState.FALLBACK_RUNNING
            )
        self.queued.clear()
        self.assigned.clear()
        return unsent

    def close(self) -> None:
        """Part with the policy."""
        self.fall_back_all()
        del self.policy

    def take_assigned(self) -> Iterator[DpRequest]:
        """Those that the policy has chosen for, and that still wait to be handed over."""
        assigned, self.assigned = self.assigned, []
        return (
            one
            for one in assigned
            if one.state is DpRequestState.ASSIGNED and one.id in self.requests
        )

    def _grown(self, name: str, count: int) -> bool:
        request = self.requests.get(name)
        if request is None or request.state not in POLICY_TRACKED_STATES:
            return False
        request.generated_tokens += count
        return True

    def _apply(self, decision: Decision) -> None:
        for assignment in decision.assignments:
            request = self.queued.pop(str(assignment.request), None)
            invalid = not 0 <= assignment.worker < self.num_ranks
            if request is None or invalid or request.required_rank not in (None, assignment.worker):
                raise RequestError(f"the policy cannot bind so: {assignment}")
            request.state, request.assigned_rank = DpRequestState.ASSIGNED, assignment.worker
            self.assigned.append(request)


def mark_sent(request: DpRequest) -> int | None:
    """Its first message is on its way; returns the worker that the policy has chosen, if it has."""
    if request.state is DpRequestState.ASSIGNED:
        request.state = DpRequestState.RUNNING
        return request.assigned_rank
    request.state = DpRequestState.FALLBACK_RUNNING
    return None
