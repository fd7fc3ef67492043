"""How the ranks of one of HCCL's communicators learn where to meet."""

from torch._C._distributed_c10d import Store

from equipoise.backends.ascend.patience import Patience
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import BallotIncomplete

LOOK = 0.02
"""Seconds of one wait for a ballot: each begins with looks that follow each other fast."""
WHERE = "0"
"""What torch_npu calls the word that says where to meet."""


class Introduction(Store):
    """What torch_npu takes for a store: its few words travel as ballots of the control plane.

    Torch_npu's first rank says two words and the others hear them, no more. A store of torch's
    would be a connection that lives as long as the group, and a wait in it would block for ever
    where the launcher is stopped.

    Args:
        control: carries the ballots.
        question: their common beginning; used once.
        root: the first rank, by its number in the run.
        patience: how long the others listen.
    """

    def __init__(self, control: ControlPlane, question: str, root: int, patience: Patience) -> None:
        super().__init__()
        self._control = control
        self._question = question
        self._root = root
        self._patience = patience

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Say a word; only the first rank does. Torch gives bytes, whatever its stub says."""
        self._control.cast(f"{self._question}/{key}", bytes(value))

    def get(self, key: str) -> bytes:
        """Hear it. Raises `BallotIncomplete` when it does not come in time."""
        question = f"{self._question}/{key}"
        return collected(self._control, question, (self._root,), self._patience)[0]


def collected(
    control: ControlPlane, question: str, ranks: tuple[int, ...], patience: Patience
) -> tuple[bytes, ...]:
    """Ballots that are about to come, found soon after they were cast.

    Raises `BallotIncomplete` when one has not come in time.
    """
    while True:
        left = patience.left
        try:
            return control.collect(question, min(LOOK, left), ranks)
        except BallotIncomplete:
            if left == 0.0:
                raise
