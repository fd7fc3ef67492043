"""How ranks that may be on one machine come to share one memory, or find that they cannot.

The lowest rank makes the memory and publishes a handle. The others open it through /proc; where
that is not permitted, they ask the owner for the descriptor over a socket, which serves ranks of
the same user only. Those that cannot get it either begin again among themselves: two containers
under one name of a node end up with a pool each. Every round has at least one rank fewer.
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
    """Questions of one pool on the control plane, within one deadline.

    Args:
        control: the control plane.
        ranks: who takes part, this rank included; the same on each of them.
        name: of the pool; no two pools of one control plane share one.
        timeout: seconds until every wait ends, also later ones, until `renew`.
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
        """Seconds until the deadline, not below 0."""
        return max(0.0, self._expiry - time.monotonic())

    def renew_deadline(self, timeout: float) -> None:
        """Another stage begins, with a deadline of its own."""
        self._expiry = time.monotonic() + timeout

    def check_same(self, mine: Values) -> None:
        """See that all have the same of the pool. Raises `VoteOutcomeUnknown`."""
        subject, key = f"pool {self._name!r}", self._key("same")
        check_same_on_all_ranks(self._control, key, self.time_left(), {subject: mine}, self.ranks)

    def publish(self, key: str, answer: Any) -> None:
        """This rank's answer, in JSON; once per question."""
        self._control.cast(self._key(key), json.dumps(answer).encode())

    def collect(self, key: str, ranks: Sequence[int]) -> dict[int, Any]:
        """The answers of `ranks`. Raises as `ControlPlane.collect` does."""
        if not ranks:
            return {}
        ballots = self._control.collect(self._key(key), self.time_left(), ranks)
        return {rank: json.loads(b) for rank, b in zip(ranks, ballots, strict=True)}

    def raise_if_any(
        self, key: str, complaint: str, ranks: Sequence[int], error: type[ExpertPoolError]
    ) -> None:
        """Say this rank's `complaint`, "" for none, and hear those of `ranks`.

        Raises `error` if anybody complained, with the same text on every rank.
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
"""Place of a process's start time in /proc/PID/stat, counted from behind its name."""


@dataclass(frozen=True)
class MemoryHandle:
    """Where the memory is, in words that mean something on the same machine only.

    Attributes:
        boot_id: identity of the running kernel.
        process: its owner, as the owner sees it.
        start_time: when that process started, in clock ticks since boot: numbers are used again.
        descriptor: the owner's.
        token: of the instance, in hexadecimal.
    """

    boot_id: str
    process: int
    start_time: int
    descriptor: int
    token: str

    @classmethod
    def of(cls, descriptor: int, token: bytes) -> Self:
        """What this process has to tell of its own memory."""
        here = os.getpid()
        return cls(boot_id(), here, start_time(here), descriptor, token.hex())

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """From JSON."""
        return cls(**json.loads(text))

    def header(self, layout: PoolLayout) -> PoolHeader:
        """What the memory has to begin with."""
        return PoolHeader.of(layout, bytes.fromhex(self.token))

    def open(self, layout: PoolLayout, proc: Path = PROC) -> int:
        """A descriptor of one's own for the same memory, checked; no name is involved.

        Raises:
            ForeignMemory: it is another machine, another view of the processes, another process
                under the same number, or no permission; or what is there is not that pool.
        """
        if self.boot_id != boot_id():
            raise PoolMismatch("it is on another machine")
        try:
            if start_time(self.process, proc) != self.start_time:
                raise PoolMismatch(f"process {self.process} is another one here")
            path = proc / str(self.process) / "fd" / str(self.descriptor)
            # Looked at before it is opened: to open what is no memory may have an effect.
            if not os.readlink(path).startswith(f"/memfd:{shared_memory.MEMORY_NAME}"):
                raise PoolMismatch(f"descriptor {self.descriptor} is something else")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise PoolMismatch(f"cannot open it: {error}") from error
        return self.verify(descriptor, layout)

    def verify(self, descriptor: int, layout: PoolLayout) -> int:
        """`descriptor`, if it is the memory that was offered; otherwise it is closed.

        Raises `PoolMismatch`.
        """
        try:
            self.header(layout).check(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def boot_id() -> str:
    """Identity of the running kernel: another one after every start, and on every machine."""
    return BOOT_ID_PATH.read_text(encoding="ascii").strip()


def start_time(process: int, proc: Path = PROC) -> int:
    """When it started. Raises `OSError`, `ValueError`."""
    text = (proc / str(process) / "stat").read_text(encoding="utf-8", errors="replace")
    # The name stands in parentheses and may contain any character.
    fields = text.rpartition(")")[2].split()
    if len(fields) <= START_TIME_FIELD:
        raise ValueError(f"no start time of process {process}")
    return int(fields[START_TIME_FIELD])


POLL_SECONDS = 0.05
"""Seconds between two looks at whether to go on."""
CLIENT_TIMEOUT = 5.0
"""Seconds that one visitor may take."""
SERVER_CLOSE_TIMEOUT = 2 * CLIENT_TIMEOUT + POLL_SECONDS
"""Seconds that closing may take: a visitor may connect at the last moment, and be slow."""
DESCRIPTOR_STRUCT = struct.Struct("i")
CREDENTIALS_STRUCT = struct.Struct("3i")


class FdServer:
    """Listens while it is open, at an address in no file system that ends with the process.

    Gives the descriptor to whoever is of the same user and says the token of the instance; sends
    everybody else away, and goes on.
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
        """Shut it. Raises `ExpertPoolError` if it failed meanwhile."""
        self._closing.set()
        self._thread.join(SERVER_CLOSE_TIMEOUT)
        self._socket.close()
        if self._thread.is_alive():
            raise ExpertPoolError(
                f"the pool's door does not shut within {SERVER_CLOSE_TIMEOUT:g} s"
            )
        if self._failure is not None:
            raise ExpertPoolError(f"the pool's door failed: {self._failure}") from self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    visitor, _ = self._socket.accept()
                except TimeoutError:
                    continue
                with visitor:
                    self._receive(visitor)
        except BaseException as error:
            self._failure = error

    def _receive(self, visitor: socket.socket) -> None:
        """A visitor that breaks off, or says something else, is its own business."""
        try:
            visitor.settimeout(CLIENT_TIMEOUT)
            received = _read(visitor, TOKEN_BYTES)
            if same_user(visitor) and secrets.compare_digest(received, self._token):
                socket.send_fds(visitor, [b"!"], [self._descriptor])
        except OSError:
            return


def receive_fd(address: str, handle: MemoryHandle, layout: PoolLayout) -> int:
    """The descriptor behind the door at `address`, checked. Raises `PoolMismatch`."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as server:
            server.settimeout(CLIENT_TIMEOUT)
            server.connect(f"\0{address}")
            if not same_user(server):
                raise PoolMismatch("another user opened the door")
            server.sendall(bytes.fromhex(handle.token))
            # Not by `recv_fds`, which in Python 3.11 drops the flag and lets children inherit it.
            space = socket.CMSG_LEN(DESCRIPTOR_STRUCT.size)
            _, extra, _, _ = server.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise PoolMismatch(f"no way to its door: {error}") from error
    if not extra:
        raise PoolMismatch("its door was shut")
    return handle.verify(DESCRIPTOR_STRUCT.unpack(extra[0][2])[0], layout)


def same_user(peer: socket.socket) -> bool:
    """Whether the kernel says that the other end runs as this user."""
    packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS_STRUCT.size)
    _, user, _ = CREDENTIALS_STRUCT.unpack(packed)
    return bool(user == os.geteuid())


def _read(peer: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or fewer if no more come."""
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
    """Ranks that hold one memory, lowest first, and this rank's descriptor of it."""

    ranks: Ranks
    descriptor: int


def join_shared_memory(coordinator: NodeCoordinator, layout: PoolLayout) -> SharedDescriptor:
    """Memory for `layout`, shared with as many of the council's ranks as can.

    Raises:
        NoRoom: the machine has not so much; on every rank that would have shared it.
        ExpertPoolError: the owner could not make it.
        ControlError: a rank did not answer in time.
    """
    left, number = coordinator.ranks, 0
    while True:
        if coordinator.rank == left[0]:
            return _share_memory(coordinator, layout, left, number)
        found = _join_owner(coordinator, layout, left, number)
        if isinstance(found, SharedDescriptor):
            return found
        left, number = found, number + 1


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
                coordinator.publish(f"door{number}", server.address)
                refused = _ranks_that_failed(coordinator, f"knocked{number}", refused)
    except BaseException:
        os.close(descriptor)
        raise
    return SharedDescriptor(_exclude_ranks(ranks, refused), descriptor)


def _create_memory(
    coordinator: NodeCoordinator, layout: PoolLayout, number: int
) -> tuple[int, bytes]:
    """The memory, and the token of this instance in it. What fails is told to those who wait."""
    token = secrets.token_bytes(TOKEN_BYTES)
    try:
        found = available_memory()
        if layout.nbytes > found.free:
            raise HostMemoryExhausted(layout.nbytes, found.free, found.set_by)
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
    """The memory, or the ranks that stay apart, of which this is one."""
    owner = ranks[:1]
    handle = _parse_handle(coordinator.collect(f"offer{number}", owner)[owner[0]])
    descriptor, reason = _open_or_reason(lambda: handle.open(layout))
    try:
        coordinator.publish(f"answer{number}", reason)
        refused = _ranks_that_failed(coordinator, f"answer{number}", ranks[1:])
        if coordinator.rank in refused:
            address = str(coordinator.collect(f"door{number}", owner)[owner[0]])
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
    """What the owner offers. Raises what it failed with."""
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
    """A descriptor and "", or none and why."""
    try:
        return open_descriptor(), ""
    except PoolMismatch as error:
        return None, str(error)


def _ranks_that_failed(coordinator: NodeCoordinator, key: str, ranks: Ranks) -> Ranks:
    """Which of `ranks` say why they have it not."""
    return tuple(rank for rank, reason in coordinator.collect(key, ranks).items() if reason)


def _exclude_ranks(ranks: Ranks, others: Ranks) -> Ranks:
    return tuple(rank for rank in ranks if rank not in others)
