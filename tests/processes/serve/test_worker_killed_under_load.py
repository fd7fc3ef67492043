"""Many requests, and a server that is killed and started again in the middle of them."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import aiohttp
import pytest
from helpers.fakes.fake_server_process import PATIENCE, FakeProcess, Process, events_of, spawn
from helpers.harnesses.proxy_setup import CHAT, chat_request, error_of
from helpers.processes.proxy_load import (
    DOOMED,
    REQUESTS,
    SLOTS,
    TOKENS,
    Attempt,
    Load,
    Result,
    answers_of,
    attempts_of,
    three_servers,
)
from helpers.tiers import DEEP

from equipoise.serve.outcomes import RequestOutcome
from equipoise.serve.request_log import RequestRecord, read_log

pytestmark = pytest.mark.timeout(1000 if DEEP else 300)


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[list[FakeProcess]]:
    with three_servers(tmp_path) as servers:
        yield servers


POLICIES = [
    "br0",
    pytest.param("fit", marks=pytest.mark.deep),
    pytest.param("helpers.fakes.late_binding_policy:LateBinding", marks=pytest.mark.deep),
]


@pytest.fixture(params=POLICIES)
def proxy(
    fakes: list[FakeProcess], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Process]:
    config = {
        "workers": [{"url": f"http://127.0.0.1:{one.port}", "name": one.name, "slots": SLOTS}
                    for one in fakes],
        "policy": request.param,
        "port": 0,
        "health_interval": 0.5,
        "max_queued": 10_000,
        "log": str(tmp_path / "route.jsonl"),
    }  # fmt: skip
    path = tmp_path / "route.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    process = spawn("equipoise", "route", "--config", str(path))
    try:
        yield process
    finally:
        process.close()


def test_killed_worker_loses_and_duplicates_no_request(
    fakes: list[FakeProcess], proxy: Process, tmp_path: Path
) -> None:
    url = proxy.line("serving on").split()[3].rstrip(",")
    results, first_life = asyncio.run(_load(url, fakes[1]))
    events = events_of(fakes)
    assert {one.id for one in results} == set(events) == {f"r{n}" for n in range(REQUESTS)}
    assert len(results) == REQUESTS
    for result in results:
        _judge(result, attempts_of(events[result.id]))
    broken_results = [one for one in results if not one.whole]
    # What had begun on the killed server, and nothing else, is not whole.
    assert 1 <= len(broken_results) <= SLOTS
    assert answers_of(fakes[1]) > first_life > 0, "it is given requests again"
    assert proxy.end() == 0
    _judge_log(results, {one.id: one for one in read_log(tmp_path / "route.jsonl")})
    assert not any("policy" in line for line in proxy.said)
    _tell(results, events)


async def _load(url: str, doomed: FakeProcess) -> tuple[list[Result], int]:
    """Results of the clients, and the number of answers of the killed server before its end."""
    results: list[Result] = []

    def serves() -> bool:
        with urlopen(f"{url}/workers", timeout=PATIENCE) as answer:
            states = {one["name"]: one["state"] for one in json.load(answer)["workers"]}
        return bool(states[DOOMED] == "serving")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def ask(number: int) -> None:
            # Of the first some are still there when the server is killed, whenever that is.
            fake_options = {"fake": {DOOMED: {"stall": TOKENS // 2}}} if number < SLOTS else {}
            body = chat_request(TOKENS, stream=True, **fake_options)
            results.append(await _one(client, url, f"r{number}", body))

        load = Load(ask, doomed, serves)
        await load.run()
    return results, load.first_life


async def _one(client: aiohttp.ClientSession, url: str, name: str, body: object) -> Result:
    async with client.post(url + CHAT, json=body, headers={"X-Request-Id": name}) as answer:
        return Result(name, answer.status, await answer.read())


def _judge(result: Result, attempts: list[Attempt]) -> None:
    """By what the client got, and by what the servers say that they made."""
    client_tokens = result.tokens
    assert result.status == 200
    assert client_tokens, "what had no token is not lost"
    maker = client_tokens[0].partition(":")[0]
    assert client_tokens == [f"{maker}:{index} " for index in range(len(client_tokens))]
    *before, last = sorted(attempts, key=lambda one: one.worker == maker)
    assert last.worker == maker
    # By the server's own record its tokens were made once, and those that came are among them.
    assert last.tokens == list(range(len(last.tokens)))
    assert len(last.tokens) >= len(client_tokens)
    # Only what the killed server had is sent a second time.
    assert all(one.worker == DOOMED and not one.ended for one in before)
    if result.whole:
        assert (len(client_tokens), last.ended) == (TOKENS, True)
        assert error_of(result.body) is None
        return
    # Not whole is only what had begun there; and that is never sent to anybody else.
    assert (maker, before) == (DOOMED, [])
    error = error_of(result.body)
    assert error is not None
    assert error["code"] == "worker_lost"
    assert "worker" in error["message"]


def _judge_log(results: list[Result], log: Mapping[str, RequestRecord]) -> None:
    assert len(log) == REQUESTS
    for result in results:
        record = log[result.id]
        expected = RequestOutcome.COMPLETED if result.whole else RequestOutcome.WORKER_LOST
        assert (record.outcome, record.output) == (expected, len(result.tokens))
        assert record.bound_at is not None
        assert record.first_answer_at is not None
        assert record.arrived_at <= record.bound_at <= record.first_answer_at <= record.ended_at


def _tell(results: list[Result], events: Mapping[str, list[dict[str, Any]]]) -> None:
    """Shown by `pytest -rP`."""
    whole = Counter(one.whole for one in results)
    attempts = sum(len(attempts_of(each)) for each in events.values())
    print(f"{whole[True]:,} whole, {whole[False]} broken off, {attempts - len(results)} sent again")
