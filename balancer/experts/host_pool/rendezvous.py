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
from equipoise.balancer.experts.host_pool.shared_memory import TOKEN, PoolHeader, available_memory
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import ExpertPoolError, ForeignMemory, NoRoom


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

    def left(self) -> float:
        """Seconds until the deadline, not below 0."""
        return max(0.0, self._expiry - time.monotonic())

    def renew(self, timeout: float) -> None:
        """Another stage begins, with a deadline of its own."""
        self._expiry = time.monotonic() + timeout

    def check_same(self, mine: Values) -> None:
        """See that all have the same of the pool. Raises `AgreementLost`."""
        subject, question = f"pool {self._name!r}", self._question("same")
        check_same_on_all_ranks(self._control, question, self.left(), {subject: mine}, self.ranks)

    def publish(self, question: str, answer: Any) -> None:
        """This rank's answer, in JSON; once per question."""
        self._control.cast(self._question(question), json.dumps(answer).encode())

    def collect(self, question: str, ranks: Sequence[int]) -> dict[int, Any]:
        """The answers of `ranks`. Raises as `ControlPlane.collect` does."""
        if not ranks:
            return {}
        ballots = self._control.collect(self._question(question), self.left(), ranks)
        return {rank: json.loads(b) for rank, b in zip(ranks, ballots, strict=True)}

    def raise_if_any(
        self, question: str, complaint: str, ranks: Sequence[int], error: type[ExpertPoolError]
    ) -> None:
        """Say this rank's `complaint`, "" for none, and hear those of `ranks`.

        Raises `error` if anybody complained, with the same text on every rank.
        """
        self.publish(question, complaint)
        heard = self.collect(question, ranks)
        told = [f"rank {rank}: {text}" for rank, text in heard.items() if text]
        if told:
            raise error("; ".join(told))

    def _question(self, question: str) -> str:
        return f"pool/{self._name}/{question}"


PROC = Path("/proc")
BOOT = Path("/proc/sys/kernel/random/boot_id")
STARTED = 19
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
            raise ForeignMemory("it is on another machine")
        try:
            if start_time(self.process, proc) != self.start_time:
                raise ForeignMemory(f"process {self.process} is another one here")
            path = proc / str(self.process) / "fd" / str(self.descriptor)
            # Looked at before it is opened: to open what is no memory may have an effect.
            if not os.readlink(path).startswith(f"/memfd:{shared_memory.LABEL}"):
                raise ForeignMemory(f"descriptor {self.descriptor} is something else")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise ForeignMemory(f"cannot open it: {error}") from error
        return self.checked(descriptor, layout)

    def checked(self, descriptor: int, layout: PoolLayout) -> int:
        """`descriptor`, if it is the memory that was offered; otherwise it is closed.

        Raises `ForeignMemory`.
        """
        try:
            self.header(layout).check(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def boot_id() -> str:
    """Identity of the running kernel: another one after every start, and on every machine."""
    return BOOT.read_text(encoding="ascii").strip()


def start_time(process: int, proc: Path = PROC) -> int:
    """When it started. Raises `OSError`, `ValueError`."""
    text = (proc / str(process) / "stat").read_text(encoding="utf-8", errors="replace")
    # The name stands in parentheses and may contain any character.
    fields = text.rpartition(")")[2].split()
    if len(fields) <= STARTED:
        raise ValueError(f"no start time of process {process}")
    return int(fields[STARTED])


SLICE = 0.05
"""Seconds between two looks at whether to go on."""
PATIENCE = 5.0
"""Seconds that one visitor may take."""
ENDING = 2 * PATIENCE + SLICE
"""Seconds that closing may take: a visitor may connect at the last moment, and be slow."""
NUMBER = struct.Struct("i")
CREDENTIALS = struct.Struct("3i")


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
        self._socket.settimeout(SLICE)
        self._thread = threading.Thread(target=self._serve, name=self.address, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Shut it. Raises `ExpertPoolError` if it failed meanwhile."""
        self._closing.set()
        self._thread.join(ENDING)
        self._socket.close()
        if self._thread.is_alive():
            raise ExpertPoolError(f"the pool's door does not shut within {ENDING:g} s")
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
            visitor.settimeout(PATIENCE)
            said = _read(visitor, TOKEN)
            if same_user(visitor) and secrets.compare_digest(said, self._token):
                socket.send_fds(visitor, [b"!"], [self._descriptor])
        except OSError:
            return


def receive_fd(address: str, offer: MemoryHandle, layout: PoolLayout) -> int:
    """The descriptor behind the door at `address`, checked. Raises `ForeignMemory`."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as door:
            door.settimeout(PATIENCE)
            door.connect(f"\0{address}")
            if not same_user(door):
                raise ForeignMemory("another user opened the door")
            door.sendall(bytes.fromhex(offer.token))
            # Not by `recv_fds`, which in Python 3.11 drops the flag and lets children inherit it.
            space = socket.CMSG_LEN(NUMBER.size)
            _, extra, _, _ = door.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise ForeignMemory(f"no way to its door: {error}") from error
    if not extra:
        raise ForeignMemory("its door was shut")
    return offer.checked(NUMBER.unpack(extra[0][2])[0], layout)


def same_user(peer: socket.socket) -> bool:
    """Whether the kernel says that the other end runs as this user."""
    packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(packed)
    return bool(user == os.geteuid())


def _read(peer: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or fewer if no more come."""
    said, expiry = b"", time.monotonic() + PATIENCE
    while len(said) < nbytes and time.monotonic() < expiry:
        part = peer.recv(nbytes - len(said))
        if not part:
            break
        said += part
    return said


Ranks = tuple[int, ...]


@dataclass(frozen=True)
class SharedDescriptor:
    """Ranks that hold one memory, lowest first, and this rank's descriptor of it."""

    ranks: Ranks
    descriptor: int


def join_shared_memory(council: NodeCoordinator, layout: PoolLayout) -> SharedDescriptor:
    """Memory for `layout`, shared with as many of the council's ranks as can.

    Raises:
        NoRoom: the machine has not so much; on every rank that would have shared it.
        ExpertPoolError: the owner could not make it.
        ControlError: a rank did not answer in time.
    """
    left, number = council.ranks, 0
    while True:
        if council.rank == left[0]:
            return _lead(council, layout, left, number)
        found = _join(council, layout, left, number)
        if isinstance(found, SharedDescriptor):
            return found
        left, number = found, number + 1


def _lead(
    council: NodeCoordinator, layout: PoolLayout, ranks: Ranks, number: int
) -> SharedDescriptor:
    descriptor, token = _make(council, layout, number)
    try:
        council.publish(f"offer{number}", {"offer": MemoryHandle.of(descriptor, token).encode()})
        refused = _refused(council, f"answer{number}", ranks[1:])
        if refused:
            with FdServer(descriptor, token) as door:
                council.publish(f"door{number}", door.address)
                refused = _refused(council, f"knocked{number}", refused)
    except BaseException:
        os.close(descriptor)
        raise
    return SharedDescriptor(_without(ranks, refused), descriptor)


def _make(council: NodeCoordinator, layout: PoolLayout, number: int) -> tuple[int, bytes]:
    """The memory, and the token of this instance in it. What fails is told to those who wait."""
    token = secrets.token_bytes(TOKEN)
    try:
        found = available_memory()
        if layout.total > found.free:
            raise NoRoom(layout.total, found.free, found.whose)
        descriptor = shared_memory.create(layout.total)
        try:
            shared_memory.reserve(descriptor, 0, layout.first)
            PoolHeader.of(layout, token).write(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
    except NoRoom as error:
        council.publish(
            f"offer{number}", {"available_memory": [error.wanted, error.free, error.whose]}
        )
        raise
    except (ExpertPoolError, OSError, ValueError) as error:
        council.publish(f"offer{number}", {"error": f"rank {council.rank}: {error}"})
        raise ExpertPoolError(str(error)) from error
    return descriptor, token


def _join(
    council: NodeCoordinator, layout: PoolLayout, ranks: Ranks, number: int
) -> SharedDescriptor | Ranks:
    """The memory, or the ranks that stay apart, of which this is one."""
    owner = ranks[:1]
    offer = _offered(council.collect(f"offer{number}", owner)[owner[0]])
    descriptor, reason = _try(lambda: offer.open(layout))
    try:
        council.publish(f"answer{number}", reason)
        refused = _refused(council, f"answer{number}", ranks[1:])
        if council.rank in refused:
            address = str(council.collect(f"door{number}", owner)[owner[0]])
            descriptor, reason = _try(lambda: _knock(address, offer, layout))
            council.publish(f"knocked{number}", reason)
        refused = _refused(council, f"knocked{number}", refused)
    except BaseException:
        if descriptor is not None:
            os.close(descriptor)
        raise
    if descriptor is None:
        return refused
    return SharedDescriptor(_without(ranks, refused), descriptor)


def _offered(told: dict[str, Any]) -> MemoryHandle:
    """What the owner offers. Raises what it failed with."""
    if "available_memory" in told:
        raise NoRoom(*told["available_memory"])
    if "error" in told:
        raise ExpertPoolError(told["error"])
    return MemoryHandle.decode(told["offer"])


def _knock(address: str, offer: MemoryHandle, layout: PoolLayout) -> int:
    if offer.boot_id != boot_id():
        raise ForeignMemory("it is on another machine")
    return receive_fd(address, offer, layout)


def _try(opening: Callable[[], int]) -> tuple[int | None, str]:
    """A descriptor and "", or none and why."""
    try:
        return opening(), ""
    except ForeignMemory as error:
        return None, str(error)


def _refused(council: NodeCoordinator, question: str, ranks: Ranks) -> Ranks:
    """Which of `ranks` say why they have it not."""
    return tuple(rank for rank, reason in council.collect(question, ranks).items() if reason)


def _without(ranks: Ranks, others: Ranks) -> Ranks:
    return tuple(rank for rank in ranks if rank not in others)
