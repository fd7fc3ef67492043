"""The requests of one client and their states; the only caller of the policy, without I/O.

States of a request (docs/design/vllm.md lists the transitions):

    QUEUED -> ASSIGNED -> RUNNING -> ABORTING              the policy tracks it
       └─────────┴──> FALLBACK_QUEUED -> FALLBACK_RUNNING  vLLM's own rule chooses the rank
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
    """State of a request."""

    QUEUED = "queued"
    """It waits in the policy for a rank."""
    ASSIGNED = "assigned"
    """The policy has chosen a rank; it is not sent yet."""
    RUNNING = "running"
    """It was sent to the engine, which reports when it ends."""
    ABORTING = "aborting"
    """It was sent to the engine, and then aborted by its client."""
    FALLBACK_QUEUED = "fallback_queued"
    """It was removed from the policy, and is not sent yet."""
    FALLBACK_RUNNING = "fallback_running"
    """It was sent to the engine without the policy."""


UNSENT_STATES = frozenset(
    {DpRequestState.QUEUED, DpRequestState.ASSIGNED, DpRequestState.FALLBACK_QUEUED}
)
POLICY_TRACKED_STATES = frozenset({DpRequestState.RUNNING, DpRequestState.ABORTING})
"""States in which the policy is notified of tokens and of the end."""


class RankLoad(NamedTuple):
    """One client's load on a rank: number of requests, and their tokens."""

    requests: int
    tokens: int


@dataclass(eq=False)
class DpRequest:
    """A request that has not ended.

    Attributes:
        id: vLLM's request id.
        prompt_tokens: prompt tokens, at least 1.
        required_rank: the only rank that may serve it; None: any.
        arrived_at: arrival time in seconds.
        send: sends a message to the engine as vLLM itself would.
        messages: messages to send, in order; streamed input has several.
        state: of the request.
        assigned_rank: the rank that the policy chose.
        generated_tokens: tokens generated so far.
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
    """The only caller of a policy, and the only writer of request states besides `mark_sent`.

    Exceptions of the policy are passed on; call `fall_back_all` then.

    Attributes:
        policy: called by this table only.
        num_ranks: number of ranks.
        requests: requests that have not ended, by id.
        queued: those of them that wait in the policy, the oldest first.
        assigned: requests that were assigned a rank since `take_assigned`.
        due: the policy waits for the rest of a step; it decides without it when it is told to.
    """

    policy: RoutingPolicy
    num_ranks: int
    requests: dict[str, DpRequest] = field(default_factory=dict)
    queued: dict[str, DpRequest] = field(default_factory=dict)
    assigned: list[DpRequest] = field(default_factory=list)
    due: bool = False

    def add(self, request: DpRequest) -> None:
        """Add a request; `notify_policy` tells the policy."""
        self.requests[request.id] = self.queued[request.id] = request

    def notify_policy(self, request: DpRequest) -> None:
        """Notify the policy of an added request."""
        arrival = Request(id=request.id, size=request.prompt_tokens, worker=request.required_rank)
        self._apply(self.policy.on_arrival(arrival))

    def on_step(self, counts: Mapping[str, int], ended: Iterable[str]) -> None:
        """Notify the policy of generated tokens and ended requests."""
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
            # A request without a token counts as aborted: policies expect tokens before an end.
            if request.state in POLICY_TRACKED_STATES and request.id not in finished:
                self._apply(self.policy.on_abort(request.id))

    def rank_loads(self) -> list[RankLoad]:
        """Return the load of each rank from requests that the policy tracks."""
        counts, tokens = [0] * self.num_ranks, [0] * self.num_ranks
        for request in self.requests.values():
            if request.assigned_rank is not None and request.state in POLICY_TRACKED_STATES:
                counts[request.assigned_rank] += 1
                tokens[request.assigned_rank] += request.prompt_tokens + request.generated_tokens
        return list(map(RankLoad, counts, tokens))

    def on_reports(self, reports: Iterable[WorkerReport]) -> None:
        """Notify the policy of the ranks' reports, in rank order."""
        for worker, report in enumerate(reports):
            self._apply(self.policy.on_worker_change(WorkerChange(worker=worker, report=report)))

    def decide(self) -> None:
        """Have the policy decide without the rest of a step."""
        self._apply(self.policy.decide())

    def remove(self, request: DpRequest) -> None:
        """Remove a request that the engine will not report the end of."""
        was_present = self.requests.pop(request.id, None) is not None
        self.queued.pop(request.id, None)
        request.messages.clear()
        if was_present and request.state not in (
            DpRequestState.FALLBACK_QUEUED,
            DpRequestState.FALLBACK_RUNNING,
        ):
            self._apply(self.policy.on_abort(request.id))

    def fall_back(self, request: DpRequest) -> None:
        """Remove a queued request from the policy; vLLM's own rule will choose its rank."""
        del self.queued[request.id]
        request.state = DpRequestState.FALLBACK_QUEUED
        self._apply(self.policy.on_abort(request.id))

    def fall_back_all(self) -> list[DpRequest]:
        """Stop using the policy, and return the requests that were not sent."""
        unsent = [one for one in self.requests.values() if one.state in UNSENT_STATES]
        for request in self.requests.values():
            request.state = (
                DpRequestState.FALLBACK_QUEUED
                if request.state in UNSENT_STATES
                else DpRequestState.FALLBACK_RUNNING
            )
        self.queued.clear()
        self.assigned.clear()
        self.due = False
        return unsent

    def close(self) -> None:
        """Drop the policy."""
        self.fall_back_all()
        del self.policy

    def take_assigned(self) -> Iterator[DpRequest]:
        """Return and forget the newly assigned requests that still wait to be sent."""
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
        self.due = decision.due and hasattr(self.policy, "decide")
        for assignment in decision.assignments:
            request = self.queued.pop(str(assignment.request), None)
            invalid = not 0 <= assignment.worker < self.num_ranks
            if request is None or invalid or request.required_rank not in (None, assignment.worker):
                raise RequestError(f"the policy made an invalid assignment: {assignment}")
            request.state, request.assigned_rank = DpRequestState.ASSIGNED, assignment.worker
            self.assigned.append(request)


def mark_sent(request: DpRequest) -> int | None:
    """Record that the first message is being sent. Returns the assigned rank, if any."""
    if request.state is DpRequestState.ASSIGNED:
        request.state = DpRequestState.RUNNING
        return request.assigned_rank
    request.state = DpRequestState.FALLBACK_RUNNING
    return None
