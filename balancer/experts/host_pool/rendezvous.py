"""Shares one memory among ranks that may be on one machine, or finds that they cannot.

The lowest rank creates the memory and publishes a handle. The others open it through /proc; if that
is not permitted, they ask the owner for the descriptor over a socket, which serves ranks of the
same user only. Ranks that cannot get it that way either start again among themselves: two
containers with one node name end up with a pool each. Every round has at least one rank fewer, so
it ends.
"""

import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from equipoise.balancer.experts.agreement.same_on_all_ranks import (
    Values,
    check_same_on_all_ranks,
)
from equipoise.balancer.experts.host_pool import shared_memory
from equipoise.balancer.experts.host_pool.layout import PoolLayout
from equipoise.balancer.experts.host_pool.shared_memory import (
    TOKEN_BYTES,
    PoolHeader,
    available_memory,
)
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import ExpertPoolError, HostMemoryExhausted, PoolMismatch


class NodeCoordinator:
    """Exchanges messages of one pool on the control plane, within one deadline.

    Args:
        control: the control plane.
        ranks: the ranks, including this one; the same on each of them.
        name: name of the pool, unique on the control plane.
        timeout: seconds after which all waits end, until `renew_deadline`.
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

    def time_left(self) -> float:
        """Returns the seconds until the deadline, not below 0."""
        return max(0.0, self._expiry - time.monotonic())

    def renew_deadline(self, timeout: float) -> None:
        """Starts a new deadline."""
        self._expiry = time.monotonic() + timeout

    def check_same(self, own_values: Values) -> None:
        """Checks that all ranks have the same values. Raises `RanksDiffer`."""
        subject, key = f"pool {self._name!r}", self._key("same")
        check_same_on_all_ranks(
            self._control, key, self.time_left(), {subject: own_values}, self.ranks
        )

    def publish(self, key: str, answer: Any) -> None:
        """Publishes this rank's answer as JSON; once per key."""
        self._control.cast(self._key(key), json.dumps(answer).encode())

    def collect(self, key: str, ranks: Sequence[int]) -> dict[int, Any]:
        """Returns the answers of `ranks`. Raises as `ControlPlane.collect` does."""
        if not ranks:
            return {}
        ballots = self._control.collect(self._key(key), self.time_left(), ranks)
        return {rank: json.loads(b) for rank, b in zip(ranks, ballots, strict=True)}

    def raise_if_any(
        self, key: str, complaint: str, ranks: Sequence[int], error: type[ExpertPoolError]
    ) -> None:
        """Publishes this rank's `complaint`, "" for none, and collects those of `ranks`.

        Raises `error` if there is any, with the same text on every rank.
        """
        self.publish(key, complaint)
        complaints = self.collect(key, ranks)
        failures = [f"rank {rank}: {text}" for rank, text in complaints.items() if text]
        if failures:
            raise error("; ".join(failures))

    def _key(self, key: str) -> str:
        return f"pool/{self._name}/{key}"


PROC = Path("/proc")
BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
START_TIME_FIELD = 19
"""Index of the start time in /proc/PID/stat, counted after the process name."""


@dataclass(frozen=True)
class MemoryHandle:
    """A handle of the memory, which is valid on the same machine only.

    Attributes:
        boot_id: identity of the running kernel.
        process: process id of the owner, in the owner's namespace.
        start_time: start of that process, in clock ticks since boot, since ids are reused.
        descriptor: the owner's file descriptor.
        token: token of the memory, in hexadecimal.
    """

    boot_id: str
    process: int
    start_time: int
    descriptor: int
    token: str

    @classmethod
    def of(cls, descriptor: int, token: bytes) -> Self:
        """Builds the handle of this process's memory."""
        process = os.getpid()
        return cls(boot_id(), process, start_time(process), descriptor, token.hex())

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """From JSON."""
        return cls(**json.loads(text))

    def header(self, layout: PoolLayout) -> PoolHeader:
        """Returns the header that the memory has to begin with."""
        return PoolHeader.of(layout, bytes.fromhex(self.token))

    def open(self, layout: PoolLayout, proc: Path = PROC) -> int:
        """Opens the memory through /proc; returns a checked descriptor.

        Raises:
            PoolMismatch: another machine, another process namespace, another process with the
                same id, no permission, or other memory.
        """
        if self.boot_id != boot_id():
            raise PoolMismatch("it is on another machine")
        try:
            if start_time(self.process, proc) != self.start_time:
                raise PoolMismatch(f"process {self.process} is another one here")
            path = proc / str(self.process) / "fd" / str(self.descriptor)
            # Checked before it is opened: opening a device or a pipe may have an effect.
            if not os.readlink(path).startswith(f"/memfd:{shared_memory.MEMORY_NAME}"):
                raise PoolMismatch(f"descriptor {self.descriptor} is something else")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise PoolMismatch(f"cannot open it: {error}") from error
        return self.verify(descriptor, layout)

    def verify(self, descriptor: int, layout: PoolLayout) -> int:
        """Returns `descriptor` if it is the memory of this handle; otherwise closes it.

        Raises `PoolMismatch`.
        """
        try:
            self.header(layout).check(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def boot_id() -> str:
    """Returns the id of the running kernel, which differs by machine and boot."""
    return BOOT_ID_PATH.read_text(encoding="ascii").strip()


def start_time(process: int, proc: Path = PROC) -> int:
    """Returns the start time of a process. Raises `OSError`, `ValueError`."""
    text = (proc / str(process) / "stat").read_text(encoding="utf-8", errors="replace")
    # The name is in parentheses and may contain any character, also ")".
    fields = text.rpartition(")")[2].split()
    if len(fields) <= START_TIME_FIELD:
        raise ValueError(f"no start time of process {process}")
    return int(fields[START_TIME_FIELD])


POLL_SECONDS = 0.05
"""Seconds between two checks whether to stop."""
CLIENT_TIMEOUT = 5.0
"""Seconds that one client may take."""
SERVER_CLOSE_TIMEOUT = 2 * CLIENT_TIMEOUT + POLL_SECONDS
"""Seconds that closing may take: a client may connect at the last moment, and be slow."""
DESCRIPTOR_STRUCT = struct.Struct("i")
CREDENTIALS_STRUCT = struct.Struct("3i")


class FdServer:
    """Serves a file descriptor on an abstract Unix socket, which ends with the process.

    Sends the descriptor to clients of the same user that know the token; ignores all others.
    """

    def __init__(self, descriptor: int, token: bytes) -> None:
        self._descriptor = descriptor
        self._token = token
        self._failure: BaseException | None = None
        self._closing = threading.Event()
        self.address = f"equipoise-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen()
        self._socket.settimeout(POLL_SECONDS)
        self._thread = threading.Thread(target=self._serve, name=self.address, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving. Raises `ExpertPoolError` if it failed meanwhile."""
        self._closing.set()
        self._thread.join(SERVER_CLOSE_TIMEOUT)
        self._socket.close()
        if self._thread.is_alive():
            raise ExpertPoolError(
                f"the descriptor server did not stop within {SERVER_CLOSE_TIMEOUT:g} s"
            )
        if self._failure is not None:
            raise ExpertPoolError(
                f"the descriptor server failed: {self._failure}"
            ) from self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    client, _ = self._socket.accept()
                except TimeoutError:
                    continue
                with client:
                    self._receive(client)
        except BaseException as error:
            self._failure = error

    def _receive(self, client: socket.socket) -> None:
        """Serves one client; a failure of the client is ignored."""
        try:
            client.settimeout(CLIENT_TIMEOUT)
            received = _read(client, TOKEN_BYTES)
            if same_user(client) and secrets.compare_digest(received, self._token):
                socket.send_fds(client, [b"!"], [self._descriptor])
        except OSError:
            return


def receive_fd(address: str, handle: MemoryHandle, layout: PoolLayout) -> int:
    """Receives the descriptor from the server at `address`. Raises `PoolMismatch`."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as server:
            server.settimeout(CLIENT_TIMEOUT)
            server.connect(f"\0{address}")
            if not same_user(server):
                raise PoolMismatch("the descriptor server belongs to another user")
            server.sendall(bytes.fromhex(handle.token))
            # Not by `recv_fds`, which in Python 3.11 drops the flag and lets children inherit it.
            space = socket.CMSG_LEN(DESCRIPTOR_STRUCT.size)
            _, extra, _, _ = server.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise PoolMismatch(f"cannot connect to the descriptor server: {error}") from error
    if not extra:
        raise PoolMismatch(
            "the descriptor server closed the connection without sending a descriptor"
        )
    return handle.verify(DESCRIPTOR_STRUCT.unpack(extra[0][2])[0], layout)


def same_user(peer: socket.socket) -> bool:
    """Returns whether the kernel reports the same user at the other end."""
    packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS_STRUCT.size)
    _, user, _ = CREDENTIALS_STRUCT.unpack(packed)
    return bool(user == os.geteuid())


def _read(peer: socket.socket, nbytes: int) -> bytes:
    """Reads `nbytes`, or fewer if no more arrive in time."""
    received, expiry = b"", time.monotonic() + CLIENT_TIMEOUT
    while len(received) < nbytes and time.monotonic() < expiry:
        part = peer.recv(nbytes - len(received))
        if not part:
            break
        received += part
    return received


Ranks = tuple[int, ...]


@dataclass(frozen=True)
class SharedDescriptor:
    """The ranks that share a memory, lowest first, and this rank's descriptor of it."""

    ranks: Ranks
    descriptor: int


def join_shared_memory(coordinator: NodeCoordinator, layout: PoolLayout) -> SharedDescriptor:
    """Creates or joins memory for `layout`, shared with as many of the ranks as can.

    Raises:
        HostMemoryExhausted: the machine has too little; on every rank that would share it.
        ExpertPoolError: the owner could not create it.
        ControlError: a rank did not answer in time.
    """
    ranks, number = coordinator.ranks, 0
    while True:
        if coordinator.rank == ranks[0]:
            return _share_memory(coordinator, layout, ranks, number)
        outcome = _join_owner(coordinator, layout, ranks, number)
        if isinstance(outcome, SharedDescriptor):
            return outcome
        # A number of its own for every round: a rank publishes once per key.
        ranks, number = outcome, number + 1


def _share_memory(
    coordinator: NodeCoordinator, layout: PoolLayout, ranks: Ranks, number: int
) -> SharedDescriptor:
    descriptor, token = _create_memory(coordinator, layout, number)
    try:
        coordinator.publish(
            f"offer{number}", {"offer": MemoryHandle.of(descriptor, token).encode()}
        )
        refused = _ranks_that_failed(coordinator, f"answer{number}", ranks[1:])
        if refused:
            with FdServer(descriptor, token) as server:
                coordinator.publish(f"fd_server{number}", server.address)
                refused = _ranks_that_failed(coordinator, f"knocked{number}", refused)
    except BaseException:
        os.close(descriptor)
        raise
    return SharedDescriptor(_exclude_ranks(ranks, refused), descriptor)


def _create_memory(
    coordinator: NodeCoordinator, layout: PoolLayout, number: int
) -> tuple[int, bytes]:
    """Creates the memory with a token; publishes a failure, since other ranks wait."""
    token = secrets.token_bytes(TOKEN_BYTES)
    try:
        limit = available_memory()
        if layout.nbytes > limit.free:
            raise HostMemoryExhausted(layout.nbytes, limit.free, limit.set_by)
        descriptor = shared_memory.create(layout.nbytes)
        try:
            shared_memory.reserve(descriptor, 0, layout.experts_offset)
            PoolHeader.of(layout, token).write(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
    except HostMemoryExhausted as error:
        coordinator.publish(
            f"offer{number}", {"available_memory": [error.required, error.free, error.limit]}
        )
        raise
    except (ExpertPoolError, OSError, ValueError) as error:
        coordinator.publish(f"offer{number}", {"error": f"rank {coordinator.rank}: {error}"})
        raise ExpertPoolError(str(error)) from error
    return descriptor, token


def _join_owner(
    coordinator: NodeCoordinator, layout: PoolLayout, ranks: Ranks, number: int
) -> SharedDescriptor | Ranks:
    """Returns the shared memory, or the ranks, including this one, that cannot get it."""
    owner = ranks[:1]
    handle = _parse_handle(coordinator.collect(f"offer{number}", owner)[owner[0]])
    descriptor, reason = _open_or_reason(lambda: handle.open(layout))
    try:
        coordinator.publish(f"answer{number}", reason)
        refused = _ranks_that_failed(coordinator, f"answer{number}", ranks[1:])
        if coordinator.rank in refused:
            address = str(coordinator.collect(f"fd_server{number}", owner)[owner[0]])
            descriptor, reason = _open_or_reason(
                lambda: _receive_from_owner(address, handle, layout)
            )
            coordinator.publish(f"knocked{number}", reason)
        refused = _ranks_that_failed(coordinator, f"knocked{number}", refused)
    except BaseException:
        if descriptor is not None:
            os.close(descriptor)
        raise
    if descriptor is None:
        return refused
    return SharedDescriptor(_exclude_ranks(ranks, refused), descriptor)


def _parse_handle(message: dict[str, Any]) -> MemoryHandle:
    """Returns the owner's handle. Raises the owner's error."""
    if "available_memory" in message:
        raise HostMemoryExhausted(*message["available_memory"])
    if "error" in message:
        raise ExpertPoolError(message["error"])
    return MemoryHandle.decode(message["offer"])


def _receive_from_owner(address: str, handle: MemoryHandle, layout: PoolLayout) -> int:
    if handle.boot_id != boot_id():
        raise PoolMismatch("it is on another machine")
    return receive_fd(address, handle, layout)


def _open_or_reason(open_descriptor: Callable[[], int]) -> tuple[int | None, str]:
    """Returns a descriptor and "", or None and the reason."""
    try:
        return open_descriptor(), ""
    except PoolMismatch as error:
        return None, str(error)


def _ranks_that_failed(coordinator: NodeCoordinator, key: str, ranks: Ranks) -> Ranks:
    """Returns the ranks that published a reason why they do not have it."""
    return tuple(rank for rank, reason in coordinator.collect(key, ranks).items() if reason)


def _exclude_ranks(ranks: Ranks, excluded_ranks: Ranks) -> Ranks:
    return tuple(rank for rank in ranks if rank not in excluded_ranks)
