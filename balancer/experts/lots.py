"""A lot of layers: staged, verified and committed together."""

from dataclasses import dataclass

from equipoise.balancer.experts.ballot import LotMark
from equipoise.balancer.experts.jobs import Job
from equipoise.balancer.experts.mover import Staged
from equipoise.balancer.experts.placement import Shape
from equipoise.balancer.experts.planner import Proposal
from equipoise.balancer.experts.tables import Change, change_of


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


def ready_lot(staging: Job[Staged], proposal: Proposal, lot: int, shape: Shape) -> Job[ReadyLot]:
    """Make the lot's tables, then stage it; tables first, so that they are made while bytes fly."""
    change = change_of(proposal.layout, shape, proposal.shipment.layers(lot))
    staged = yield from staging
    mark = LotMark(staged.sent, staged.received, change.digest)
    return ReadyLot(staged, change, mark)
