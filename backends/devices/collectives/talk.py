"""What the members of a channel tell each other while it is made, and when it ends."""

from equipoise.backends.cpu.control import StoreControlPlane
from equipoise.backends.devices.patience import Patience
from equipoise.hal.errors import BallotIncomplete

LOOK = 0.02
"""Seconds of one wait for a ballot: each begins with looks that follow each other fast."""


class Talk:
    """Words as ballots of the control plane: no connection of its own, and every wait is bounded.

    Args:
        control: carries the ballots.
        question: their common beginning; used once in a run, or again after `withdraw`.
        ranks: members, numbers of the run.
        patience: how long this rank listens.
    """

    def __init__(
        self, control: StoreControlPlane, question: str, ranks: tuple[int, ...], patience: Patience
    ) -> None:
        self._control = control
        self._question = question
        self._patience = patience
        self._said: list[str] = []
        self.ranks = ranks

    @property
    def left(self) -> float:
        """Seconds that this rank goes on listening."""
        return self._patience.left

    def say(self, word: str, text: bytes = b"") -> None:
        """Say it to whoever asks for the word."""
        self._said.append(word)
        self._control.cast(f"{self._question}/{word}", text)

    def hear(self, word: str, ranks: tuple[int, ...]) -> tuple[bytes, ...]:
        """What these ranks say under the word. Raises `BallotIncomplete` if one is not in time."""
        while True:
            left = self._patience.left
            try:
                question = f"{self._question}/{word}"
                return self._control.collect_retractable(question, min(LOOK, left), ranks)
            except BallotIncomplete:
                if left == 0.0:
                    raise

    def meet(self, word: str, ranks: tuple[int, ...]) -> None:
        """Say to be there, and wait for these ranks. Raises `BallotIncomplete`."""
        self.say(word)
        self.hear(word, ranks)

    def withdraw(self) -> None:
        """Take back all that this rank has said: the store keeps what nobody needs any more, and
        takes no second ballot on a question. Raises `ControlError`."""
        said, self._said = self._said, []
        for word in said:
            self._control.forget(f"{self._question}/{word}", (self._control.rank,))
