"""The states of the engine, one frozen type each.

    Observing -> Planning -> Agreeing -> Moving <-> Committing -> Observing     (boundary path)
                             Agreeing -> Updating -> Observing                  (locked path)
                    any state that votes  -> Draining -> Observing              (abort)

A state changes only at a boundary (between two steps), and on verdicts that all ranks reach from
the same ballots at the same boundary. The one exception is local progress within an epoch:
Planning becomes Agreeing, and Moving becomes Committing, when this rank's own work is done; until
all ranks are there the verdict is `Wait`.

What a state says of itself: on a ballot, in a question, and to whoever waits for its work.
"""

from dataclasses import dataclass
from typing import Any, assert_never

from equipoise.balancer.experts.agreement.ballot import Ballot, Stand
from equipoise.balancer.experts.planning.proposal import Proposal, Shipped
from equipoise.balancer.experts.runtime.jobs import Task
from equipoise.balancer.experts.transfer.p2p import ReadyLot


@dataclass(frozen=True)
class Observing:
    """No epoch is open; loads are collected."""


@dataclass(frozen=True)
class Epoch:
    """Number of an epoch, and the boundary at which it was opened."""

    number: int
    opened: int


@dataclass(frozen=True)
class Planning:
    """The planner runs beside the forward."""

    epoch: Epoch
    plan: Task[Proposal]


@dataclass(frozen=True)
class Agreeing:
    """This rank has its proposal, and waits for everybody's."""

    epoch: Epoch
    proposal: Proposal


@dataclass(frozen=True)
class Voyage:
    """How far the weights of an epoch have come.

    Attributes:
        epoch: whose they are.
        proposal: what is being installed.
        committed: lots that are installed.
        since: the boundary of the last commit, or of the agreement.
        flying: those behind them that were let go, in order: on the way, or staged.
    """

    epoch: Epoch
    proposal: Shipped
    committed: int
    since: int
    flying: tuple[Task[ReadyLot], ...]


@dataclass(frozen=True)
class Moving:
    """Weights travel to staging beside the forward; all that is staged here is committed."""

    voyage: Voyage

    @property
    def epoch(self) -> Epoch:
        """Whose weights travel."""
        return self.voyage.epoch


@dataclass(frozen=True)
class Committing:
    """The first lots are staged on this rank, which waits for everybody's."""

    voyage: Voyage
    staged: tuple[ReadyLot, ...]

    @property
    def epoch(self) -> Epoch:
        """Whose weights are staged."""
        return self.voyage.epoch


@dataclass(frozen=True)
class Draining:
    """The epoch was aborted, but its work still runs and owns its buffers."""

    work: tuple[Task[Any], ...]

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return all(task.done() for task in self.work)


@dataclass(frozen=True)
class Updating:
    """Layers are being rewritten in place, a group a step; nothing is left to agree on.

    Attributes:
        epoch: whose weights are written.
        proposal: what is being installed.
        start: the boundary at which the first group was handed over.
        writing: the groups that were handed over, in order.
    """

    epoch: Epoch
    proposal: Proposal
    start: int
    writing: tuple[Task[None], ...]


@dataclass(frozen=True)
class Landed:
    """Everything is installed; ends the epoch at the boundary at which it is reached.

    Attributes:
        epoch: which ends.
        layers: whose placement it changed; none where the plan left everything in its place.
        copies: that a rank did not hold, over all ranks.
    """

    epoch: Epoch
    layers: int
    copies: int


@dataclass(frozen=True)
class Barred:
    """This rank cannot go on with the epoch, and says so on its next ballot.

    Attributes:
        epoch: that it is barred from.
        reason: what it says.
        inside: what it was about: a plan, a voyage, or work of an epoch before.
    """

    epoch: Epoch
    reason: str
    inside: Planning | Voyage | Draining


Travelling = Moving | Committing
Voting = Planning | Agreeing | Travelling | Barred
"""States in which every boundary has a vote."""
State = Observing | Voting | Updating | Draining


MOVE = "move"
"""What the first votes of an epoch may settle."""


def ballot_of(state: Voting) -> Ballot:
    """What a rank in this state says."""
    match state:
        case Planning():
            return Ballot(Stand.PLANNING)
        case Agreeing(_, proposal):
            return Ballot(Stand.PLANNED, proposal.digest)
        case Moving(voyage):
            return Ballot(Stand.MOVING, voyage.proposal.digest)
        case Committing(voyage, staged):
            return Ballot(Stand.MOVING, voyage.proposal.digest, tuple(lot.mark for lot in staged))
        case Barred(_, reason, _):
            return Ballot(Stand.FAILED, reason=reason)
    assert_never(state)


def voyage_of(state: Voting) -> Voyage | None:
    """The voyage that the state is about, if weights were let go."""
    match state:
        case Moving(voyage) | Committing(voyage, _) | Barred(_, _, Voyage() as voyage):
            return voyage
    return None


def outcome_of(state: Voting) -> str:
    """What the next vote may settle: one question for the move, and one for each commit.

    A commit's question is named by the lots that are committed already, alike on every rank. The
    move has one of its own because staying out of it would harm: the peers' exchange would be
    unmatched, which fails their communicator.
    """
    voyage = voyage_of(state)
    return MOVE if voyage is None else f"commit/{voyage.committed}"


def since(state: Voting) -> int:
    """The last boundary at which the ranks came on together."""
    voyage = voyage_of(state)
    return state.epoch.opened if voyage is None else voyage.since


def work_of(state: Voting) -> tuple[Task[Any], ...]:
    """What still runs when the epoch is left, and owns its buffers."""
    match state:
        case Planning(_, plan) | Barred(_, _, Planning(_, plan)):
            return (plan,)
        case Barred(_, _, Draining(work)):
            return work
    voyage = voyage_of(state)
    return () if voyage is None else voyage.flying


def copies_of(state: Voting) -> int:
    """Copies between ranks, over all of them, that are committed when the epoch is left."""
    voyage = voyage_of(state)
    return 0 if voyage is None else voyage.proposal.shipment.travelled(voyage.committed)
