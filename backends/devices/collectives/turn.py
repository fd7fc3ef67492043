"""Whose turn it is to make one of a library's communicators: one at a time in the whole run.

The first operation of a communicator blocks until every member has called it; torch_npu's queue of
launches meanwhile, the whole process's. Two that are made at once, in a different order on two
ranks, would wait for each other behind each other.
"""

import time
from types import TracebackType

from equipoise.backends.cpu.control import ANSWER, StoreControlPlane
from equipoise.backends.devices.patience import Patience
from equipoise.hal.errors import CommunicatorFailed

FREE = "free"
PAUSE = 0.002
"""Seconds between two looks."""


class Turn:
    """A lock in the store of the control plane; a rank that was lost holds it no more.

    Args:
        control: whose store holds the lock.
        library: by its name; each has turns of its own.
        what: is made under it; no other turn of the run has that name.
        patience: how long to wait.
    """

    def __init__(
        self, control: StoreControlPlane, library: str, what: str, patience: Patience
    ) -> None:
        self._control = control
        self._key = f"{library}/turn"
        self._token = f"{control.rank} {what}"
        self._patience = patience

    def __enter__(self) -> None:
        """Wait for it. Raises `CommunicatorFailed` when it does not come in time."""
        while (holder := self._try()) != self._token:
            if self._patience.left == 0.0:
                raise CommunicatorFailed(f"rank {holder} is being made all the time")
            time.sleep(PAUSE)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the next one."""
        self._swap(self._token, FREE)

    def _try(self) -> str:
        """Take it if it is free: who has it now."""
        holder = self._swap("", self._token)  # the first turn of all
        if holder == FREE:
            holder = self._swap(FREE, self._token)
        if holder != self._token and self._lost(holder):
            holder = self._swap(holder, self._token)
        return holder

    def _lost(self, holder: str) -> bool:
        loss = self._control.lost(0.0)
        return loss is not None and holder.split()[0] == str(loss.rank)

    def _swap(self, wanted: str, replacement: str) -> str:
        """Replace what is there if it is as wanted: what is there then."""
        store, key = self._control.store, self._key
        found = self._control.bounded(lambda: store.compare_set(key, wanted, replacement), ANSWER)
        return found.decode() if isinstance(found, bytes) else str(found)
