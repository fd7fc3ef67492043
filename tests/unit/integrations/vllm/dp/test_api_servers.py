"""Several API servers, each with its client, find one policy by what vLLM gives them in common."""

import asyncio
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.fakes.fake_core_client import (
    FakeCoreClient,
    FakeEngine,
    Release,
    Routed,
    asked,
    configuration,
    patched,
    turn,
)
from helpers.harnesses.request_routing_scenario import run

from equipoise.hal.errors import IntegrationError
from equipoise.integrations.vllm.counters import COUNTERS
from equipoise.integrations.vllm.dp.api_servers import policy_name
from equipoise.integrations.vllm.dp.scheduler import RoutingMode

FIT = {"policy": "fit", "queue_timeout": 1e6}


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Short enough for the path of a socket."""
    path = tmp_path_factory.mktemp("s")
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def api_servers(count: int, engines: list[FakeEngine], first: int = 0) -> list[Routed]:
    """Clients of API servers that share the engines; those from `first` on."""
    kind, config = patched(Release.NEW), configuration(engines[0].slots, **FIT)
    return [kind(config, engines, count, index) for index in range(first, count)]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_api_servers_share_slots_over_a_socket(folder: Path) -> None:
    async def work() -> None:
        engines = [FakeEngine(1), FakeEngine(1)]
        clients = api_servers(3, engines)
        for number, client in enumerate(clients):
            await client.add_request_async(asked(f"r{number}"))
        await until(lambda: [len(one.seen) for one in engines] == [1, 1])
        for engine in engines * 2:
            for number, outputs in engine.step().items():
                await clients[number].process_engine_outputs(clients[number], outputs)
        await until(lambda: sum(len(one.seen) for one in engines) == 3)
        assert len(list(folder.iterdir())) == 1
        clients.clear()
        del client
        gc.collect()
        await turn()
        assert list(folder.iterdir()) == []

    run(work())


@pytest.mark.parametrize(
    ("address", "ranks", "same"),
    [
        ("ipc:///tmp/a", [0, 1], True),
        ("ipc:///tmp/b", [0, 1], False),
        ("ipc:///tmp/a", [2, 3], False),
    ],
)
def test_pool_is_that_of_the_coordinator_and_the_ranks(
    address: str, ranks: list[int], same: bool
) -> None:
    async def work() -> None:
        first = SimpleNamespace(stats_update_address="ipc:///tmp/a", engine_ranks_managed=[0, 1])
        other = SimpleNamespace(stats_update_address=address, engine_ranks_managed=ranks)
        assert (policy_name(first) == policy_name(other)) == same

    run(work())


def test_vllm_rule_routes_once_the_first_api_server_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        engines = [FakeEngine(1), FakeEngine(1)]
        first, second = api_servers(2, engines)
        for number in range(3):
            await second.add_request_async(asked(f"r{number}"))
        await until(lambda: sum(len(one.seen) for one in engines) == 2)
        before = COUNTERS.read()["dp_policy_failures"]
        del first
        gc.collect()
        await until(lambda: sum(len(one.seen) for one in engines) == 3)
        assert second.scheduler.mode is RoutingMode.ENGINE
        assert COUNTERS.read()["dp_policy_failures"] == before + 1
        [line] = [one for one in caplog.messages if "policy failed" in one]
        assert "the process that has the policy ends; the engine's own rule routes" in line

    run(work())


@pytest.mark.parametrize("index", [0, 1])
def test_api_servers_without_coordinator_are_refused(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        monkeypatch.setattr(FakeCoreClient, "address", None)
        with pytest.raises(IntegrationError, match="or set --api-server-count 1"):
            patched(Release.NEW)(configuration(1, **FIT), [FakeEngine(1)] * 2, 2, index)

    run(work())


def test_api_servers_without_event_loop_are_refused() -> None:
    with pytest.raises(IntegrationError, match="no event loop runs"):
        api_servers(2, [FakeEngine(1), FakeEngine(1)])


def test_api_servers_that_cannot_have_a_socket_are_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 90)

    async def work() -> None:
        for first in (0, 1):
            with pytest.raises(IntegrationError, match="set TMPDIR to a shorter folder"):
                api_servers(2, [FakeEngine(1), FakeEngine(1)], first)

    run(work())
