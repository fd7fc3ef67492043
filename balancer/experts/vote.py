"""One vote: cast this rank's ballot, gather everybody's, and settle what they come to."""

import logging
from dataclasses import dataclass

from equipoise.balancer.experts.ballot import (
    Abort,
    Ballot,
    Settled,
    Verdict,
    Wait,
    from_decision,
    judge,
    to_decision,
)
from equipoise.balancer.experts.jobs import Job
from equipoise.balancer.experts.waits import Gathered
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import AgreementLost, BallotIncomplete, ControlLost

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        ballots: names the vote; a rank casts one ballot on it.
        outcome: names what the vote may settle. Several votes ask for one outcome until one of
            them settles it, for good.
        ranks: who votes.
        last: whether to give up where the vote would come to waiting on.
    """

    ballots: str
    outcome: str
    last: bool
    ranks: tuple[int, ...]


def vote(control: ControlPlane, question: Question, ballot: Ballot) -> Job[Verdict]:
    """The verdict on `question`, the same on all ranks unless it is to wait.

    The first answer to `question.outcome` wins. So a rank that misses ballots may wish for an
    abort at any time: if a peer that saw them all has settled otherwise, this rank does as settled.

    Raises:
        AgreementLost: the outcome cannot be learnt, or a peer speaks another language.
    """
    try:
        control.cast(question.ballots, ballot.to_bytes())
        wish = yield from _wish(control, question)
        if isinstance(wish, Wait):
            return wish
        return from_decision(control.decide(question.outcome, to_decision(wish)))
    except ControlLost as error:
        raise AgreementLost(f"the vote {question.ballots}: {error}") from error


def _wish(control: ControlPlane, question: Question) -> Job[Wait | Settled]:
    try:
        texts = yield Gathered(control, question.ballots, question.ranks)
    except BallotIncomplete as error:
        return Abort(f"no ballot from rank(s) {', '.join(map(str, error.missing))}")
    verdict = judge([Ballot.from_bytes(text) for text in texts])
    if isinstance(verdict, Wait) and question.last:
        return Abort("out of patience")
    return verdict


def decline(control: ControlPlane, ballots: str, ballot: Ballot) -> Job[None]:
    """Cast a ballot on a vote whose outcome does not concern this rank."""
    yield from ()
    try:
        control.cast(ballots, ballot.to_bytes())
    except ControlLost as error:
        LOG.warning("the vote %s was not declined: %s", ballots, error)
