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
from enum import StrEnum
from typing import ClassVar

from equipoise.balancer.experts.mover import Staged
from equipoise.balancer.experts.planner import Proposal


class Stage(StrEnum):
    """The two questions of an epoch; each is settled once, by the first to answer."""

    MOVE = "move"
    COMMIT = "commit"


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

    stage: ClassVar[Stage] = Stage.MOVE
    epoch: Epoch
    plan: Future[Proposal]


@dataclass(frozen=True)
class Agreeing:
    """This rank has its proposal, and waits for everybody's."""

    stage: ClassVar[Stage] = Stage.MOVE
    epoch: Epoch
    proposal: Proposal


@dataclass(frozen=True)
class Moving:
    """Weights travel to staging beside the forward."""

    stage: ClassVar[Stage] = Stage.COMMIT
    epoch: Epoch
    proposal: Proposal
    staging: Future[Staged]


@dataclass(frozen=True)
class Committing:
    """This rank's staging is filled, and it waits for everybody's."""

    stage: ClassVar[Stage] = Stage.COMMIT
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
    stage: Stage
    work: Future[Proposal] | Future[Staged]


InEpoch = Planning | Agreeing | Moving | Committing | Barred
State = Observing | InEpoch | Draining
