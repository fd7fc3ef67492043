"""How the ranks of a new communicator exchange addresses, and the lock that serialises its
creation.

The lock is for libraries that need it. Torch_npu has one launch queue per process, which blocks on
the first operation of a communicator until every member has called it. If the same ranks make two
communicators at once, in a different order on two ranks, each waits for the other.

So whoever makes a communicator takes the locks of all its members in ascending order of the ranks:
nobody waits for a lower lock while it holds a higher one, hence there is no cycle. Communicators
without a common rank are made in parallel. With one lock for the whole run, 12 disjoint links of
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
"""Seconds of one wait for a ballot. Short, because each wait begins with polls at the shortest
interval (`control_plane.MIN_POLL`): ranks arrive within milliseconds of each other."""


class Bootstrap:
    """Messages between the members of a communicator that is being made, as ballots of the control
    plane: no connection of its own, and every wait is bounded.

    Args:
        control: carries the ballots.
        question: prefix of the ballots' names; used once in a run, or again after `withdraw`.
        ranks: members, numbers of the run.
        deadline: how long this rank waits.
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
        """Seconds until the deadline."""
        return self._deadline.remaining

    def publish(self, word: str, text: bytes = b"") -> None:
        """Publish `text` under `word`, for the other members."""
        self._published.append(word)
        self._control.cast(f"{self._question}/{word}", text)

    def wait_for(self, word: str, ranks: tuple[int, ...]) -> tuple[bytes, ...]:
        """What these ranks publish under `word`. Raises `BallotIncomplete` if one is late."""
        while True:
            remaining = self._deadline.remaining
            try:
                question = f"{self._question}/{word}"
                return self._control.collect_retractable(
                    question, min(POLL_SLICE, remaining), ranks
                )
            except BallotIncomplete:
                if remaining == 0.0:
                    raise

    def barrier(self, word: str, ranks: tuple[int, ...]) -> None:
        """Publish an empty message, and wait for these ranks. Raises `BallotIncomplete`."""
        self.publish(word)
        self.wait_for(word, ranks)

    def withdraw(self) -> None:
        """Delete what this rank has published: the store would keep it, and refuses a second ballot
        on the same question. Raises `ControlError`."""
        words, self._published = self._published, []
        for word in words:
            self._control.forget(f"{self._question}/{word}", (self._control.rank,))


FREE = "free"
MIN_PAUSE, MAX_PAUSE = 0.002, 0.02
"""Seconds between two polls, doubling from the first to the second: each poll is a request to the
store, and a communicator takes some tenths of a second to make."""


class InitLock:
    """One lock per rank in the store of the control plane. A lost rank's lock can be taken over,
    else its death would block every communicator of its peers.

    Args:
        control: whose store holds the locks.
        library: name of the library; each has locks of its own.
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
        self._held_keys: list[str] = []

    def __enter__(self) -> None:
        """Take all locks. Raises `CommunicatorFailed` when one is not free in time."""
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
        """Release the locks."""
        self._free()

    def _take(self, key: str) -> None:
        pause = MIN_PAUSE
        while (owner := self._try(key)) != self._token:
            remaining = self._deadline.remaining
            if remaining == 0.0:
                rank, _, label = owner.partition(" ")
                raise CommunicatorFailed(
                    f"timed out waiting for the init lock that rank {rank} holds to make {label}"
                )
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, MAX_PAUSE)
        self._held_keys.append(key)

    def _free(self) -> None:
        """Release every lock taken, even if the store does not answer for one of them."""
        keys, self._held_keys = self._held_keys, []
        for key in keys:
            with suppress(ControlError):
                self._swap(key, self._token, FREE)

    def _try(self, key: str) -> str:
        """Take the lock if it is free. Returns its owner."""
        owner = self._swap(key, "", self._token)  # never taken so far
        if owner == FREE:
            owner = self._swap(key, FREE, self._token)
        if owner != self._token and self._is_lost(owner):
            owner = self._swap(key, owner, self._token)
        return owner

    def _is_lost(self, owner: str) -> bool:
        loss = self._control.lost_rank(0.0)
        return loss is not None and owner.split()[0] == str(loss.rank)

    def _swap(self, key: str, expected: str, replacement: str) -> str:
        """Compare and set. Returns the value afterwards."""
        store = self._control.store
        value = self._control.call_store(
            lambda: store.compare_set(key, expected, replacement), STORE_TIMEOUT
        )
        return value.decode() if isinstance(value, bytes) else str(value)
