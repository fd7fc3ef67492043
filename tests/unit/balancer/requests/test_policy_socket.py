"""The socket of a shared policy: who may connect, and what becomes of peers that misbehave."""

import asyncio
import socket
import stat
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
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


def in_loop(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(bounded())


@contextmanager
def connected(served: PolicyBehindSocket) -> Iterator[socket.socket]:
    """A front end that does as the test says, after its `hello`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(str(served.socket.path))
        peer.send(b'["hello",2,null]\n')
        yield peer


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_socket_is_for_its_user_only_and_goes_with_the_server(folder: Path) -> None:
    async def work() -> None:
        served = PolicyBehindSocket()
        modes = [stat.S_IMODE(one.stat().st_mode) for one in (served.socket.path.parent,)]
        assert modes == [0o700]
        assert stat.S_IMODE(served.socket.path.stat().st_mode) == 0o600
        with pytest.raises(PolicyError, match="another process serves"):
            PolicySocket(served.server, "test")
        served.close()
        assert list(folder.iterdir()) == []

    in_loop(work)


def test_folder_that_others_may_enter_is_refused() -> None:
    path = socket_path("test")
    path.parent.mkdir(mode=0o755)
    path.parent.chmod(0o755)

    async def work() -> None:
        with pytest.raises(PolicyError, match="is not this user's alone"):
            PolicyBehindSocket()
        loop = asyncio.get_running_loop()
        policy = RemotePolicy(loop, lambda lost: dispatcher.fail_policy(lost))
        failures: list[Exception] = []

        def failed(error: Exception) -> FailureAction:
            failures.append(error)
            return FailureAction.STOP_POLICY

        dispatcher = RequestDispatcher(policy, 1, loop, failed)
        connect_by_socket("test", policy, dispatcher)
        await until(lambda: failures)
        assert "is not this user's alone" in str(failures[0])

    in_loop(work)


def test_path_that_is_too_long_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 90)
    with pytest.raises(PolicyError, match="set TMPDIR to a shorter folder"):
        socket_path("test")


def test_names_and_users_have_folders_of_their_own() -> None:
    assert socket_path("a") != socket_path("b")
    assert socket_path("a") == socket_path("a")


@pytest.mark.parametrize("line", [b"{}\n", b"no json\n", b'["abort"]\n', b"[" * 5000 + b"\n"])
def test_server_drops_peer_that_sends_malformed_line(line: bytes) -> None:
    async def work() -> None:
        served = PolicyBehindSocket()
        with connected(served) as peer:
            await until(lambda: served.server.sessions)
            peer.send(line)
            await until(lambda: not served.server.sessions)
        served.close()
        assert served.errors == []

    in_loop(work)


def test_server_drops_peer_whose_line_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_socket, "MAX_LINE_BYTES", 1000)

    async def work() -> None:
        served = PolicyBehindSocket()
        with connected(served) as peer:
            await until(lambda: served.server.sessions)
            peer.send(b"[" + b" " * 2000)
            await until(lambda: not served.server.sessions)
        served.close()
        assert served.errors == []

    in_loop(work)


def test_server_drops_peer_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_socket, "MAX_UNSENT_BYTES", 1000)

    async def work() -> None:
        served = PolicyBehindSocket()
        with connected(served):
            await until(lambda: served.server.sessions)
            [session] = served.server.sessions
            session.receive(["arrive", 0, 5, None, None, None])
            # More than the kernel takes, and a little more.
            for serial in range(1, 20_000):
                session.receive(["arrive", serial, 5, None, None, None])
                session.receive(["abort", serial])
                session._answer()
            await until(lambda: not served.server.sessions)
        assert not served.policy.knows((0, 0))
        served.close()

    in_loop(work)


def test_front_end_gives_up_while_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_socket, "MAX_UNSENT_BYTES", 1000)

    async def work() -> None:
        loop = asyncio.get_running_loop()
        policy = RemotePolicy(loop, lambda lost: dispatcher.fail_policy(lost))
        failures: list[Exception] = []

        def failed(error: Exception) -> FailureAction:
            failures.append(error)
            return FailureAction.STOP_POLICY

        dispatcher = RequestDispatcher(policy, 1, loop, failed)
        connect_by_socket("test", policy, dispatcher)
        for name in range(100):
            dispatcher.submit(DispatchedRequest(name, 5))
        await until(lambda: failures)
        assert len(failures) == 1
        assert dispatcher.requests == ()

    in_loop(work)


def test_front_ends_beyond_the_backlog_connect_when_there_is_room() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        path = socket_path("test")
        path.parent.mkdir(mode=0o700)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as full:
            full.bind(str(path))
            full.listen(0)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.connect(str(path))
                policy = RemotePolicy(loop, lambda lost: dispatcher.fail_policy(lost))
                failures: list[Exception] = []

                def failed(error: Exception) -> FailureAction:
                    failures.append(error)
                    return FailureAction.STOP_POLICY

                dispatcher = RequestDispatcher(policy, 1, loop, failed)
                connect_by_socket("test", policy, dispatcher)
                await asyncio.sleep(2 * policy_socket.RETRY_SECONDS)
                full.accept()[0].close()
                full.setblocking(False)
                accepted, _ = await loop.sock_accept(full)
                first = await loop.sock_recv(accepted, 1000)
                assert first.startswith(b'["hello",2,null]\n')
                accepted.close()
                await until(lambda: failures)
                assert "the connection has ended" in str(failures[0])

    in_loop(work)
