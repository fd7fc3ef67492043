"""The control plane: a store in the same thread."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from equipoise.hal.errors import BallotIncomplete, ControlPlaneLost, RankLost

if TYPE_CHECKING:
    from equipoise.backends.virtual.world import VirtualWorld


class VirtualStore:
    """What the launcher holds; it outlives every rank (clause C3).

    Attributes:
        ballots: by question and rank.
        decisions: by question.
        first_loss: the first loss that was told: rank and how.
    """

    def __init__(self) -> None:
        self.ballots: dict[tuple[str, int], bytes] = {}
        self.decisions: dict[str, bytes] = {}
        self.first_loss: tuple[int, str] | None = None
        self._is_lost = False

    def check_reachable(self) -> "VirtualStore":
        """The store itself. Raises `ControlPlaneLost` once it is lost (clause C6)."""
        if self._is_lost:
            raise ControlPlaneLost("the store of the virtual world is gone")
        return self

    def report_lost_rank(self, rank: int, how: str) -> None:
        """Say that `rank` is gone; only the first loss is kept, later ones follow from it."""
        if self.first_loss is None:
            self.first_loss = (rank, how)

    def lose(self) -> None:
        """The launcher is gone."""
        self._is_lost = True


class VirtualControlPlane:
    """Ballots, decisions and losses, as one rank sees them."""

    def __init__(self, world: "VirtualWorld", rank: int) -> None:
        self._world = world
        self._rank = rank
        self._operation = "start-up"

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks."""
        return self._world.size

    def cast(self, question: str, ballot: bytes) -> None:
        """Put this rank's ballot; a different one on the same question is an error (clause C1)."""
        stored_ballot = self._store.ballots.setdefault((question, self._rank), ballot)
        if stored_ballot != ballot:
            raise ControlPlaneLost(f"ballot {question!r} was cast twice, differently")

    def collect(
        self, question: str, timeout: float, ranks: Sequence[int] | None = None
    ) -> tuple[bytes, ...]:
        """The ballots of these ranks; names those that are missing (clause C4)."""
        voters = range(self.size) if ranks is None else ranks
        self._world.until(lambda: not self._missing(question, voters), timeout)
        missing = self._missing(question, voters)
        if missing:
            raise BallotIncomplete(question, missing)
        return tuple(self._store.ballots[question, rank] for rank in voters)

    def decide(self, question: str, value: bytes) -> bytes:
        """Settle a question; the first value wins (clause C2)."""
        return self._store.decisions.setdefault(question, value)

    def forget(self, question: str, ranks: Sequence[int] | None = None) -> None:
        """Let go of ballots and of the decision (clause C9)."""
        store = self._store
        store.decisions.pop(question, None)
        for rank in range(self.size) if ranks is None else ranks:
            store.ballots.pop((question, rank), None)

    def set_operation(self, operation: str) -> None:
        """Say what this rank is doing."""
        self._operation = operation

    def announce_exit(self, reason: str) -> None:
        """Say that this rank ends; best effort."""
        with suppress(ControlPlaneLost):
            self._store.report_lost_rank(self._rank, reason)

    def lost_rank(self, timeout: float) -> RankLost | None:
        """Which rank was lost, by what was told or by its silence (clause C5)."""
        self._world.until(lambda: self._evidence() is not None, timeout)
        return self._evidence()

    def close(self) -> None:
        """There is no heartbeat to stop."""

    @property
    def _store(self) -> VirtualStore:
        return self._world.store.check_reachable()

    def _missing(self, question: str, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if (question, rank) not in self._store.ballots)

    def _evidence(self) -> RankLost | None:
        loss = self._world.store.first_loss
        if loss is not None and loss[0] != self._rank:
            return RankLost(*loss, self._operation)
        silent = next(iter(sorted(self._world.silent - {self._rank})), None)
        return None if silent is None else RankLost(silent, "fell silent", self._operation)
