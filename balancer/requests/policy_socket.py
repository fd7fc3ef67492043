"""Carries the messages of a shared policy between processes, as JSON lines.

On one machine over a Unix socket, to which only processes of one user can connect: it is in a
folder that nobody else may enter. Between machines over TCP, to which all can that reach the port.
"""

import asyncio
import json
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import cast

from equipoise.balancer.requests.dispatcher import RequestDispatcher
from equipoise.balancer.requests.policy_messages import MalformedMessage, Message
from equipoise.balancer.requests.policy_server import PolicyServer
from equipoise.balancer.requests.remote_policy import RemotePolicy
from equipoise.hal.errors import PolicyError

LOG = logging.getLogger(__name__)
MAX_LINE_BYTES = 1 << 22
"""Longest message: a step of 100,000 requests has half of it."""
MAX_UNSENT_BYTES = 1 << 22
"""What a peer may leave unread before it is dropped; a minute and more of a busy front end."""
MAX_PATH_BYTES = 107
"""Of the path of a Unix socket, in Linux and, with four more for the end, elsewhere."""
DIGEST_DIGITS = 14
"""With these a path is no longer than those of vLLM's own sockets in the same folder."""
ENDED = "the connection has ended"
RETRY_SECONDS = 0.1
"""Between two attempts to connect."""
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A peer that is cut off is noticed after 30 seconds, though nothing is sent to it."""


def socket_path(name: str) -> Path:
    """Return where the socket of this name is, whatever characters the name has.

    Raises `PolicyError` where the system has no socket of so long a path.
    """
    digest = sha256(f"{os.geteuid()} {name}".encode()).hexdigest()[:DIGEST_DIGITS]
    path = Path(tempfile.gettempdir()) / f"equipoise-policy-{digest}" / "s"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise PolicyError(
            f"{path} is too long for a socket: set TMPDIR to a shorter folder, the same for all "
            "front ends"
        )
    return path


class JsonLinesLink(asyncio.Protocol):
    """A link over a stream; what is sent before it is connected is sent then.

    Attributes:
        receive: called with each message.
        closed: called once, when the stream has ended.
        fault: for which this end has dropped the peer; empty: it has not.
    """

    def __init__(self, receive: Callable[[Message], object], closed: Callable[[], object]) -> None:
        self.receive, self.closed = receive, closed
        self.fault = ""
        self.connecting: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsent, self._unread = bytearray(), bytearray()
        self._open = True

    @property
    def end(self) -> str:
        """Why the stream has ended."""
        return f"the connection is dropped: {self.fault}" if self.fault else ENDED

    @property
    def is_open(self) -> bool:
        """Whether neither end has closed it."""
        return self._open

    def send(self, message: Message) -> None:
        """As `Link`; a peer that does not read is dropped."""
        if not self._open or self._loop.is_closed():
            return
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if self._transport is None:
            self._unsent += line
            unsent = len(self._unsent)
        else:
            self._transport.write(line)
            unsent = self._transport.get_write_buffer_size()
        if unsent > MAX_UNSENT_BYTES:
            self._drop(f"{unsent} bytes were not read")

    def close(self) -> None:
        """As `Link`."""
        self._open = False
        if self.connecting is not None:
            self.connecting.cancel()
        if self._transport is not None and not self._loop.is_closed():
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what waits."""
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        _keep_alive(transport.get_extra_info("socket"))
        if self._unsent:
            self._transport.write(bytes(self._unsent))
            self._unsent.clear()
        if not self._open:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Hand over the messages that are complete."""
        self._unread += data
        *lines, rest = self._unread.split(b"\n")
        self._unread = rest
        try:
            for line in lines:
                message = _message(line)
                self.receive(message)
        except (MalformedMessage, ValueError, RecursionError) as error:
            self._drop(str(error))
        if len(rest) > MAX_LINE_BYTES:
            self._drop(f"a message has more than {MAX_LINE_BYTES} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        """Say so; `close` of this end comes here, too."""
        self._open = False
        self.closed()

    def _drop(self, why: str) -> None:
        self.fault = why
        self._open = False
        if self._transport is not None:
            self._transport.abort()
        else:
            self._loop.call_soon(self.closed)


class PolicySocket:
    """Serves a policy to other processes; to be created in an event loop.

    Args:
        server: the policy.
        name: that the other processes know, too, and no other deployment uses.

    Raises:
        PolicyError: the socket cannot be there; says what to do.
    """

    def __init__(self, server: PolicyServer, name: str) -> None:
        self._server, self._loop = server, asyncio.get_running_loop()
        self.path = socket_path(name)
        self._socket = _bind(self.path)
        # Whoever connects before it listens waits in the socket.
        self._listening = self._loop.create_task(
            self._loop.create_unix_server(self._accept, sock=self._socket)
        )

    def close(self) -> None:
        """Stop: front ends that are connected are told so by the policy's server."""
        self.path.unlink(missing_ok=True)
        try:
            self.path.parent.rmdir()
        except FileNotFoundError:
            pass  # somebody cleans up
        except OSError as error:
            LOG.warning("equipoise: %s is left: %s", self.path.parent, error)
        if self._loop.is_closed():
            return  # the process ends
        if self._listening.done() and not self._listening.exception():
            self._listening.result().close()
        self._listening.cancel()
        self._socket.close()

    def _accept(self) -> JsonLinesLink:
        return accept(self._server)


def accept(server: PolicyServer) -> JsonLinesLink:
    """Return the protocol of a connection that somebody has made to the server of a policy."""
    link = JsonLinesLink(lambda message: None, lambda: None)
    session = server.connect(link)

    def closed() -> None:
        if link.fault:
            LOG.warning("equipoise: a front end of a shared policy is dropped: %s", link.fault)
        session.disconnect()

    link.receive, link.closed = session.receive, closed
    return link


def connect_by_socket(name: str, policy: RemotePolicy, dispatcher: RequestDispatcher) -> None:
    """Connect a front end to the policy that another process serves, or will serve soon.

    It returns at once, and has to be called in an event loop. Requests wait in the dispatcher until
    the server answers; if it does not, the policy is lost.

    Raises `PolicyError` where there cannot be a socket.
    """
    path = socket_path(name)
    link = JsonLinesLink(policy.receive, lambda: policy.lose(link.end))
    policy.connect(link, dispatcher)
    dispatcher.replace_policy(policy)
    link.connecting = asyncio.get_running_loop().create_task(_connect(path, link, policy))


async def _connect(path: Path, link: JsonLinesLink, policy: RemotePolicy) -> None:
    loop = asyncio.get_running_loop()
    while link.is_open:  # closed by the policy, once nobody has answered for too long
        try:
            if path.parent.exists():
                _check_private(path.parent)
            await loop.create_unix_connection(lambda: link, sock=_connected(path))
            return
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            await asyncio.sleep(RETRY_SECONDS)
        except (OSError, PolicyError) as error:
            policy.lose(str(error))


def _connected(path: Path) -> socket.socket:
    """Return a socket that is connected.

    Raises `BlockingIOError` where too many wait to be accepted: there a Unix socket does not
    connect later, though asyncio would wait for it, and then take it for connected.
    """
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connecting.setblocking(False)
        connecting.connect(str(path))
    except OSError:
        connecting.close()
        raise
    return connecting


def _message(line: bytearray) -> Message:
    """Raises `MalformedMessage` for what is none, such as the first line of another protocol."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, list):
        raise MalformedMessage(f"not a message of a shared policy: {bytes(line[:40])!r}")
    return message


def _keep_alive(connection: socket.socket) -> None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _bind(path: Path) -> socket.socket:
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_private(folder)
        if _answers(path):
            raise PolicyError(f"another process serves {path} already")
        path.unlink(missing_ok=True)  # of a process that was killed
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound.bind(str(path))
        path.chmod(0o600)
        bound.listen()
        bound.setblocking(False)
    except OSError as error:
        raise PolicyError(
            f"no socket can be at {path}: {error}: set TMPDIR to a folder of yours"
        ) from error
    return bound


def _check_private(folder: Path) -> None:
    status = folder.lstat()
    own = status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode)
    if not own or status.st_mode & 0o077:
        raise PolicyError(f"{folder} is not this user's alone: remove it, or set another TMPDIR")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
