"""What the members of a channel tell each other while it is made, and when it ends.

Whose turn it is to make one of a library's communicators: one at a time on each rank.

For libraries that need it. Torch_npu's queue of launches, the whole process's, blocks while the
first operation of a communicator waits until every member has called it. Two that are made at once
by the same ranks, in a different order on two of them, would wait for each other.

So whoever makes a communicator takes the turns of all its members, in ascending order of the
ranks: nobody waits for a lower one while it holds a higher one, hence no circle. Communicators
without a common rank are made side by side; with one turn for the whole run, 12 disjoint links of
0.3 s each took longer than 2 s, and 5 of them failed.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from equipoise.backends.common.bounded_wait import Deadline
from equipoise.backends.common.control_plane import STORE_TIMEOUT, StoreControlPlane
from equipoise.hal.errors import BallotIncomplete, CommunicatorFailed, ControlError

POLL_SLICE = 0.02
"""Seconds of one wait for a ballot: each begins with looks that follow each other fast."""


class Bootstrap:
    """Words as ballots of the control plane: no connection of its own, and every wait is bounded.

    Args:
        control: carries the ballots.
        question: their common beginning; used once in a run, or again after `withdraw`.
        ranks: members, numbers of the run.
        deadline: how long this rank listens.
    """

    def __init__(
        self, control: StoreControlPlane, question: str, ranks: tuple[int, ...], deadline: Deadline
    ) -> None:
        self._control = control
        self._question = question
        self._deadline = deadline
        self._published: list[str] = []
        self.ranks = ranks

    @property
    def remaining(self) -> float:
        """Seconds that this rank goes on listening."""
        return self._deadline.remaining

    def publish(self, word: str, text: bytes = b"") -> None:
        """Say it to whoever asks for the word."""
        self._published.append(word)
        self._control.cast(f"{self._question}/{word}", text)

    def wait_for(self, word: str, ranks: tuple[int, ...]) -> tuple[bytes, ...]:
        """What these ranks say under the word. Raises `BallotIncomplete` if one is not in time."""
        while True:
            left = self._deadline.remaining
            try:
                question = f"{self._question}/{word}"
                return self._control.collect_retractable(question, min(POLL_SLICE, left), ranks)
            except BallotIncomplete:
                if left == 0.0:
                    raise

    def barrier(self, word: str, ranks: tuple[int, ...]) -> None:
        """Say to be there, and wait for these ranks. Raises `BallotIncomplete`."""
        self.publish(word)
        self.wait_for(word, ranks)

    def withdraw(self) -> None:
        """Take back all that this rank has said: the store keeps what nobody needs any more, and
        takes no second ballot on a question. Raises `ControlError`."""
        said, self._published = self._published, []
        for word in said:
            self._control.forget(f"{self._question}/{word}", (self._control.rank,))


FREE = "free"
MIN_PAUSE, MAX_PAUSE = 0.002, 0.02
"""Seconds between two looks; they double: each costs a question to the store."""


class InitLock:
    """Locks in the store of the control plane, one a rank; a rank that was lost holds none.

    Args:
        control: whose store holds the locks.
        library: by its name; each has turns of its own.
        label: is made under it; no other turn of the run has that name.
        ranks: members of what is made, numbers of the run.
        deadline: how long to wait.
    """

    def __init__(
        self,
        control: StoreControlPlane,
        library: str,
        label: str,
        ranks: Sequence[int],
        deadline: Deadline,
    ) -> None:
        self._control = control
        self._keys = tuple(f"{library}/turn/{rank}" for rank in sorted(ranks))
        self._token = f"{control.rank} {label}"
        self._deadline = deadline
        self._held: list[str] = []

    def __enter__(self) -> None:
        """Wait for all of them. Raises `CommunicatorFailed` when one does not come in time."""
        try:
            for key in self._keys:
                self._take(key)
        except BaseException:
            self._free()
            raise

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the next ones."""
        self._free()

    def _take(self, key: str) -> None:
        pause = MIN_PAUSE
        while (owner := self._try(key)) != self._token:
            left = self._deadline.remaining
            if left == 0.0:
                rank, _, label = owner.partition(" ")
                raise CommunicatorFailed(
                    f"timed out waiting for the turn that rank {rank} holds to make {label}"
                )
            time.sleep(min(pause, left))
            pause = min(2 * pause, MAX_PAUSE)
        self._held.append(key)

    def _free(self) -> None:
        """All that were taken, also where the store no longer answers for one of them."""
        taken, self._held = self._held, []
        for key in taken:
            with suppress(ControlError):
                self._swap(key, self._token, FREE)

    def _try(self, key: str) -> str:
        """Take it if it is free: who has it now."""
        owner = self._swap(key, "", self._token)  # the first turn of all
        if owner == FREE:
            owner = self._swap(key, FREE, self._token)
        if owner != self._token and self._lost(owner):
            owner = self._swap(key, owner, self._token)
        return owner

    def _lost(self, owner: str) -> bool:
        loss = self._control.lost_rank(0.0)
        return loss is not None and owner.split()[0] == str(loss.rank)

    def _swap(self, key: str, expected: str, replacement: str) -> str:
        """Replace what is there if it is as wanted: what is there then."""
        store = self._control.store
        found = self._control.call_store(
            lambda: store.compare_set(key, expected, replacement), STORE_TIMEOUT
        )
        return found.decode() if isinstance(found, bytes) else str(found)
