"""What was seen of an explored world."""

from dataclasses import dataclass
from typing import NamedTuple

from exploration.engine.case import Case, Fault
from exploration.engine.forward_model import Observation

from equipoise.balancer.experts.engine.states import RebalanceReport


class After(NamedTuple):
    """What a boundary has left installed."""

    placement: bytes
    shares: bytes


@dataclass(frozen=True)
class RankRecord:
    """One rank's run.

    Attributes:
        rank: whose.
        rank_lost: it was stopped or killed by a fault.
        error: what its host ended by, if not by its own end.
        after: what was installed behind each boundary.
        stages: what it voted on behind each boundary; empty where it did not.
        observations: what its streams saw.
        reports: how its rebalances ended.
        aborts: by reason.
        open: number of the rebalance that is open at the end, and the boundary that opened it.
    """

    rank: int
    rank_lost: bool
    error: BaseException | None
    after: tuple[After, ...]
    stages: tuple[str, ...]
    observations: tuple[Observation, ...]
    reports: tuple[RebalanceReport, ...]
    aborts: dict[str, int]
    open: tuple[int, int] | None


@dataclass(frozen=True)
class Record:
    """A case, and what came of it.

    Attributes:
        case: what was played.
        rank_records: by rank.
        hang: where nobody could move any more, in words; empty if all ended.
        micro_steps: micro-steps.
        struck: the faults whose moment came.
        armed: whether one still waited when the eager steps began.
        decisions: what ranks were told, by question.
        unfinished: what has not ended, of what ranks that serve to the end have launched and
            issued.
    """

    case: Case
    rank_records: tuple[RankRecord, ...]
    hang: str
    micro_steps: int
    struck: tuple[Fault, ...]
    armed: bool
    decisions: dict[str, bytes]
    unfinished: int
