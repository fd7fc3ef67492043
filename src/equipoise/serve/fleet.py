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
        tickets: bound to it or running on it, by number.
        load: their tokens: prompts, and what they made.
        report_failures: times that it was asked for a report in vain.
        heard: loop's time at which something of an answer came from it last.
    """

    state: WorkerState = WorkerState.SERVING
    tickets: dict[int, Ticket] = field(default_factory=dict)
    load: int = 0
    report_failures: int = 0
    heard: float = float("-inf")

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


def least(workers: Sequence[WorkerView], without: int) -> int | None:
    """The worker that serves and has least to do, other than `without`; None: there is none."""
    others = [
        (len(one.tickets), one.load, number)
        for number, one in enumerate(workers)
        if one.state is WorkerState.SERVING and number != without
    ]
    return min(others)[2] if others else None
