"""Who works for an engine beside the forward."""

from dataclasses import dataclass
from functools import cached_property

from equipoise.balancer.experts.config import EngineConfig
from equipoise.balancer.experts.held_worker import HeldWorker
from equipoise.balancer.experts.jobs import Hire, ThreadWorker, Worker


@dataclass(frozen=True)
class Staff:
    """One worker a kind of work, so that none waits for another; all begin at `go`.

    Attributes:
        planner: plans epochs.
        mover: stages lots, one after another.
        clerk: votes.
        solver: solves shares.
        teller: sums loads.
    """

    planner: HeldWorker
    mover: HeldWorker
    clerk: HeldWorker
    solver: HeldWorker
    teller: HeldWorker

    @staticmethod
    def hired(hire: Hire) -> "Staff":
        """One of each."""
        kinds = ("planner", "mover", "clerk", "solver", "teller")
        return Staff(*(HeldWorker(hire(kind)) for kind in kinds))

    def go(self) -> None:
        """Let begin what was started."""
        for worker in self._everybody:
            worker.go()

    def close(self) -> None:
        """Dismiss all; bounded by the waits that are under way."""
        for worker in self._everybody:
            worker.close()

    @cached_property  # every step asks
    def _everybody(self) -> tuple[HeldWorker, ...]:
        """Most urgent first."""
        return (self.clerk, self.teller, self.solver, self.mover, self.planner)


def threads(config: EngineConfig) -> Hire:
    """A thread each; the clerk's patience is less than what a peer's collective has."""

    def hire(kind: str) -> Worker:
        deadline = config.vote_deadline if kind == "clerk" else config.deadline
        return ThreadWorker(f"equipoise.{config.label}.{kind}", deadline)

    return hire
