"""What a policy knows of a proxy's requests is gone when they are."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from helpers.fakes.fake_server_process import FakeProcess
from helpers.harnesses.proxy_setup import CHAT, PATIENCE, chat_request
from helpers.processes.proxy_load import REQUESTS, SERVERS, SLOTS, TOKENS, Load, three_servers
from helpers.tiers import DEEP

from equipoise.balancer.requests.policy import Request, WorkerState
from equipoise.balancer.requests.policy_factory import routing_policy_factory
from equipoise.balancer.requests.request_router import RequestRouter
from equipoise.serve.proxy import Proxy
from equipoise.serve.settings import (
    AccessSettings,
    HealthSettings,
    Limits,
    RouteSettings,
    WorkerSettings,
)

pytestmark = pytest.mark.timeout(1000 if DEEP else 300)
ROOM = 2_000
"""Tokens of a worker's KV cache: its slots are the tighter limit, and its tokens are counted."""
EVERYWHERE = [f"w{number}" for number in range(SERVERS)]
ENDS: tuple[dict[str, object], ...] = (
    {"stream": True},
    {},
    {"stream": True},
    {"stream": True, "fake": {name: {"hang_up": 3} for name in EVERYWHERE}},
    {"stream": True, "fake": {"w0": {"status": 500}}},
    {"fake": {name: {"status": 400} for name in EVERYWHERE}},
    {"stream": True, "fake": {name: {"hang_up": 0} for name in EVERYWHERE}},
    {"stream": True, "leaves": True},
    {"leaves": True},
)
"""How requests end, in turns: whole, broken off, tried again, refused, failed, given up."""


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[list[FakeProcess]]:
    with three_servers(tmp_path) as servers:
        yield servers


def settings_of(fakes: list[FakeProcess]) -> RouteSettings:
    return RouteSettings(
        workers=tuple(
            WorkerSettings(
                url=f"http://127.0.0.1:{one.port}", name=one.name, slots=SLOTS, kv_tokens=ROOM
            )
            for one in fakes
        ),
        access=AccessSettings(port=0),
        limits=Limits(queued=REQUESTS),
        health=HealthSettings(interval=0.5, timeout=30.0),
    )


@pytest.mark.parametrize(
    "name", ["br0", *(pytest.param(name, marks=pytest.mark.deep) for name in ("fit", "jsq_load"))]
)
def test_policy_returns_all_load_and_slots_after_requests_end(
    name: str, fakes: list[FakeProcess]
) -> None:
    router = routing_policy_factory(name, {})([SLOTS] * SERVERS, [ROOM] * SERVERS)
    assert isinstance(router, RequestRouter)
    stats = asyncio.run(_run(router, settings_of(fakes), fakes[1]))
    assert stats.statuses[200] > REQUESTS // 2
    assert {0, 200, 400, 502} <= set(stats.statuses), "requests end in every way"
    assert stats.most_loads > [0] * SERVERS
    assert stats.most_counts == [SLOTS] * SERVERS
    assert stats.most_pooled > 0
    _nothing_is_left(router)
    _every_slot_is_free(router)


class RunStats:
    """What the policy had at most, and what clients got; 0 is the status of those that left."""

    def __init__(self, router: RequestRouter) -> None:
        self._router = router
        self.most_loads = self.most_counts = [0] * SERVERS
        self.most_pooled = 0
        self.statuses: Counter[int] = Counter()

    def look(self) -> None:
        loads, counts = self._router.loads, self._router.counts
        self.most_loads = [max(pair) for pair in zip(self.most_loads, loads, strict=True)]
        self.most_counts = [max(pair) for pair in zip(self.most_counts, counts, strict=True)]
        self.most_pooled = max(self.most_pooled, self._router.unassigned)


async def _run(router: RequestRouter, settings: RouteSettings, doomed: FakeProcess) -> RunStats:
    """A proxy over that policy, from its start until its last request is gone."""
    stats, proxy = RunStats(router), Proxy(settings, router)
    await proxy.start()
    try:
        await _load(proxy, stats, doomed)
        async with asyncio.timeout(PATIENCE):
            while proxy.dispatcher.requests:  # of clients that have left a moment ago
                await asyncio.sleep(0.01)
        await asyncio.sleep(0)  # tokens of a turn of the loop are told behind it
        assert (proxy.dispatcher.queued, proxy.dispatcher.policy_errors) == (0, 0)
        assert [len(one.requests) for one in proxy.dispatcher.workers] == [0] * SERVERS
        assert [one.load for one in proxy.dispatcher.workers] == [0] * SERVERS
        assert router.states == (WorkerState.SERVING,) * SERVERS
        _nothing_is_left(router)
    finally:
        assert await proxy.stop() == 0
    return stats


async def _load(proxy: Proxy, stats: RunStats, doomed: FakeProcess) -> None:
    url = f"http://127.0.0.1:{proxy.port}{CHAT}"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def ask(number: int) -> None:
            body = chat_request(TOKENS, **ENDS[number % len(ENDS)])
            if body.pop("leaves", False):
                stats.statuses[await _leave_stream(client, url, body)] += 1
            else:
                async with client.post(url, json=body) as answer:
                    await answer.read()
                stats.statuses[answer.status] += 1
            stats.look()

        serves = proxy.dispatcher.workers[1]
        await Load(ask, doomed, lambda: serves.state is WorkerState.SERVING).run()


async def _leave_stream(client: aiohttp.ClientSession, url: str, body: object) -> int:
    """Disconnect before the response or in the middle of its stream; returns 0, as a status."""
    call = asyncio.create_task(client.post(url, json=body).__aenter__())
    try:
        async with asyncio.timeout(0.03):
            answer = await asyncio.shield(call)
            await answer.content.readany()
            answer.close()
    except TimeoutError:
        call.cancel()
        await asyncio.wait([call])
    return 0


def _nothing_is_left(router: RequestRouter) -> None:
    assert router.loads == [0] * SERVERS
    assert router.counts == [0] * SERVERS
    assert router.unassigned == 0
    assert router._handles == {}
    assert router._ids == {}


def _every_slot_is_free(router: RequestRouter) -> None:
    """As the policy sees it: so many requests are bound at once, and not one more."""
    bound: Counter[int] = Counter()
    for number in range(SERVERS * SLOTS + 1):
        decision = router.on_arrival(Request(id=number, size=5))
        bound.update(one.worker for one in decision.assignments)
    assert bound == dict.fromkeys(range(SERVERS), SLOTS)
    assert router.unassigned == 1
