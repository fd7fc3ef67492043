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

    HELD = "held"
    """It waits in the policy."""
    BOUND = "bound"
    """The policy has chosen; it is not handed over yet."""
    SENT = "sent"
    """The engine has it, and will say when it ended."""
    LEAVING = "leaving"
    """The engine has it, and was told that nobody wants it any more."""
    BESIDE = "beside"
    """It was taken out of the policy, and is not handed over yet."""
    PASSED = "passed"
    """The engine has it, and the policy does not know."""


UNSENT_STATES = frozenset({DpRequestState.HELD, DpRequestState.BOUND, DpRequestState.BESIDE})
POLICY_TRACKED_STATES = frozenset({DpRequestState.SENT, DpRequestState.LEAVING})
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
        size: prompt tokens, at least 1.
        rank: the only one that may serve it; None: any.
        since: when it arrived, in seconds.
        send: hands a message to the engine as the engine itself would.
        messages: that wait to be handed over, in order; input that streams comes in several.
        stage: where it is.
        worker: that the policy has chosen.
        tokens: that it has made.
    """

    id: str
    size: int
    rank: int | None
    since: float
    send: Callable[[Any], Awaitable[None]]
    messages: list[Any]
    stage: DpRequestState = DpRequestState.HELD
    worker: int | None = None
    tokens: int = 0


@dataclass(eq=False)
class RequestTable:
    """The only caller of a policy, and the only writer of tickets' stages but for `mark_sent`.

    Whatever the policy raises comes through; `dissolve` is what to do then.

    Attributes:
        policy: nobody else calls it.
        workers: that it has.
        tickets: of requests that have not ended, by id.
        held: of them, those that wait in the policy, the oldest first.
        bound: those that the policy chose for since they were taken last.
    """

    policy: RoutingPolicy
    workers: int
    tickets: dict[str, DpRequest] = field(default_factory=dict)
    held: dict[str, DpRequest] = field(default_factory=dict)
    bound: list[DpRequest] = field(default_factory=list)

    def enter(self, ticket: DpRequest) -> None:
        """It is there; the policy does not know yet."""
        self.tickets[ticket.id] = self.held[ticket.id] = ticket

    def arrive(self, ticket: DpRequest) -> None:
        """Tell the policy of what has entered."""
        request = Request(id=ticket.id, size=ticket.size, worker=ticket.rank)
        self._apply(self.policy.on_arrival(request))

    def step(self, counts: Mapping[str, int], ended: Iterable[str]) -> None:
        """Tokens that were made, and requests that ended, since the last step."""
        told: dict[RequestId, int] = {
            name: count for name, count in counts.items() if self._grown(name, count)
        }
        gone = [self.tickets.pop(name) for name in dict.fromkeys(ended) if name in self.tickets]
        finished = [one.id for one in gone if one.stage is DpRequestState.SENT and one.tokens]
        if told or finished:
            self._apply(self.policy.on_tokens(told, finished))
        for ticket in gone:
            # To a policy, what made no token was given up.
            if ticket.stage in POLICY_TRACKED_STATES and ticket.id not in finished:
                self._apply(self.policy.on_abort(ticket.id))

    def shares(self) -> list[RankLoad]:
        """What of the requests that the policy knows each worker has."""
        counts, tokens = [0] * self.workers, [0] * self.workers
        for ticket in self.tickets.values():
            if ticket.worker is not None and ticket.stage in POLICY_TRACKED_STATES:
                counts[ticket.worker] += 1
                tokens[ticket.worker] += ticket.size + ticket.tokens
        return list(map(RankLoad, counts, tokens))

    def report(self, reports: Iterable[WorkerReport]) -> None:
        """What the workers say of themselves, in their order."""
        for worker, report in enumerate(reports):
            self._apply(self.policy.on_worker_change(WorkerChange(worker=worker, report=report)))

    def drop(self, ticket: DpRequest) -> None:
        """It is over, wherever it is: the engine will say nothing of it."""
        known = self.tickets.pop(ticket.id, None) is not None
        self.held.pop(ticket.id, None)
        ticket.messages.clear()
        if known and ticket.stage not in (DpRequestState.BESIDE, DpRequestState.PASSED):
            self._apply(self.policy.on_abort(ticket.id))

    def set_beside(self, ticket: DpRequest) -> None:
        """Take one that is held out of the policy, for the engine's own rule to choose."""
        del self.held[ticket.id]
        ticket.stage = DpRequestState.BESIDE
        self._apply(self.policy.on_abort(ticket.id))

    def dissolve(self) -> list[DpRequest]:
        """The policy is not to be called any more; returns what is not handed over."""
        stray = [one for one in self.tickets.values() if one.stage in UNSENT_STATES]
        for ticket in self.tickets.values():
            ticket.stage = (
                DpRequestState.BESIDE if ticket.stage in UNSENT_STATES else DpRequestState.PASSED
            )
        self.held.clear()
        self.bound.clear()
        return stray

    def close(self) -> None:
        """Part with the policy."""
        self.dissolve()
        del self.policy

    def take_bound(self) -> Iterator[DpRequest]:
        """Those that the policy has chosen for, and that still wait to be handed over."""
        bound, self.bound = self.bound, []
        return (
            one for one in bound if one.stage is DpRequestState.BOUND and one.id in self.tickets
        )

    def _grown(self, name: str, count: int) -> bool:
        ticket = self.tickets.get(name)
        if ticket is None or ticket.stage not in POLICY_TRACKED_STATES:
            return False
        ticket.tokens += count
        return True

    def _apply(self, decision: Decision) -> None:
        for assignment in decision.assignments:
            ticket = self.held.pop(str(assignment.request), None)
            wrong = not 0 <= assignment.worker < self.workers
            if ticket is None or wrong or ticket.rank not in (None, assignment.worker):
                raise RequestError(f"the policy cannot bind so: {assignment}")
            ticket.stage, ticket.worker = DpRequestState.BOUND, assignment.worker
            self.bound.append(ticket)


def mark_sent(ticket: DpRequest) -> int | None:
    """Its first message is on its way; returns the worker that the policy has chosen, if it has."""
    if ticket.stage is DpRequestState.BOUND:
        ticket.stage = DpRequestState.SENT
        return ticket.worker
    ticket.stage = DpRequestState.PASSED
    return None
