"""torch.distributed's TCP store: who holds it, and how it is reached."""

import errno
import json
import os
import socket
import time
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from equipoise.hal.communicator import Rendezvous
from equipoise.hal.errors import ControlPlaneLost

LOOPBACK = "127.0.0.1"
BACKLOG = 1024
"""Connections that may wait to be accepted: two a rank."""
START_TIMEOUT = 30.0
"""Seconds for the store to come up."""
RETRY_INTERVAL = 0.05
"""Seconds between two attempts to reach the store."""
LOST_RANK_KEY = "gone"
"""The key under which the first loss of a rank is told: JSON {"rank": int, "how": str}."""


def connect_store(rendezvous: Rendezvous) -> Store:
    """A connection to the store, within the rendezvous' namespace. Raises `ControlPlaneLost`."""
    try:
        store = TCPStore(
            rendezvous.host,
            rendezvous.port,
            None,
            False,
            timedelta(seconds=rendezvous.deadline),
            wait_for_workers=False,
        )
    except DistError as error:
        where = f"{rendezvous.host}:{rendezvous.port}"
        raise ControlPlaneLost(f"no store answers at {where}: {short_message(error)}") from error
    return PrefixStore(rendezvous.namespace, store) if rendezvous.namespace else store


_STORES_BY_PORT: dict[int, TCPStore] = {}
"""Stores that this process holds, by port. To its end: a peer that connects again might still reach
one that is about to close."""


def hold(rendezvous: Rendezvous) -> None:
    """Hold the store where the rendezvous says that it is, as `torch.distributed` does on rank 0.

    Does nothing where somebody listens there already: that is the store. Raises `ControlPlaneLost`.
    """
    host, port = rendezvous.host, rendezvous.port
    if port in _STORES_BY_PORT:
        return
    try:
        with _listener(host, port) as listener:
            _STORES_BY_PORT[port] = TCPStore(
                host,
                port,
                None,
                True,
                timedelta(seconds=START_TIMEOUT),
                wait_for_workers=False,
                multi_tenant=True,  # torch's init_process_group of this process may share it
                master_listen_fd=os.dup(listener.fileno()),
            )
    except (OSError, DistError) as error:
        if getattr(error, "errno", None) != errno.EADDRINUSE:
            raise ControlPlaneLost(
                f"no store can be held at {host}:{port}: {short_message(error)}"
            ) from error


def _listener(host: str, port: int) -> socket.socket:
    """On the loopback interface alone where the ranks meet there; else on all, for other nodes."""
    if host in (LOOPBACK, "localhost"):
        return socket.create_server((host, port), backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=BACKLOG)


def wait_for_listener(rendezvous: Rendezvous) -> None:
    """Wait until somebody listens where the store should be.

    torch's own attempts overshoot their time-out by as much again, and log a page of frames.
    Raises `ControlPlaneLost`.
    """
    where, expiry = (rendezvous.host, rendezvous.port), time.monotonic() + rendezvous.deadline
    while True:
        try:
            socket.create_connection(where, timeout=rendezvous.deadline).close()
            return
        except OSError as error:
            if time.monotonic() >= expiry:
                where_text = f"{rendezvous.host}:{rendezvous.port}"
                raise ControlPlaneLost(
                    f"no store answers at {where_text}: {short_message(error)}"
                ) from error
        time.sleep(RETRY_INTERVAL)


class StoreHost:
    """The store itself, on a free port of one interface and on no other.

    Args:
        interface: an address of this machine; the loopback interface by default, since whoever
            reaches the store can end the run.

    Raises:
        ControlPlaneLost: this machine has no such interface.
    """

    def __init__(self, interface: str = LOOPBACK) -> None:
        self._interface = interface
        try:
            with socket.socket() as listener:
                listener.bind((interface, 0))
                listener.listen(BACKLOG)
                self._port: int = listener.getsockname()[1]
                self._store: TCPStore | None = TCPStore(
                    interface,
                    self._port,
                    None,
                    True,
                    timedelta(seconds=START_TIMEOUT),
                    wait_for_workers=False,
                    # Its own: a signal may come while both hold it, and both close what they hold.
                    master_listen_fd=os.dup(listener.fileno()),
                )
        except (OSError, DistError) as error:
            raise ControlPlaneLost(
                f"no store can be held on {interface}: {short_message(error)}"
            ) from error

    @property
    def address(self) -> tuple[str, int]:
        """Where the ranks find it."""
        return self._interface, self._port

    def report_loss(self, rank: int, how: str) -> None:
        """Tell the ranks who is gone."""
        report_lost_rank(self._open_store(), rank, how)

    def beat(self, rank: int) -> tuple[int, str]:
        """How many times `rank` has beaten, and what it was doing then; (0, "start-up") before."""
        key = f"beat/{rank}"
        store = self._open_store()
        if not store.check([key]):
            return 0, "start-up"
        count, _, operation = as_text(store.get(key)).partition(" ")
        return int(count), operation

    def close(self) -> None:
        """Let go of the store; its port closes with it. Further calls do nothing."""
        self._store = None

    def _open_store(self) -> TCPStore:
        """The store. Raises `ControlPlaneLost` once it was closed."""
        if self._store is None:
            raise ControlPlaneLost(f"the store on {self._interface}:{self._port} was closed")
        return self._store


def report_lost_rank(store: Store, rank: int, how: str) -> None:
    """Say that `rank` is gone; only the first loss of a run is kept, later ones follow from it."""
    store.compare_set(LOST_RANK_KEY, "", json.dumps({"rank": rank, "how": how}))


def as_text(value: bytes | str) -> str:
    """What the store holds, as text."""
    return value.decode() if isinstance(value, bytes) else value


def short_message(error: Exception) -> str:
    """The first line of an error of the store, which may be a page long."""
    return str(error).splitlines()[0][:160]
