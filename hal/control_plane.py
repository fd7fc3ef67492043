"""The control plane: ballots, decisions and heartbeats between the hosts of all ranks."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from equipoise.hal.errors import RankLost


@runtime_checkable
class ControlPlane(Protocol):
    """Ballots, decisions and heartbeats over a store that outlives any rank.

    A ballot, once cast, and a decision, once taken, never change: two ranks that learn an outcome
    learn the same one, whatever they timed out on before. They stay until `forget`.
    """

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def cast(self, question: str, ballot: bytes) -> None:
        """Publish this rank's ballot on `question`; once per rank and question."""
        ...

    def collect(
        self, question: str, timeout: float, ranks: Sequence[int] | None = None
    ) -> tuple[bytes, ...]:
        """Wait for the ballots of `ranks` on `question`, in that order; by default of all ranks.

        Raises:
            BallotIncomplete: one of them did not cast its ballot within `timeout` seconds.
            ControlPlaneLost: the store does not answer.
        """
        ...

    def decide(self, question: str, value: bytes) -> bytes:
        """Decide `question`: the first rank's `value` wins, and every rank gets the winner.

        Raises:
            ControlPlaneLost: the store does not answer, so the outcome is unknown.
        """
        ...

    def forget(self, question: str, ranks: Sequence[int] | None = None) -> None:
        """Delete the ballots of `ranks` on `question`, by default of all, and its decision.

        Any rank may call it, any number of times, for any question; no other question changes.
        Afterwards the question is as if it had never been asked: no old ballot or decision is
        seen. So the caller must know that no rank needs it any more. What is not forgotten stays
        as long as the store does, and its name cannot be reused (clause C9).

        Raises:
            ControlPlaneLost: the store does not answer; whether it was deleted is unknown.
        """
        ...

    def set_operation(self, operation: str) -> None:
        """Set what this rank is doing, for errors and heartbeats; costs one attribute write."""
        ...

    def announce_exit(self, reason: str) -> None:
        """Announce that this rank ends, and why; best effort, never raises."""
        ...

    def lost_rank(self, timeout: float) -> RankLost | None:
        """The rank that was lost: as its launcher, itself, or its missing heartbeat reports.

        Waits up to `timeout` seconds; None when every rank still sends heartbeats.
        """
        ...

    def close(self) -> None:
        """Stop the heartbeat, within a bounded time."""
        ...
