"""Gloo's process group, with the types that torch's own stubs leave out."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor, distributed
from torch.distributed import Store  # type: ignore[attr-defined]

from equipoise.hal.errors import CommunicatorFailed

MIN_WAIT = 0.001
"""Seconds that a rank waits for the others at least: none at all would be for ever to a store."""
CONNECTED, READ = "connected", "read"
"""Under which ranks say that they have connected, and count who has read that of all."""
INTERFACES = "GLOO_SOCKET_IFNAME"
"""The variable that names interfaces, comma-separated, as torch has it."""


class GlooOperation(Protocol):
    """What an operation of the group returns."""

    def wait(self, timeout: timedelta) -> bool:
        """Block until it ended; raises RuntimeError when it failed, or after `timeout`.

        A time-out breaks the group, so it is only ever given an operation's hard deadline.
        """
        ...

    def is_completed(self) -> bool:
        """Whether it ended; true for point-to-point only after somebody waited."""
        ...


class GlooGroup(Protocol):
    """The operations in use; tensors are contiguous, and lists hold one."""

    def allreduce(self, tensors: list[Tensor]) -> GlooOperation:
        """Sum in place."""
        ...

    def _allgather_base(self, out: Tensor, tensor: Tensor) -> GlooOperation: ...

    def _reduce_scatter_base(self, out: Tensor, tensor: Tensor) -> GlooOperation: ...

    def broadcast(self, tensor: Tensor, root: int) -> GlooOperation:
        """From one rank to all."""
        ...

    def alltoall_base(
        self, out: Tensor, tensor: Tensor, receives: list[int], sends: list[int]
    ) -> GlooOperation:
        """Rows of the first dimension; empty lists mean even parts."""
        ...

    def barrier(self) -> GlooOperation:
        """Ends after everybody has come."""
        ...

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> GlooOperation:
        """Rendezvous."""
        ...

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> GlooOperation:
        """First in, first out per source."""
        ...


def make_gloo_group(store: Store, rank: int, size: int, deadline: float) -> GlooGroup:
    """Meet the other ranks over `store`; operations fail after `deadline` seconds.

    Returns when every rank has connected to all others (clause X8).

    Raises `CommunicatorFailed` when a rank does not come, and where `GLOO_SOCKET_IFNAME` names
    something that is no interface of this machine.
    """
    expiry = time.monotonic() + deadline
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=deadline)
    options._devices = _devices(gloo)
    # Where gloo's constructor tells of this rank, for each interface, and what follows below.
    flags = (*(str(place) for place in range(len(options._devices))), CONNECTED)
    try:
        group: GlooGroup = gloo(store, rank, size, options)
        _await_connected(store, rank, size, expiry)
        _forget(store, flags, size)
    except RuntimeError as error:
        _withdraw(store, flags, rank)
        raise CommunicatorFailed(f"the ranks did not all meet within {deadline:g} s") from error
    return group


def _await_connected(store: Store, rank: int, size: int, expiry: float) -> None:
    """Wait until every rank is through with gloo's constructor.

    The constructor returns when this rank's own end of each connection stands. A peer may still be
    about to connect; if this rank closed its group now, the peer would wait in vain for its whole
    deadline. Over the store, because no rank that leaves takes an answer away from there.
    """
    store.set(f"{CONNECTED}/{rank}", "yes")
    left = timedelta(seconds=max(expiry - time.monotonic(), MIN_WAIT))
    store.wait([f"{CONNECTED}/{peer}" for peer in range(size)], left)


def _forget(store: Store, flags: Sequence[str], size: int) -> None:
    """The last rank that needs the meeting's keys no more deletes those of all."""
    if store.add(READ, 1) == size:
        for key in (READ, *(f"{word}/{rank}" for word in flags for rank in range(size))):
            store.delete_key(key)


def _withdraw(store: Store, flags: Sequence[str], rank: int) -> None:
    """Nobody may take an address of an attempt that was given up for one where this rank waits."""
    with suppress(RuntimeError):  # the store may be why
        for word in flags:
            store.delete_key(f"{word}/{rank}")


def _devices(gloo: Any) -> list[Any]:
    """The interfaces that are asked for, or the one of the host's own name.

    torch looks at the variable only where it makes the devices itself. The host's name may belong
    to an interface that the other ranks do not reach: in containers, and on several networks.
    """
    names = [name for name in os.environ.get(INTERFACES, "").split(",") if name]
    try:
        # Not lazy, whatever TORCH_GLOO_LAZY_INIT says: the store forgets the addresses.
        made = [gloo.create_device(interface=name, lazy_init=False) for name in names]
        return made or [gloo.create_default_device(lazy_init=False)]
    except RuntimeError as error:
        raise CommunicatorFailed(f"{INTERFACES}={','.join(names)}: no such interface") from error
