"""What a state says of itself: on a ballot, in a question, and to whoever waits for its work."""

from typing import Any, assert_never

from equipoise.balancer.experts.ballot import Ballot, Stand
from equipoise.balancer.experts.jobs import Task
from equipoise.balancer.experts.states import (
    Agreeing,
    Barred,
    Committing,
    Draining,
    Moving,
    Planning,
    Voting,
    Voyage,
)

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
