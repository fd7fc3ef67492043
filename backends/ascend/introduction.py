"""How the ranks of one of HCCL's communicators learn where to meet."""

from torch._C._distributed_c10d import Store

from equipoise.backends.devices.patience import Patience
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import BallotIncomplete, CommunicatorFailed

LOOK = 0.02
"""Seconds of one wait for a ballot: each begins with looks that follow each other fast."""
LAST = "version_key"
"""What torch_npu calls its last word: HCCL's own meeting comes next."""


class Introduction(Store):
    """What torch_npu takes for a store: its few words travel as ballots of the control plane.

    Torch_npu's first rank says two words and the others hear them, no more. A store of torch's
    would be a connection that lives as long as the group, and a wait in it would block for ever
    where the launcher is stopped.

    HCCL's own meeting has a time-out of two minutes and no other end. So the first rank enters it
    only when all others have heard the last word, which is when they enter it: a rank that was lost
    before strands nobody there.

    Args:
        control: carries the ballots.
        question: their common beginning; used once.
        ranks: members, numbers of the run; the first one speaks.
        patience: how long the others listen.
    """

    def __init__(
        self, control: ControlPlane, question: str, ranks: tuple[int, ...], patience: Patience
    ) -> None:
        super().__init__()
        self._control: ControlPlane | None = control
        self._question = question
        self._ranks = ranks
        self._patience = patience

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Say a word; only the first rank does. Torch gives bytes, whatever its stub says.

        Raises `BallotIncomplete` when somebody does not hear the last one in time.
        """
        self._plane().cast(f"{self._question}/{key}", bytes(value))
        if key == LAST:
            collected(self._plane(), f"{self._question}/heard", self._ranks[1:], self._patience)

    def get(self, key: str) -> bytes:
        """Hear it. Raises `BallotIncomplete` when it does not come in time."""
        question = f"{self._question}/{key}"
        (word,) = collected(self._plane(), question, self._ranks[:1], self._patience)
        if key == LAST:
            self._plane().cast(f"{self._question}/heard", b"")
        return word

    def forget(self) -> None:
        """Let go of the control plane: the group lives on, perhaps for ever, and asks no more."""
        self._control = None

    def _plane(self) -> ControlPlane:
        if self._control is None:
            raise CommunicatorFailed(f"{self._question}: torch_npu asks after the introduction")
        return self._control


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
