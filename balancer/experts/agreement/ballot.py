"""Votes at the boundaries of a rebalance: ballots, and the verdict that all ranks reach from them.

A vote casts this rank's ballot, gathers those of all ranks, and settles the verdict.
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
"""Digests are added modulo 2**64."""


class RankStatus(StrEnum):
    """How far a rank is in the rebalance."""

    PLANNING = "planning"
    """The planner still runs."""
    PROPOSED = "proposed"
    """It has a proposal; the ballot carries its digest."""
    TRANSFERRING = "transferring"
    """It transfers weights; the ballot carries the checksums of staged chunks."""
    FAILED = "failed"
    """It cannot go on; the ballot carries the reason."""


@dataclass(frozen=True)
class ChunkChecksum:
    """Checksums of a chunk that a rank has staged.

    Attributes:
        sent: sum, modulo 2**64, of the digests of all messages that it read.
        received: the same of all messages that it staged. Over all ranks the two sums are equal
            exactly when every message arrived as it was read (to 1 in 2**64).
        tables: digest of the chunk's routing tables, equal on all ranks.
    """

    sent: int
    received: int
    tables: str


@dataclass(frozen=True)
class Ballot:
    """The ballot of one rank.

    Attributes:
        status: how far the rank is.
        digest: digest of its proposal, once there is one.
        staged: checksums of the chunks that it has staged and not committed, in order.
        reason: why it failed.
    """

    status: RankStatus
    digest: str = ""
    staged: tuple[ChunkChecksum, ...] = ()
    reason: str = ""

    def to_bytes(self) -> bytes:
        """Encodes as JSON with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def from_bytes(text: bytes) -> "Ballot":
        """Decodes. Raises `VoteOutcomeUnknown` if a peer uses another format."""
        try:
            fields = json.loads(text)
            staged = tuple(ChunkChecksum(**checksum) for checksum in fields.pop("staged"))
            return Ballot(**{**fields, "status": RankStatus(fields["status"]), "staged": staged})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise VoteOutcomeUnknown(f"unreadable ballot {text[:80]!r}: {error}") from error


class _Verdict:
    """Base of verdicts."""

    def trace_fields(self) -> dict[str, object]:
        """Returns the verdict as text."""
        return {"verdict": str(self)}


@dataclass(frozen=True)
class Pending(_Verdict):
    """A rank is still busy."""


@dataclass(frozen=True)
class StartTransfer(_Verdict):
    """All ranks have the same proposal."""


@dataclass(frozen=True)
class Commit(_Verdict):
    """The next `chunks` chunks are staged on all ranks, with the bytes of their sources."""

    chunks: int


@dataclass(frozen=True)
class Abort(_Verdict):
    """The rebalance ends; layers that are not committed stay as they are. `reason` is counted."""

    reason: str


Verdict = Pending | StartTransfer | Commit | Abort
Decision = StartTransfer | Commit | Abort
"""A verdict that is made final by a decision of the control plane."""


def tally(ballots: Sequence[Ballot]) -> Verdict:
    """Returns the verdict of ballots in rank order; every rank reaches the same."""
    failed = [ballot.reason for ballot in ballots if ballot.status is RankStatus.FAILED]
    if failed:
        # The first in rank order: ranks that read the same ballots give the same reason.
        return Abort(failed[0])
    if len({ballot.digest for ballot in ballots if ballot.digest}) > 1:
        return Abort("plans differ")
    statuses = {ballot.status for ballot in ballots}
    if statuses == {RankStatus.PROPOSED}:
        return StartTransfer()
    if statuses == {RankStatus.TRANSFERRING}:
        return _tally_chunks(ballots)
    if RankStatus.TRANSFERRING in statuses:
        return Abort("ranks out of step")
    return Pending()


def _tally_chunks(ballots: Sequence[Ballot]) -> Verdict:
    """Returns the commit of the chunks that all ranks have staged, if they match."""
    # Every rank stages the chunks in one order, so what all have staged is a common prefix.
    chunks = min(len(ballot.staged) for ballot in ballots)
    for chunk in range(chunks):
        checksums = [ballot.staged[chunk] for ballot in ballots]
        if len({checksum.tables for checksum in checksums}) > 1:
            return Abort("tables differ")
        if (
            sum(checksum.sent for checksum in checksums)
            - sum(checksum.received for checksum in checksums)
        ) & MASK64:
            return Abort("staged bytes differ")
    return Commit(chunks) if chunks else Pending()


def to_decision(verdict: Decision) -> bytes:
    """Encodes a verdict for the control plane."""
    match verdict:
        case StartTransfer():
            return b"move"
        case Commit(chunks):
            return b"commit %d" % chunks
        case Abort(reason):
            return b"abort " + reason.encode()


def from_decision(text: bytes) -> Decision:
    """Decodes a verdict. Raises `VoteOutcomeUnknown` for other bytes."""
    word, _, argument = text.partition(b" ")
    if text == b"move":
        return StartTransfer()
    if word == b"commit" and argument.isdigit():
        return Commit(int(argument))
    if word == b"abort":
        return Abort(argument.decode(errors="replace"))
    raise VoteOutcomeUnknown(f"unreadable decision {text[:80]!r}")


LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class VoteSpec:
    """The keys and ranks of a vote.

    Attributes:
        ballots: key of the vote, under which each rank casts one ballot.
        outcome: key of the decision. Several votes have the same, until one of them settles it.
        final_attempt: whether to abort where the verdict would be `Pending`.
        ranks: the ranks that vote.
    """

    ballots: str
    outcome: str
    final_attempt: bool
    ranks: tuple[int, ...]


def vote(control: ControlPlane, spec: VoteSpec, ballot: Ballot) -> Job[Verdict]:
    """Votes; returns the verdict, which is the same on all ranks unless it is `Pending`.

    Raises:
        VoteOutcomeUnknown: the outcome cannot be learnt, or a peer uses another format.
    """
    try:
        control.cast(spec.ballots, ballot.to_bytes())
        verdict = yield from _tally_when_complete(control, spec)
        if isinstance(verdict, Pending):
            return verdict
        # The first decision under this key wins. So a rank that misses ballots may propose an abort
        # at any time: if a peer that saw them all decided otherwise, this rank follows the peer.
        return from_decision(control.decide(spec.outcome, to_decision(verdict)))
    except ControlPlaneLost as error:
        raise VoteOutcomeUnknown(f"the vote {spec.ballots}: {error}") from error


def _tally_when_complete(control: ControlPlane, spec: VoteSpec) -> Job[Pending | Decision]:
    try:
        texts = yield BallotsReady(control, spec.ballots, spec.ranks)
    except BallotIncomplete as error:
        return Abort(f"no ballot from rank(s) {', '.join(map(str, error.missing))}")
    verdict = tally([Ballot.from_bytes(text) for text in texts])
    if isinstance(verdict, Pending) and spec.final_attempt:
        return Abort("no progress in time")
    return verdict


def vote_failed(control: ControlPlane, ballots: str, ballot: Ballot) -> Job[None]:
    """Casts a ballot without waiting for the verdict, which does not concern this rank."""
    yield from ()
    try:
        control.cast(ballots, ballot.to_bytes())
    except ControlPlaneLost as error:
        LOG.warning("the ballot on vote %s was not cast: %s", ballots, error)
