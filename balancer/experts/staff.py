"""Who works for an engine beside the forward."""

from dataclasses import dataclass

from equipoise.balancer.experts.config import EngineConfig
from equipoise.balancer.experts.jobs import Hire, ThreadWorker, Worker


@dataclass(frozen=True)
class Staff:
    """One worker a kind of work, so that none waits for another.

    Attributes:
        planner: plans epochs.
        mover: stages lots, one after another.
        clerk: votes.
        solver: solves shares.
    """

    planner: Worker
    mover: Worker
    clerk: Worker
    solver: Worker

    @staticmethod
    def hired(hire: Hire) -> "Staff":
        """One of each."""
        return Staff(hire("planner"), hire("mover"), hire("clerk"), hire("solver"))

    def close(self) -> None:
        """Dismiss all; bounded by the waits that are under way."""
        for worker in (self.clerk, self.solver, self.planner, self.mover):
            worker.close()


def threads(config: EngineConfig) -> Hire:
    """A thread each; the clerk's patience is less than what a peer's collective has."""

    def hire(kind: str) -> Worker:
        deadline = config.vote_deadline if kind == "clerk" else config.deadline
        return ThreadWorker(f"equipoise.{config.label}.{kind}", deadline)

    return hire
