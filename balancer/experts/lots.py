"""A lot of layers: staged, verified and committed together."""

from dataclasses import dataclass

from equipoise.balancer.experts.ballot import LotMark
from equipoise.balancer.experts.change import Change
from equipoise.balancer.experts.jobs import Job
from equipoise.balancer.experts.mover import Staged


@dataclass(frozen=True)
class ReadyLot:
    """All that a commit of a lot needs, and what the vote on it compares.

    Attributes:
        staged: where its weights are.
        change: placement, shares and tables of its layers.
        mark: for the ballot.
    """

    staged: Staged
    change: Change
    mark: LotMark


def ready_lot(staging: Job[Staged], change: Change) -> Job[ReadyLot]:
    """Stage a lot, and say what the ballot says of it."""
    staged = yield from staging
    return ReadyLot(staged, change, LotMark(staged.sent, staged.received, change.digest))
