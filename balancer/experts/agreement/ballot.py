"""What a rank says at a boundary of a rebalance, and what the ballots of all ranks come to.

One vote: cast this rank's ballot, gather everybody's, and settle the verdict.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from equipoise.balancer.experts.runtime.jobs import BallotsReady, Job
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import BallotIncomplete, ControlPlaneLost, VoteOutcomeUnknown

MASK64 = (1 << 64) - 1
"""Fingerprints are added modulo 2**64."""


class RankStatus(StrEnum):
    """How far a rank is."""

    PLANNING = "planning"
    """The planner still runs."""
    PROPOSED = "proposed"
    """It has a proposal; the ballot carries its digest."""
    TRANSFERRING = "transferring"
    """Weights travel; the ballot says which lots are staged."""
    FAILED = "failed"
    """It cannot go on; the ballot carries the reason."""


@dataclass(frozen=True)
class ChunkChecksum:
    """What a rank knows of a lot that it has staged.

    Attributes:
        sent: sum, modulo 2**64, of the fingerprints of all parcels that it read.
        received: the same of all parcels that it staged. Over all ranks the two sums are equal
            exactly when every parcel arrived as it was read (to 1 in 2**64).
        tables: digest of the tables that go with the lot, equal on all ranks.
    """

    sent: int
    received: int
    tables: str


@dataclass(frozen=True)
class Ballot:
    """One rank's word.

    Attributes:
        status: how far it is.
        digest: of the proposal, once there is one.
        staged: marks of the lots that it has staged and not committed yet, in order.
        reason: why it failed.
    """

    status: RankStatus
    digest: str = ""
    staged: tuple[ChunkChecksum, ...] = ()
    reason: str = ""

    def to_bytes(self) -> bytes:
        """JSON, keys sorted."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def from_bytes(text: bytes) -> "Ballot":
        """Raises `VoteOutcomeUnknown` when a peer speaks another language."""
        try:
            fields = json.loads(text)
            staged = tuple(ChunkChecksum(**mark) for mark in fields.pop("staged"))
            return Ballot(**{**fields, "status": RankStatus(fields["status"]), "staged": staged})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise VoteOutcomeUnknown(f"unreadable ballot {text[:80]!r}: {error}") from error


class _Verdict:
    """What ballots come to."""

    def trace_fields(self) -> dict[str, object]:
        """The verdict in words."""
        return {"verdict": str(self)}


@dataclass(frozen=True)
class Pending(_Verdict):
    """Somebody is still busy."""


@dataclass(frozen=True)
class StartTransfer(_Verdict):
    """Everybody has the same plan."""


@dataclass(frozen=True)
class Commit(_Verdict):
    """The next `lots` lots are staged everywhere, and are what their sources hold."""

    chunks: int


@dataclass(frozen=True)
class Abort(_Verdict):
    """The epoch ends here; what it has not committed stays as installed. `reason` is counted."""

    reason: str


Verdict = Pending | StartTransfer | Commit | Abort
Decision = StartTransfer | Commit | Abort
"""A verdict that is made final by a decision."""


def tally(ballots: Sequence[Ballot]) -> Verdict:
    """The one verdict that every rank reaches from the same ballots, in rank order."""
    failed = [ballot.reason for ballot in ballots if ballot.status is RankStatus.FAILED]
    if failed:
        return Abort(failed[0])
    if len({ballot.digest for ballot in ballots if ballot.digest}) > 1:
        return Abort("plans differ")
    stands = {ballot.status for ballot in ballots}
    if stands == {RankStatus.PROPOSED}:
        return StartTransfer()
    if stands == {RankStatus.TRANSFERRING}:
        return _tally_chunks(ballots)
    if RankStatus.TRANSFERRING in stands:
        return Abort("ranks out of step")
    return Pending()


def _tally_chunks(ballots: Sequence[Ballot]) -> Verdict:
    """Commit what everybody has staged, if it is right."""
    lots = min(len(ballot.staged) for ballot in ballots)
    for lot in range(lots):
        marks = [ballot.staged[lot] for ballot in ballots]
        if len({mark.tables for mark in marks}) > 1:
            return Abort("tables differ")
        if (sum(mark.sent for mark in marks) - sum(mark.received for mark in marks)) & MASK64:
            return Abort("staged bytes differ")
    return Commit(lots) if lots else Pending()


def to_decision(verdict: Decision) -> bytes:
    """What is written under the question that the verdict settles."""
    match verdict:
        case StartTransfer():
            return b"move"
        case Commit(lots):
            return b"commit %d" % lots
        case Abort(reason):
            return b"abort " + reason.encode()


def from_decision(text: bytes) -> Decision:
    """The reverse. Raises `VoteOutcomeUnknown` for anything else."""
    word, _, rest = text.partition(b" ")
    if text == b"move":
        return StartTransfer()
    if word == b"commit" and rest.isdigit():
        return Commit(int(rest))
    if word == b"abort":
        return Abort(rest.decode(errors="replace"))
    raise VoteOutcomeUnknown(f"unreadable decision {text[:80]!r}")


LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class VoteSpec:
    """What is asked.

    Attributes:
        ballots: names the vote; a rank casts one ballot on it.
        outcome: names what the vote may settle. Several votes ask for one outcome until one of
            them settles it, for good.
        ranks: who votes.
        final_attempt: whether to give up where the vote would come to waiting on.
    """

    ballots: str
    outcome: str
    final_attempt: bool
    ranks: tuple[int, ...]


def vote(control: ControlPlane, question: VoteSpec, ballot: Ballot) -> Job[Verdict]:
    """The verdict on `question`, the same on all ranks unless it is to wait.

    The first answer to `question.outcome` wins. So a rank that misses ballots may wish for an
    abort at any time: if a peer that saw them all has settled otherwise, this rank does as settled.

    Raises:
        AgreementLost: the outcome cannot be learnt, or a peer speaks another language.
    """
    try:
        control.cast(question.ballots, ballot.to_bytes())
        wish = yield from _tally_when_complete(control, question)
        if isinstance(wish, Pending):
            return wish
        return from_decision(control.decide(question.outcome, to_decision(wish)))
    except ControlPlaneLost as error:
        raise VoteOutcomeUnknown(f"the vote {question.ballots}: {error}") from error


def _tally_when_complete(control: ControlPlane, question: VoteSpec) -> Job[Pending | Decision]:
    try:
        texts = yield BallotsReady(control, question.ballots, question.ranks)
    except BallotIncomplete as error:
        return Abort(f"no ballot from rank(s) {', '.join(map(str, error.missing))}")
    verdict = tally([Ballot.from_bytes(text) for text in texts])
    if isinstance(verdict, Pending) and question.final_attempt:
        return Abort("out of patience")
    return verdict


def vote_failed(control: ControlPlane, ballots: str, ballot: Ballot) -> Job[None]:
    """Cast a ballot on a vote whose outcome does not concern this rank."""
    yield from ()
    try:
        control.cast(ballots, ballot.to_bytes())
    except ControlPlaneLost as error:
        LOG.warning("the vote %s was not declined: %s", ballots, error)
