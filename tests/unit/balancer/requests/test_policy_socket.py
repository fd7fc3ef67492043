"""The socket of a shared policy: who may connect, and what becomes of peers that misbehave."""

import asyncio
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.event_loop import in_event_loop
from helpers.fakes.late_binding_policy import LateBinding

from equipoise.balancer.requests import policy_socket
from equipoise.balancer.requests.dispatcher import (
    DispatchedRequest,
    FailureAction,
    RequestDispatcher,
)
from equipoise.balancer.requests.policy_server import PolicyServer
from equipoise.balancer.requests.policy_socket import PolicySocket, connect_by_socket, socket_path
from equipoise.balancer.requests.remote_policy import RemotePolicy
from equipoise.hal.errors import PolicyError


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Short enough for the path of a socket."""
    path = tmp_path_factory.mktemp("s")
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


class PolicyBehindSocket:
    """A policy behind its socket, in the event loop that runs."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.errors: list[Exception] = []
        self.policy = LateBinding([1])
        self.server = PolicyServer(self.policy, ["0"], loop, self.errors.append)
        self.socket = PolicySocket(self.server, "test")

    def close(self) -> None:
        self.server.close()
        self.socket.close()


@asynccontextmanager
async def serving() -> AsyncIterator[PolicyBehindSocket]:
    """It serves within; no event of its policy failed."""
    served = PolicyBehindSocket()
    try:
        yield served
    finally:
        served.close()
    assert served.errors == []


class FrontEnd:
    """Connects to the policy behind the socket; notes its failures.

    Attributes:
        failures: what ended its policy.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        policy = RemotePolicy(loop, lambda lost: self.dispatcher.fail_policy(lost))
        self.failures: list[Exception] = []
        self.dispatcher = RequestDispatcher(policy, 1, loop, self._failed)
        connect_by_socket("test", policy, self.dispatcher)

    def _failed(self, error: Exception) -> FailureAction:
        self.failures.append(error)
        return FailureAction.STOP_POLICY


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@asynccontextmanager
async def connected(served: PolicyBehindSocket) -> AsyncIterator[tuple[socket.socket, Any]]:
    """A front end that does as the test says, after its `hello`; and the server's session of it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(str(served.socket.path))
        peer.send(b'["hello",2,null]\n')
        await until(lambda: served.server.sessions)
        [session] = served.server.sessions
        yield peer, session


@in_event_loop
async def test_socket_is_for_its_user_only_and_goes_with_the_server(folder: Path) -> None:
    async with serving() as served:
        path = served.socket.path
        assert [stat.S_IMODE(one.stat().st_mode) for one in (path.parent, path)] == [0o700, 0o600]
        with pytest.raises(PolicyError, match="another process serves"):
            PolicySocket(served.server, "test")
    assert list(folder.iterdir()) == []


@in_event_loop
async def test_folder_that_others_may_enter_is_refused() -> None:
    path = socket_path("test")
    path.parent.mkdir(mode=0o755)
    path.parent.chmod(0o755)
    with pytest.raises(PolicyError, match="is not this user's alone"):
        PolicyBehindSocket()
    front_end = FrontEnd()
    await until(lambda: front_end.failures)
    assert "is not this user's alone" in str(front_end.failures[0])


def test_path_that_is_too_long_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 90)
    with pytest.raises(PolicyError, match="set TMPDIR to a shorter folder"):
        socket_path("test")


def test_names_and_users_have_folders_of_their_own() -> None:
    assert socket_path("a") != socket_path("b")
    assert socket_path("a") == socket_path("a")


@pytest.mark.parametrize("line", [b"{}\n", b"no json\n", b'["abort"]\n', b"[" * 5000 + b"\n"])
@in_event_loop
async def test_server_drops_peer_that_sends_malformed_line(line: bytes) -> None:
    async with serving() as served, connected(served) as (peer, _):
        peer.send(line)
        await until(lambda: not served.server.sessions)


@in_event_loop
async def test_server_drops_peer_whose_line_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_socket, "MAX_LINE_BYTES", 1000)
    async with serving() as served, connected(served) as (peer, _):
        peer.send(b"[" + b" " * 2000)
        await until(lambda: not served.server.sessions)


@in_event_loop
async def test_server_drops_peer_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_socket, "MAX_UNSENT_BYTES", 1000)
    async with serving() as served, connected(served) as (_, session):
        session.receive(["arrive", 0, 5, None, None, None])
        # More than the kernel takes, and a little more.
        for serial in range(1, 20_000):
            session.receive(["arrive", serial, 5, None, None, None])
            session.receive(["abort", serial])
            session._answer()
        await until(lambda: not served.server.sessions)
        assert not served.policy.knows((0, 0))


@in_event_loop
async def test_front_end_gives_up_while_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_socket, "MAX_UNSENT_BYTES", 1000)
    front_end = FrontEnd()
    for name in range(100):
        front_end.dispatcher.submit(DispatchedRequest(name, 5))
    await until(lambda: front_end.failures)
    assert len(front_end.failures) == 1
    assert front_end.dispatcher.requests == ()


@in_event_loop
async def test_front_ends_beyond_the_backlog_connect_when_there_is_room() -> None:
    loop = asyncio.get_running_loop()
    path = socket_path("test")
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as peer:
        full.bind(str(path))
        full.listen(0)
        peer.connect(str(path))
        front_end = FrontEnd()
        await asyncio.sleep(2 * policy_socket.RETRY_SECONDS)
        full.accept()[0].close()
        full.setblocking(False)
        accepted, _ = await loop.sock_accept(full)
        first = await loop.sock_recv(accepted, 1000)
        assert first.startswith(b'["hello",2,null]\n')
        accepted.close()
        await until(lambda: front_end.failures)
        assert "the connection has ended" in str(front_end.failures[0])
