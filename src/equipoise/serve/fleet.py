"""What the proxy itself knows of its workers: for metrics, for retries, and for health."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.ticket import Ticket


@dataclass
class WorkerView:
    """One worker.

    Attributes:
        state: as the policy was told last.
        health: what was found of it last.
        room: tokens in its KV cache; None: unknown.
        aside: whether it is to get no more requests, by hand.
        tickets: bound to it or running on it, by number.
        load: their tokens: prompts, and what they made.
        report_failures: times that it was asked for a report in vain.
        heard: loop's time at which something of an answer came from it last.
    """

    state: WorkerState = WorkerState.SERVING
    health: WorkerState = WorkerState.SERVING
    room: int | None = None
    aside: bool = False
    tickets: dict[int, Ticket] = field(default_factory=dict)
    load: int = 0
    report_failures: int = 0
    heard: float = float("-inf")

    @property
    def due(self) -> WorkerState:
        """What the policy is to be told: what was found of it, unless somebody has set it aside.

        One that is lost, and does not serve yet, stays lost: it has nothing that it could drain.
        """
        aside = self.aside and self.health is WorkerState.SERVING
        due = WorkerState.DRAINING if aside else self.health
        drained = due is WorkerState.DRAINING and self.state is WorkerState.LOST
        return WorkerState.LOST if drained else due

    def take(self, ticket: Ticket) -> None:
        """It was bound to this worker."""
        self.tickets[ticket.number] = ticket
        self.load += ticket.size + ticket.told

    def release(self, ticket: Ticket) -> None:
        """It is not any more."""
        if self.tickets.pop(ticket.number, None) is not None:
            self.load -= ticket.size + ticket.told


@dataclass(frozen=True)
class Balance:
    """How even the load of the workers is that serve.

    Attributes:
        imbalance: G x max - sum, in tokens.
        idle: the part of that of G x max, 0 to 1; 0 where there is no load.
    """

    imbalance: int
    idle: float


def balance_of(workers: Sequence[WorkerView]) -> Balance:
    """As `docs/design/request-balance.md` has it."""
    loads = [one.load for one in workers if one.state is not WorkerState.LOST]
    most = max(loads, default=0) * len(loads)
    return Balance(most - sum(loads), (most - sum(loads)) / most if most else 0.0)


def least(workers: Sequence[WorkerView], without: int, size: int = 0) -> int | None:
    """The worker that serves and has least to do, other than `without`; None: there is none.

    Those whose KV cache would never hold `size` are left out.
    """
    others = [
        (len(one.tickets), one.load, number)
        for number, one in enumerate(workers)
        if one.state is WorkerState.SERVING
        and number != without
        and (one.room is None or size <= one.room)
    ]
    return min(others)[2] if others else None
