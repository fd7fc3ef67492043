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
"""Minimum seconds that a rank waits for the others: a time-out of zero means for ever to the
store."""
CONNECTED, READ = "connected", "read"
"""Store keys: each rank's "connected", and the count of ranks that have read them all."""
INTERFACES = "GLOO_SOCKET_IFNAME"
"""Environment variable of torch: names of network interfaces, comma-separated."""


class GlooOperation(Protocol):
    """The handle of an operation."""

    def wait(self, timeout: timedelta) -> bool:
        """Block until it ended; raises RuntimeError when it failed, or after `timeout`.

        A time-out breaks the group, so it is only ever given an operation's hard deadline.
        """
        ...

    def is_completed(self) -> bool:
        """Whether it ended; for point-to-point only true after a wait."""
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
        """Ends after every rank has called it."""
        ...

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> GlooOperation:
        """Rendezvous."""
        ...

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> GlooOperation:
        """First in, first out per source."""
        ...


def make_gloo_group(store: Store, rank: int, size: int, deadline: float) -> GlooGroup:
    """Connect to the other ranks over `store`; operations fail after `deadline` seconds.

    Returns when every rank has connected to all others (clause X8).

    Raises `CommunicatorFailed` if a rank is late, or if `GLOO_SOCKET_IFNAME` names something that
    is no network interface of this machine.
    """
    expiry = time.monotonic() + deadline
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=deadline)
    options._devices = _devices(gloo)
    # Store keys of this rank: those that gloo's constructor sets, one per interface, and our own.
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
    """Wait until gloo's constructor has returned on every rank.

    It returns when this rank's own end of each connection is there. A peer may still be about to
    connect; if this rank closed its group now, the peer would wait for its whole deadline. By the
    store and not by a barrier of gloo, because a rank that leaves does not take its key away.
    """
    store.set(f"{CONNECTED}/{rank}", "yes")
    remaining = timedelta(seconds=max(expiry - time.monotonic(), MIN_WAIT))
    store.wait([f"{CONNECTED}/{peer}" for peer in range(size)], remaining)


def _forget(store: Store, flags: Sequence[str], size: int) -> None:
    """Delete the keys of all ranks; the last rank that has read them does it."""
    if store.add(READ, 1) == size:
        for key in (READ, *(f"{word}/{rank}" for word in flags for rank in range(size))):
            store.delete_key(key)


def _withdraw(store: Store, flags: Sequence[str], rank: int) -> None:
    """Delete this rank's keys after a failure: a rank that tries again must not connect to an
    address at which this rank does not listen any more."""
    with suppress(RuntimeError):  # the store may be the reason for the failure
        for word in flags:
            store.delete_key(f"{word}/{rank}")


def _devices(gloo: Any) -> list[Any]:
    """Gloo's devices for the configured interfaces, or for the one of the host name.

    torch reads the variable only if it makes the devices itself. The host name may belong to an
    interface that the other ranks cannot reach: in containers, or with several networks.
    """
    names = [name for name in os.environ.get(INTERFACES, "").split(",") if name]
    try:
        # Not lazy, whatever TORCH_GLOO_LAZY_INIT says: the addresses are deleted from the store.
        devices = [gloo.create_device(interface=name, lazy_init=False) for name in names]
        return devices or [gloo.create_default_device(lazy_init=False)]
    except RuntimeError as error:
        raise CommunicatorFailed(f"{INTERFACES}={','.join(names)}: no such interface") from error
