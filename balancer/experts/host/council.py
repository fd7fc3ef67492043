"""What the ranks of a node say to each other about one pool."""

import json
import time
from collections.abc import Sequence
from typing import Any

from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import ExpertPoolError


class Council:
    """Questions of one pool on the control plane, within one deadline.

    Args:
        control: the control plane.
        ranks: who takes part, this rank included; the same on each of them.
        name: of the pool; no two pools of one control plane share one.
        timeout: seconds until every wait ends, also later ones, until `renew`.
    """

    def __init__(
        self, control: ControlPlane, ranks: Sequence[int], name: str, timeout: float
    ) -> None:
        self.ranks = tuple(sorted(set(ranks)))
        if control.rank not in self.ranks:
            raise ExpertPoolError(f"rank {control.rank} is not one of its node's {self.ranks}")
        self._control = control
        self._name = name
        self._expiry = time.monotonic() + timeout

    @property
    def rank(self) -> int:
        """This rank."""
        return self._control.rank

    def left(self) -> float:
        """Seconds until the deadline, not below 0."""
        return max(0.0, self._expiry - time.monotonic())

    def renew(self, timeout: float) -> None:
        """Another stage begins, with a deadline of its own."""
        self._expiry = time.monotonic() + timeout

    def say(self, question: str, answer: Any) -> None:
        """This rank's answer, in JSON; once per question."""
        self._control.cast(self._question(question), json.dumps(answer).encode())

    def hear(self, question: str, ranks: Sequence[int]) -> dict[int, Any]:
        """The answers of `ranks`. Raises as `ControlPlane.collect` does."""
        if not ranks:
            return {}
        ballots = self._control.collect(self._question(question), self.left(), ranks)
        return {rank: json.loads(b) for rank, b in zip(ranks, ballots, strict=True)}

    def agree(
        self, question: str, complaint: str, ranks: Sequence[int], error: type[ExpertPoolError]
    ) -> None:
        """Say this rank's `complaint`, "" for none, and hear those of `ranks`.

        Raises `error` if anybody complained, with the same text on every rank.
        """
        self.say(question, complaint)
        heard = self.hear(question, ranks)
        told = [f"rank {rank}: {text}" for rank, text in heard.items() if text]
        if told:
            raise error("; ".join(told))

    def _question(self, question: str) -> str:
        return f"pool/{self._name}/{question}"
