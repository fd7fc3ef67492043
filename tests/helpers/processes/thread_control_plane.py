"""Ranks as threads of one process, and the control plane on which they meet."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from equipoise.hal.errors import BallotIncomplete, RankLost

Answer = TypeVar("Answer")
JOINING = 30.0


class Board:
    """What everybody has said."""

    def __init__(self) -> None:
        self.ballots: dict[tuple[str, int], bytes] = {}
        self.changed = threading.Condition()


class ThreadControl:
    """A `ControlPlane` of ballots; nothing is decided and nobody is lost."""

    def __init__(self, board: Board, rank: int, size: int) -> None:
        self._board = board
        self.rank = rank
        self.size = size

    def cast(self, question: str, ballot: bytes) -> None:
        with self._board.changed:
            if (question, self.rank) in self._board.ballots:
                raise AssertionError(f"rank {self.rank} was asked {question!r} twice")
            self._board.ballots[question, self.rank] = ballot
            self._board.changed.notify_all()

    def collect(
        self, question: str, timeout: float, ranks: Sequence[int] | None = None
    ) -> tuple[bytes, ...]:
        members = range(self.size) if ranks is None else ranks
        expiry = time.monotonic() + timeout
        ballots = self._board.ballots
        with self._board.changed:
            while missing := [rank for rank in members if (question, rank) not in ballots]:
                if not self._board.changed.wait(expiry - time.monotonic()):
                    raise BallotIncomplete(question, tuple(missing))
            return tuple(ballots[question, rank] for rank in members)

    def decide(self, question: str, value: bytes) -> bytes:
        raise NotImplementedError

    def forget(self, question: str, ranks: Sequence[int] | None = None) -> None:
        raise NotImplementedError

    def set_operation(self, operation: str) -> None:
        """Nobody asks."""

    def announce_exit(self, reason: str) -> None:
        """Nobody asks."""

    def lost_rank(self, timeout: float) -> RankLost | None:
        return None

    def close(self) -> None:
        """Nothing to end."""


def meet(size: int, program: Callable[[ThreadControl], Answer]) -> list[Answer | BaseException]:
    """What `program` returned or raised, by rank."""
    board = Board()
    answers: dict[int, Answer | BaseException] = {}

    def run(rank: int) -> None:
        try:
            answers[rank] = program(ThreadControl(board, rank, size))
        except BaseException as error:
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOINING)
        assert not thread.is_alive()
    return [answers[rank] for rank in range(size)]
