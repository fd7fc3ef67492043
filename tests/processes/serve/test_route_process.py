"""The program as a process: how it begins, and how it ends."""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from helpers.fakes.fake_server_process import PATIENCE, FakeProcess, Process, events_of, spawn
from helpers.harnesses.proxy_setup import CHAT, chat_request, error_of, tokens_of

POLICY = ("--policy", "helpers.fakes.late_binding_policy:LateBinding")


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeProcess]:
    server = FakeProcess("w0", tmp_path / "w0.jsonl", 8, 0.01)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    process_list: list[Process] = []
    yield process_list
    for one in process_list:
        one.close()


def route(processes: list[Process], fake: FakeProcess, *more: str) -> tuple[Process, str]:
    worker = f"http://127.0.0.1:{fake.port}"
    arguments = ("route", "--workers", worker, *POLICY, "--port", "0", *more)
    process = spawn("equipoise", *arguments)
    processes.append(process)
    return process, process.line("serving on").split()[3].rstrip(",")


async def stream_body(url: str, tokens: int, begun: asyncio.Event) -> bytes:
    async with (
        aiohttp.ClientSession() as client,
        client.post(url + CHAT, json=chat_request(tokens, stream=True)) as answer,
    ):
        body = b""
        while chunk := await answer.content.readany():
            body += chunk
            begun.set()
        return body


async def ended_amid(url: str, process: Process, tokens: int, *more: signal.Signals) -> bytes:
    """A stream in the middle of which the proxy is told to end."""
    begun = asyncio.Event()
    async with asyncio.timeout(PATIENCE):
        call = asyncio.create_task(stream_body(url, tokens, begun))
        await begun.wait()
        process.child.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.line, "ending")
        for one in more:
            process.child.send_signal(one)
        return await call


def test_route_finishes_open_streams_on_sigterm(
    processes: list[Process], fake: FakeProcess
) -> None:
    process, url = route(processes, fake)
    body = asyncio.run(ended_amid(url, process, 60))
    assert len(tokens_of(body)) == 60
    assert body.endswith(b"data: [DONE]\n\n")
    assert process.child.wait(PATIENCE) == 0


def test_route_stays_listening_until_drained(processes: list[Process], fake: FakeProcess) -> None:
    process, url = route(processes, fake)

    async def work() -> list[int]:
        begun = asyncio.Event()
        async with asyncio.timeout(PATIENCE), aiohttp.ClientSession() as client:
            call = asyncio.create_task(stream_body(url, 400, begun))
            await begun.wait()
            process.child.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.line, "ending")
            statuses = []
            for path in ("/ready", "/metrics", "/health", "/v1/models"):
                async with client.get(url + path) as answer:
                    statuses.append(answer.status)
            assert not call.done()
            assert len(tokens_of(await call)) == 400
            return statuses

    assert asyncio.run(work()) == [503, 200, 200, 503]
    assert process.child.wait(PATIENCE) == 0


def test_route_cuts_off_streams_after_drain_timeout(
    processes: list[Process], fake: FakeProcess
) -> None:
    process, url = route(processes, fake, "--drain-timeout", "0.2")
    body = asyncio.run(ended_amid(url, process, 100_000))
    error = error_of(body)
    assert error is not None
    assert error["code"] == "shutting_down"
    assert process.child.wait(PATIENCE) == 1
    assert "equipoise: 1 request(s) were cut off" in process.said
    [events] = events_of([fake]).values()
    assert events[-1]["event"] == "abort"


def test_route_second_signal_ends_drain(processes: list[Process], fake: FakeProcess) -> None:
    process, url = route(processes, fake, "--drain-timeout", "3600")
    body = asyncio.run(ended_amid(url, process, 100_000, signal.SIGINT))
    assert error_of(body) is not None
    assert process.child.wait(PATIENCE) == 1


def test_route_used_port_exits_2_with_one_line(processes: list[Process], fake: FakeProcess) -> None:
    worker = f"http://127.0.0.1:{fake.port}"
    more = ("--port", str(fake.port), *POLICY)
    process = spawn("equipoise", "route", "--workers", worker, *more)
    processes.append(process)
    assert process.child.wait(PATIENCE) == 2
    process.close()
    [line] = process.said
    assert line.startswith(f"equipoise: error: --host 127.0.0.1 --port {fake.port}: ")


def test_route_warns_of_public_host_without_key(
    processes: list[Process], fake: FakeProcess
) -> None:
    process, url = route(processes, fake, "--host", "0.0.0.0")
    assert url.startswith("http://0.0.0.0:")
    assert process.end() == 0
    assert any(line.startswith("equipoise: warning: --host 0.0.0.0") for line in process.said)


def test_route_marks_frozen_worker_lost_and_serves_it_again(
    processes: list[Process], fake: FakeProcess
) -> None:
    process, url = route(processes, fake, "--health-interval", "0.2", "--health-timeout", "3")
    process.line(": found serving")
    assert fake.process is not None
    bodies: list[bytes] = []

    async def work() -> None:
        begun = asyncio.Event()
        call = asyncio.create_task(stream_body(url, 100_000, begun))
        await begun.wait()
        assert fake.process is not None
        fake.process.child.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(process.line, ": lost, was serving")
        bodies.append(await call)
        fake.process.child.send_signal(signal.SIGCONT)
        await asyncio.to_thread(process.line, ": serving, was lost")
        bodies.append(await stream_body(url, 3, begun))

    asyncio.run(work())
    error = error_of(bodies[0])
    assert error is not None
    assert error["code"] == "worker_lost"
    assert len(tokens_of(bodies[1])) == 3
    assert json.dumps(process.said).count("policy") == 0


def test_route_process_loads_neither_torch_nor_numpy(
    processes: list[Process], fake: FakeProcess
) -> None:
    """The command line included, with a request that is streamed."""
    process, url = route(processes, fake)
    asyncio.run(stream_body(url, 2, asyncio.Event()))
    maps = Path(f"/proc/{process.child.pid}/maps")
    if not maps.exists():
        pytest.skip("/proc is not there")
    libraries = {Path(line.split()[-1]).name for line in maps.read_text().splitlines()}
    assert any(name.startswith("_native") for name in libraries)
    loaded = [one for one in libraries if one.startswith(("libtorch", "libc10", "_multiarray"))]
    assert loaded == []
