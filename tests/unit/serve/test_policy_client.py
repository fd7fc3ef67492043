"""A front end of a policy server: who decides, whatever becomes of the server."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.event_loop import in_event_loop
from helpers.fakes.late_binding_policy import LateBinding
from helpers.processes.ports import free_port

from equipoise.balancer.requests.dispatcher import (
    BoundToWorker,
    DispatchedRequest,
    FailureAction,
    Queued,
    RequestDispatcher,
)
from equipoise.balancer.requests.policy import Capacity, RoutingPolicy
from equipoise.balancer.requests.policy_factory import PolicyFactory, routing_policy_factory
from equipoise.balancer.requests.remote_policy import RemotePolicy
from equipoise.serve import policy_client
from equipoise.serve.policy_client import Membership, PolicyClient
from equipoise.serve.policy_process import PolicyProcess, PolicyServerSettings
from equipoise.serve.settings import PolicyServerAddress

HELLO_ANSWER = b'["decision",1,[],[]]\n'
HTTP_ANSWER = b"HTTP/1.1 400 Bad Request\r\n\r\n"
FIT = routing_policy_factory("fit", {})
LATE_BINDING = cast(PolicyFactory, LateBinding)


class FrontEnd:
    """A dispatcher of one worker with one slot, and its client.

    Attributes:
        own: policies that were made here, the present one last.
        errors: events that a policy could not take.
    """

    def __init__(self, port: int, factory: PolicyFactory = LATE_BINDING) -> None:
        self.errors: list[Exception] = []
        self.own: list[Any] = []
        self._factory = factory
        loop = asyncio.get_running_loop()
        self.dispatcher = RequestDispatcher(self._make_policy(), 1, loop, self._skip)
        self.dispatcher.workers[0].name = "http://worker"
        self.dispatcher.workers[0].capacity = Capacity(slots=1)
        address = PolicyServerAddress("127.0.0.1", port)
        self.client = PolicyClient(self.dispatcher, address, self._make_policy)
        self.task = asyncio.create_task(self.client.run())

    def _make_policy(self) -> RoutingPolicy:
        self.own.append(self._factory([1], [None]))
        return self.own[-1]  # type: ignore[no-any-return]

    def _skip(self, error: Exception) -> FailureAction:
        self.errors.append(error)
        return FailureAction.SKIP_EVENT

    def submit(self, name: int) -> DispatchedRequest:
        request = DispatchedRequest(name, 5)
        self.dispatcher.submit(request)
        return request

    def make_token(self, request: DispatchedRequest) -> None:
        bound = request.status
        assert isinstance(bound, BoundToWorker)
        assert self.dispatcher.start(request, bound)

    @property
    def is_joined(self) -> bool:
        return self.client.membership is Membership.JOINED


@asynccontextmanager
async def front_end_of(port: int, factory: PolicyFactory = LATE_BINDING) -> AsyncIterator[FrontEnd]:
    """It runs within, and no event of its policies failed."""
    front_end = FrontEnd(port, factory)
    try:
        yield front_end
        assert not front_end.task.done() or front_end.task.cancelled()
    finally:
        front_end.task.cancel()
        with suppress(asyncio.CancelledError):
            await front_end.task
    assert front_end.errors == []


@asynccontextmanager
async def policy_served(factory: PolicyFactory = LATE_BINDING, port: int = 0) -> AsyncIterator[Any]:
    process = PolicyProcess(factory)
    try:
        await process.start(PolicyServerSettings(port=port, metrics_port=0))
        yield process
        assert not process.failed.is_set()
    finally:
        await process.stop()


class RawServer:
    """Says the same to each client, and notes them.

    Attributes:
        connected: how many clients there were.
        left: how many of them closed.
    """

    def __init__(self, answer: bytes) -> None:
        self.connected = self.left = 0
        self._answer = answer

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected += 1
        await reader.readline()
        writer.write(self._answer)
        with suppress(ConnectionError):
            await reader.read()
        self.left += 1
        writer.close()


@asynccontextmanager
async def raw_server(answer: bytes) -> AsyncIterator[tuple[RawServer, int]]:
    raw = RawServer(answer)
    server = await asyncio.start_server(raw.handle, "127.0.0.1", 0)
    try:
        yield raw, server.sockets[0].getsockname()[1]
        await until(lambda: raw.left == raw.connected)
    finally:
        server.close()
        await server.wait_closed()


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds between attempts to join, which take none."""
    seconds: list[float] = []

    async def sleep(delay: float) -> None:
        seconds.append(delay)
        await asyncio.sleep(0.001)

    replaced = SimpleNamespace(**{**vars(asyncio), "sleep": sleep})
    monkeypatch.setattr(policy_client, "asyncio", replaced)
    return seconds


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What front ends have logged."""
    caplog.set_level(logging.WARNING)
    names = ("equipoise.route", "equipoise.balancer.requests.policy_socket")
    return lambda: [one.getMessage() for one in caplog.records if one.name in names]


def alone(port: int, why: str) -> str:
    return (
        f"no decisions from the policy server at 127.0.0.1:{port} ({why}): "
        "this front end decides alone, and tries to join"
    )


@in_event_loop
async def test_client_joins_and_the_server_decides() -> None:
    async with policy_served() as process, front_end_of(process.ports["port"]) as front_end:
        await until(lambda: front_end.is_joined)
        assert isinstance(front_end.dispatcher.policy, RemotePolicy)
        first, second = front_end.submit(1), front_end.submit(2)
        assert isinstance(first.status, Queued), "nobody but the server decides"
        await until(lambda: first.worker == 0)
        await until(lambda: len(process.server.sessions[0].requests) == 2)
        assert isinstance(second.status, Queued)
        assert not front_end.own[0].knows(1)


def test_client_that_is_refused_says_so_once_and_tries_less_often(
    delays: list[float], lines: Callable[[], list[str]]
) -> None:
    @in_event_loop
    async def play() -> None:
        other = routing_policy_factory("fit", {"lockstep": False})
        async with policy_served(other) as process:
            port = process.ports["port"]
            async with front_end_of(port, FIT) as front_end:
                await until(lambda: len(delays) >= 6)
                assert front_end.dispatcher.policy is front_end.own[0]
                assert front_end.submit(1).worker == 0
        why = (
            "lockstep is true at the front end and false at the policy server: "
            "set the policy option `lockstep` of one as that of the other"
        )
        assert lines() == [alone(port, why)]

    play()
    assert delays[:6] == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0]


def test_client_without_a_server_decides_alone_and_says_so_once(
    delays: list[float], lines: Callable[[], list[str]]
) -> None:
    port = free_port()

    @in_event_loop
    async def play() -> None:
        async with front_end_of(port) as front_end:
            await until(lambda: len(delays) >= 3)
            assert front_end.submit(1).worker == 0
            assert front_end.own[0].knows(1)

    play()
    assert lines() == [alone(port, "Connection refused")]


def test_peer_of_another_protocol_is_told_once(
    delays: list[float], lines: Callable[[], list[str]]
) -> None:
    @in_event_loop
    async def play() -> None:
        async with raw_server(HTTP_ANSWER) as (_, port):
            async with front_end_of(port) as front_end:
                await until(lambda: len(delays) >= 3)
                assert front_end.own == [front_end.dispatcher.policy]
            [line] = lines()
            assert "not a message of a shared policy: b'HTTP/1.1 400 Bad" in line

    play()


def test_own_policy_gets_what_waits_and_runs_and_the_next_server_too(
    delays: list[float], lines: Callable[[], list[str]]
) -> None:
    @in_event_loop
    async def play() -> None:
        async with policy_served() as process:
            port = process.ports["port"]
            front_end = FrontEnd(port)
            await until(lambda: front_end.is_joined)
            first, second, third = (front_end.submit(name) for name in range(3))
            await until(lambda: first.worker == 0)
            front_end.make_token(first)
        await until(lambda: not front_end.is_joined)
        assert front_end.dispatcher.policy is front_end.own[1]
        [_, own] = front_end.own
        assert [own.knows(name) for name in range(3)] == [True] * 3
        assert isinstance(second.status, Queued), "the only slot is taken"
        front_end.dispatcher.finish(first)
        await until(lambda: second.worker == 0)

        async with policy_served(port=port) as process:
            await until(lambda: front_end.is_joined)
            await until(lambda: len(process.server.sessions[0].requests) == 2)
            assert isinstance(third.status, Queued)
            front_end.make_token(second)
            front_end.dispatcher.finish(second)
            await until(lambda: third.worker == 0)
            front_end.task.cancel()
            await asyncio.wait([front_end.task])
        assert front_end.errors == own.refused == []

    play()
    assert delays[0] == 1.0, "after a server that was there the first delay is the short one"
    assert [one for one in lines() if "process that has the policy ends" in one]


@pytest.mark.parametrize("answer", [b"", HELLO_ANSWER], ids=["at once", "after joining"])
def test_server_that_hangs_is_given_up(
    answer: bytes,
    delays: list[float],
    lines: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy_client, "ANSWER_SECONDS", 0.1)

    @in_event_loop
    async def play() -> None:
        async with raw_server(answer) as (raw, port):
            async with front_end_of(port) as front_end:
                await until(lambda: front_end.is_joined if answer else raw.connected)
                request = front_end.submit(1)
                assert isinstance(request.status, Queued) is bool(answer)
                await until(lambda: delays)
                assert request.worker == 0
                # Without an answer the dispatcher has had one policy only.
                assert len(front_end.own) == (2 if answer else 1)
                assert front_end.own[-1].knows(1)
            assert alone(port, "no answer for 0.1 seconds") in lines()

    play()


@pytest.mark.parametrize("answer", [b"", HELLO_ANSWER], ids=["greeting", "joined"])
@in_event_loop
async def test_client_that_is_cancelled_closes_its_connection(answer: bytes) -> None:
    async with raw_server(answer) as (raw, port), front_end_of(port) as front_end:
        await until(lambda: front_end.is_joined if answer else raw.connected)
        front_end.task.cancel()
        await asyncio.wait([front_end.task])
        assert front_end.task.cancelled()
        await until(lambda: raw.left == 1)


@in_event_loop
async def test_client_that_is_cancelled_leaves_the_server() -> None:
    async with policy_served() as process, front_end_of(process.ports["port"]) as front_end:
        await until(lambda: front_end.is_joined)
        front_end.submit(1)
        await until(lambda: process.server.sessions[0].requests)
        front_end.task.cancel()
        await until(lambda: not process.server.sessions)


@in_event_loop
async def test_server_lost_in_the_turn_of_a_cancellation_is_no_error() -> None:
    async with policy_served() as process, front_end_of(process.ports["port"]) as front_end:
        await until(lambda: front_end.is_joined)
        policy: Any = front_end.dispatcher.policy
        front_end.task.cancel()
        policy.lose("the connection has ended")
        await asyncio.wait([front_end.task])
        assert front_end.task.cancelled()


@in_event_loop
async def test_both_ends_keep_the_connection_alive() -> None:
    async with policy_served() as process, front_end_of(process.ports["port"]) as front_end:
        await until(lambda: front_end.is_joined)
        policy: Any = front_end.dispatcher.policy
        for link in (policy._link, process.server.sessions[0]._link):
            end = link._transport.get_extra_info("socket")
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if hasattr(socket, "TCP_KEEPIDLE"):
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
