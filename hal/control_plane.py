"""The host-side plane on which ranks agree, and by which an error can name the peer."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from equipoise.hal.errors import RankLost


@runtime_checkable
class ControlPlane(Protocol):
    """Ballots, decisions and heartbeats over a store that outlives any rank.

    A ballot, once cast, never changes, and a decision, once taken, never changes: so two ranks
    that learn an outcome learn the same one, whatever they timed out on before; until somebody
    who knows that it is needed no more lets it be forgotten.
    """

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def size(self) -> int:
        """How many ranks."""
        ...

    def cast(self, question: str, ballot: bytes) -> None:
        """Put this rank's ballot on `question`; once per rank and question."""
        ...

    def collect(
        self, question: str, timeout: float, ranks: Sequence[int] | None = None
    ) -> tuple[bytes, ...]:
        """The ballots of `ranks` on `question`, in that order; of all ranks by default.

        Raises:
            BallotIncomplete: one of them did not cast its ballot within `timeout` seconds.
            ControlLost: the store does not answer.
        """
        ...

    def decide(self, question: str, value: bytes) -> bytes:
        """Settle `question`: the first rank's `value` wins, and everybody is told the winner.

        Raises:
            ControlLost: the store does not answer, so the outcome is unknown.
        """
        ...

    def forget(self, question: str, ranks: Sequence[int] | None = None) -> None:
        """Let go of the ballots of `ranks` on `question`, of all by default, and of its decision.

        Any rank may, once or several times, about anything; no other question is touched. Who
        asks afterwards finds what it finds on a question that was never asked: nothing, and not
        something old. So that is for a caller who knows that everybody is through with it: what
        nobody forgets stays as long as the store does, and its name is taken (clause C9).

        Raises:
            ControlLost: the store does not answer; what was to be forgotten may be there, or not.
        """
        ...

    def set_operation(self, operation: str) -> None:
        """Say what this rank is doing, for errors and heartbeats; costs one attribute write."""
        ...

    def announce_exit(self, reason: str) -> None:
        """Say that this rank ends, and why; best effort, never raises."""
        ...

    def lost_rank(self, timeout: float) -> RankLost | None:
        """Which rank was lost: told by the launcher, by itself, or by its silence.

        Waits up to `timeout` seconds for evidence; None when every rank still beats.
        """
        ...

    def close(self) -> None:
        """Stop the heartbeat; bounded."""
        ...
