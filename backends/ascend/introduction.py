"""How the ranks of one of HCCL's communicators learn where to meet."""

from torch._C._distributed_c10d import Store

from equipoise.backends.devices.collectives.talk import Talk
from equipoise.hal.errors import CommunicatorFailed

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
        talk: carries the words; the first of its ranks speaks.
    """

    def __init__(self, talk: Talk) -> None:
        super().__init__()
        self._talk: Talk | None = talk

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Say a word; only the first rank does. Torch gives bytes, whatever its stub says.

        Raises `BallotIncomplete` when somebody does not hear the last one in time.
        """
        talk = self._among(key)
        talk.say(key, bytes(value))
        if key == LAST:
            talk.hear("heard", talk.ranks[1:])

    def get(self, key: str) -> bytes:
        """Hear it. Raises `BallotIncomplete` when it does not come in time."""
        talk = self._among(key)
        (word,) = talk.hear(key, talk.ranks[:1])
        if key == LAST:
            talk.say("heard")
        return word

    def forget(self) -> None:
        """Let go of the control plane: the group lives on, perhaps for ever, and asks no more."""
        self._talk = None

    def _among(self, key: str) -> Talk:
        if self._talk is None:
            raise CommunicatorFailed(f"torch_npu asks for {key!r} after the introduction")
        return self._talk
