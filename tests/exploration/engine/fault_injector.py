"""Lets the faults of a case strike when their moment has come."""

from dataclasses import dataclass, field

from exploration.engine.case import Fault, FaultKind
from exploration.engine.driver import Driver
from exploration.engine.explored_rank import ExploredRank

JOBS = {
    FaultKind.PLANNER_RAISES: "planner",
    FaultKind.TRANSFER_RAISES: "transfer",
    FaultKind.SOLVER_RAISES: "shares",
    FaultKind.VOTE_RAISES: "vote",
}


@dataclass
class Mischief:
    """Faults to come.

    Attributes:
        waiting: each with the micro-steps that it waits once its host is there.
        struck: those whose moment has come.
        lost_ranks: ranks that were stopped or killed.
    """

    ranks: list[ExploredRank]
    driver: Driver
    waiting: list[tuple[Fault, int]]
    struck: list[Fault] = field(default_factory=list)
    lost_ranks: set[int] = field(default_factory=set)

    @property
    def armed(self) -> bool:
        """Whether a fault still waits, for its moment or for something to strike."""
        workers = [worker for explored in self.ranks for worker in explored.workers.values()]
        lurks = any(worker.poisoned or worker.hasty for worker in workers)
        return bool(self.waiting) or lurks or any(explored.traps.armed for explored in self.ranks)

    def watch(self) -> None:
        """Before each micro-step."""
        if not self.waiting:
            return
        still = []
        for fault, delay in self.waiting:
            if self.ranks[fault.rank].at < fault.step:
                still.append((fault, delay))
            elif delay > 0 or not self._strike(fault):
                still.append((fault, delay - 1))
            else:
                self.struck.append(fault)
        self.waiting = still

    def _strike(self, fault: Fault) -> bool:
        """Whether there was anything to strike."""
        rank, explored, world = fault.rank, self.ranks[fault.rank], self.driver.world
        match fault.kind:
            case FaultKind.STOPPED:
                self.lost_ranks.add(rank)
                world.stop(rank)
            case FaultKind.KILLED:
                self.lost_ranks.add(rank)
                self.driver.remove(rank)
            case FaultKind.EXCHANGE_EXPIRES:
                return self._expire(rank)
            case FaultKind.STORE_LOST:
                world.lose_store()
            case FaultKind.SLOW:
                self.driver.slow.add(rank)
            case FaultKind.HASTY_VOTE:
                explored.workers["vote"].hasty = True
            case kind if kind in JOBS:
                explored.workers[JOBS[kind]].poisoned = True
            case kind:
                explored.traps.armed.add(kind)
        return True

    def _expire(self, rank: int) -> bool:
        pending = list(self.driver.world.network.pending)
        mine = [op for op in pending if op.communicator.member == rank]
        moves = [op for op in mine if op.communicator.purpose.endswith(".moves")]
        return any([operation.strike() for operation in moves])
