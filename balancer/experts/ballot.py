"""What a rank says at a boundary of an epoch, and what all ranks together make of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from equipoise.hal.errors import AgreementLost


class Stand(StrEnum):
    """How far a rank is."""

    BUSY = "busy"
    """Planning or moving still goes on."""
    PLANNED = "planned"
    """It has a proposal; the ballot carries its digest."""
    STAGED = "staged"
    """Its staging is filled; the ballot carries checksums of what it sent and received."""
    FAILED = "failed"
    """It cannot go on; the ballot carries the reason."""


@dataclass(frozen=True)
class Ballot:
    """One rank's word.

    Attributes:
        stand: how far it is.
        digest: of the proposed layout, once there is one.
        sent: fingerprint of the slots read for each destination rank, by rank as text.
        received: fingerprint of the staging filled from each source rank.
        reason: why it failed.
    """

    stand: Stand
    digest: str = ""
    sent: Mapping[str, str] = field(default_factory=dict)
    received: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""

    def to_bytes(self) -> bytes:
        """JSON, keys sorted."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def from_bytes(text: bytes) -> "Ballot":
        """Raises `AgreementLost` when a peer speaks another language."""
        try:
            fields = json.loads(text)
            return Ballot(**{**fields, "stand": Stand(fields["stand"])})
        except (ValueError, TypeError, KeyError) as error:
            raise AgreementLost(f"unreadable ballot {text[:80]!r}: {error}") from error


@dataclass(frozen=True)
class Wait:
    """Somebody is still busy."""


@dataclass(frozen=True)
class Move:
    """Everybody has the same plan."""


@dataclass(frozen=True)
class Commit:
    """Everybody's staging holds what its sources hold."""


@dataclass(frozen=True)
class Abort:
    """The epoch ends here; the installed layout stays. `reason` is what is counted."""

    reason: str


Verdict = Wait | Move | Commit | Abort


def judge(ballots: Sequence[Ballot]) -> Verdict:
    """The one verdict that every rank reaches from the same ballots, in rank order."""
    failed = [ballot.reason for ballot in ballots if ballot.stand is Stand.FAILED]
    if failed:
        return Abort(failed[0])
    if len({ballot.digest for ballot in ballots if ballot.digest}) > 1:
        return Abort("plans differ")
    stands = {ballot.stand for ballot in ballots}
    if stands == {Stand.PLANNED}:
        return Move()
    if stands == {Stand.STAGED}:
        return Commit() if _verified(ballots) else Abort("staged bytes differ")
    if Stand.BUSY not in stands:
        return Abort("ranks out of step")
    return Wait()


def _verified(ballots: Sequence[Ballot]) -> bool:
    """Whether every pair's receiver staged exactly what its sender read."""
    sent = {
        (source, int(peer)): mark
        for source, ballot in enumerate(ballots)
        for peer, mark in ballot.sent.items()
    }
    received = {
        (int(peer), destination): mark
        for destination, ballot in enumerate(ballots)
        for peer, mark in ballot.received.items()
    }
    return sent == received
