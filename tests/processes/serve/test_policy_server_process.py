"""`equipoise policy-server` between two proxies: shared slots, its death, its return."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import aiohttp
import pytest
from helpers.fakes.fake_server_process import PATIENCE, FakeProcess, Process, spawn
from helpers.harnesses.proxy_setup import CHAT, chat_request, tokens_of
from helpers.processes.ports import free_port

SLOTS, PACE = 2, 0.01
POLICY = ("--policy", "helpers.fakes.late_binding_policy:LateBinding")
JOINED, ALONE = "decides from now on", "decides alone"


class Fleet:
    """Two proxies in front of one worker, and a policy server, which keeps its ports."""

    def __init__(self, fake: FakeProcess) -> None:
        self.fake = fake
        self.port, self.metrics_port = free_port(), free_port()
        self.processes: list[Process] = []
        self.server = self.start_server()
        self.proxies = [self._start_proxy() for _ in range(2)]
        self.urls = [one.line("serving on").split()[3].rstrip(",") for one in self.proxies]

    def start_server(self) -> Process:
        ports = ("--port", str(self.port), "--metrics-port", str(self.metrics_port))
        self.server = spawn("equipoise", "policy-server", *POLICY, *ports)
        self.processes.append(self.server)
        self.server.line("policy on port")
        return self.server

    def _start_proxy(self) -> Process:
        worker, server = f"http://127.0.0.1:{self.fake.port}", f"127.0.0.1:{self.port}"
        process = spawn(
            "equipoise", "route", "--workers", worker, "--slots", str(SLOTS), *POLICY,
            "--port", "0", "--policy-server", server,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def page(self) -> dict[str, Any]:
        """What the policy server says of its workers."""
        with urlopen(f"http://127.0.0.1:{self.metrics_port}/workers", timeout=PATIENCE) as answer:
            return dict(json.load(answer))

    def close(self) -> None:
        for one in self.processes:
            one.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fake = FakeProcess("w0", tmp_path / "w0.jsonl", 100, PACE)
    fleet: Fleet | None = None
    try:
        fake.start()
        fleet = Fleet(fake)
        yield fleet
    finally:
        if fleet is not None:
            fleet.close()
        fake.close()


async def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def ask(client: aiohttp.ClientSession, url: str, tokens: int) -> int:
    """Tokens that came of one request."""
    async with client.post(url + CHAT, json=chat_request(tokens, stream=True)) as answer:
        body = await answer.read()
        assert answer.status == 200
        assert body.endswith(b"data: [DONE]\n\n")
        return len(tokens_of(body))


def most_at_once(record: Path) -> int:
    """The most requests that the worker had at once, by its own record."""
    there, most = 0, 0
    for line in record.read_text().splitlines():
        event = json.loads(line)["event"]
        there += (event == "begin") - (event == "end")
        most = max(most, there)
    return most


def test_two_proxies_share_the_slots_of_a_worker(fleet: Fleet) -> None:
    async def load() -> list[int]:
        await until(lambda: [one["used_by"] for one in fleet.page()["workers"]] == [2])
        async with aiohttp.ClientSession() as client:
            return await asyncio.gather(*(ask(client, fleet.urls[n % 2], 8) for n in range(20)))

    assert asyncio.run(load()) == [8] * 20
    assert most_at_once(fleet.fake.record) == SLOTS
    assert fleet.server.end() == 0
    for proxy in fleet.proxies:
        proxy.line(ALONE)
        assert proxy.end() == 0


def test_killed_policy_server_costs_no_request_and_is_told_what_runs(fleet: Fleet) -> None:
    async def load() -> list[int]:
        await until(lambda: [one["used_by"] for one in fleet.page()["workers"]] == [2])
        async with aiohttp.ClientSession() as client:
            # Two run, and two wait in the policy that is killed.
            first = [asyncio.create_task(ask(client, fleet.urls[n % 2], 600)) for n in range(4)]
            await until(lambda: fleet.page()["workers"][0]["requests"] == SLOTS)
            fleet.server.kill()
            for proxy in fleet.proxies:
                await asyncio.to_thread(proxy.line, ALONE)
            # Each alone, they fill all slots: what waited runs now.
            await until(lambda: most_at_once(fleet.fake.record) == 4)
            await asyncio.to_thread(fleet.start_server)
            for proxy in fleet.proxies:
                await asyncio.to_thread(proxy.line, JOINED)
            await until(lambda: fleet.page()["workers"][0]["requests"] == 4)
            last = [asyncio.create_task(ask(client, fleet.urls[n % 2], 8)) for n in range(4)]
            return await asyncio.gather(*first, *last)

    assert asyncio.run(load()) == [600] * 4 + [8] * 4
    assert most_at_once(fleet.fake.record) == 4, "the last four have waited for two slots"
    assert not any("policy failed" in line for proxy in fleet.proxies for line in proxy.said)
