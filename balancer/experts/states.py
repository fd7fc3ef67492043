"""The states of the engine, one frozen type each.

    Observing -> Planning -> Agreeing -> Moving -> Committing -> Observing
                    any epoch state  -> Draining -> Observing    (abort)

A state changes only at a boundary (between two steps), and on verdicts that all ranks reach from
the same ballots at the same boundary. The one exception is local progress within an epoch:
Planning becomes Agreeing, and Moving becomes Committing, when this rank's own work is done; until
all ranks are there the verdict is `Wait`.
"""

from concurrent.futures import Future
from dataclasses import dataclass

from equipoise.balancer.experts.mover import Staged
from equipoise.balancer.experts.planner import Proposal


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
    plan: Future[Proposal]


@dataclass(frozen=True)
class Agreeing:
    """This rank has its proposal, and waits for everybody's."""

    epoch: Epoch
    proposal: Proposal


@dataclass(frozen=True)
class Moving:
    """Weights travel to staging beside the forward."""

    epoch: Epoch
    proposal: Proposal
    staging: Future[Staged]


@dataclass(frozen=True)
class Committing:
    """This rank's staging is filled, and it waits for everybody's."""

    epoch: Epoch
    proposal: Proposal
    staged: Staged


@dataclass(frozen=True)
class Draining:
    """The epoch was aborted, but its work still runs and owns its buffers."""

    work: Future[Proposal] | Future[Staged]


@dataclass(frozen=True)
class Barred:
    """This rank cannot go on with the epoch, and says so on its next ballot."""

    epoch: Epoch
    reason: str
    work: Future[Proposal] | Future[Staged]


InEpoch = Planning | Agreeing | Moving | Committing | Barred
State = Observing | InEpoch | Draining
