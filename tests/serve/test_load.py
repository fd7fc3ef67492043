"""Many requests, and a server that is killed and started again in the middle of them."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.fake_process import FakeProcess, Process, events_of, spawn
from support.proxying import CHAT, asked, error_of, tokens_of

from equipoise.serve.outcomes import Outcome
from equipoise.serve.record import Record, read_log

pytestmark = pytest.mark.ranks
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
REQUESTS, AT_ONCE, WATCHDOG = (10_000, 500, 900.0) if DEEP else (1_000, 100, 100.0)
TOKENS, SLOTS, PACE = 12, 24, 0.005
ERRORS = {"worker_lost", "worker_failed", "timeout"}


@dataclass(frozen=True)
class Result:
    """What a client got for one request."""

    id: str
    status: int
    body: bytes

    @property
    def tokens(self) -> list[str]:
        return tokens_of(self.body)

    @property
    def whole(self) -> bool:
        return self.body.endswith(b"data: [DONE]\n\n")


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[list[FakeProcess]]:
    made = [FakeProcess(f"w{n}", tmp_path / f"w{n}.jsonl", SLOTS, PACE) for n in range(3)]
    try:
        for one in made:
            one.start()
        yield made
    finally:
        for one in made:
            one.close()


@pytest.fixture(params=["fit", "support.late_binding:LateBinding"])
def proxy(
    fakes: list[FakeProcess], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Process]:
    config = {
        "workers": [{"url": f"http://127.0.0.1:{one.port}", "name": one.name, "slots": SLOTS}
                    for one in fakes],
        "policy": request.param,
        "port": 0,
        "health_interval": 0.5,
        "max_held": 10_000,
        "log": str(tmp_path / "route.jsonl"),
    }  # fmt: skip
    path = tmp_path / "route.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    process = spawn("equipoise", "route", "--config", str(path))
    try:
        yield process
    finally:
        process.close()


def test_a_killed_server_loses_and_doubles_nothing(
    fakes: list[FakeProcess], proxy: Process, tmp_path: Path
) -> None:
    url = proxy.line("serving on").split()[3].rstrip(",")
    results = asyncio.run(_bounded(_load(url, fakes[1])))
    events = events_of(fakes)
    assert len(results) == REQUESTS
    for result in results:
        _judge(result, events[result.id])
    counts = Counter(result.whole for result in results)
    # What had begun on the killed server, and nothing else, is not whole.
    assert counts[False] <= 2 * SLOTS
    assert proxy.end() == 0
    _judge_log(results, {one.id: one for one in read_log(tmp_path / "route.jsonl")})
    assert not any("policy" in line for line in proxy.said)


async def _bounded(work: Any) -> list[Result]:
    async with asyncio.timeout(WATCHDOG):
        return list(await work)


async def _load(url: str, doomed: FakeProcess) -> list[Result]:
    """All requests, so many at once; the doomed server is killed and started in the middle."""
    numbers = iter(range(REQUESTS))
    results: list[Result] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def ask() -> None:
            for number in numbers:
                results.append(await _one(client, url, f"r{number}"))

        async def disturb() -> None:
            for done, act in ((REQUESTS // 4, doomed.kill), (REQUESTS // 2, doomed.start)):
                while len(results) < done:
                    await asyncio.sleep(0.02)
                await asyncio.to_thread(act)

        await asyncio.gather(disturb(), *(ask() for _ in range(AT_ONCE)))
    return results


async def _one(client: aiohttp.ClientSession, url: str, name: str) -> Result:
    body = asked(TOKENS, stream=True)
    async with client.post(url + CHAT, json=body, headers={"X-Request-Id": name}) as answer:
        return Result(name, answer.status, await answer.read())


def _judge(result: Result, events: list[dict[str, Any]]) -> None:
    """By what the client got, and by what the servers say that they made."""
    got = result.tokens
    makers = {token.split(":")[0] for token in got}
    assert len(makers) <= 1, result
    assert got == [f"{maker}:{index} " for maker in makers for index in range(len(got))]
    made = [one for one in events if one["event"] == "token" and one["worker"] in makers]
    # By the server's own record its tokens were made once, and those that came are among them.
    assert [one["index"] for one in made][: len(got)] == list(range(len(got)))
    if result.whole:
        assert (result.status, len(got)) == (200, TOKENS)
        ended = [one["worker"] for one in events if one["event"] == "end"]
        assert len(ended) == 1
        assert set(ended) == makers
        return
    # Not whole is only what had begun: the rest was answered by another server.
    assert got
    error = error_of(result.body)
    assert error is not None
    assert error["code"] in ERRORS
    assert makers == {"w1"}


def _judge_log(results: list[Result], log: Mapping[str, Record]) -> None:
    assert len(log) == REQUESTS
    for result in results:
        record = log[result.id]
        expected = Outcome.COMPLETED if result.whole else Outcome.WORKER_LOST
        assert (record.outcome, record.output) == (expected, len(result.tokens))
        assert record.bound is not None
        assert record.first is not None
        assert record.arrival <= record.bound <= record.first <= record.end
