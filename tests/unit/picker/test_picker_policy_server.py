"""Two pickers in front of the same endpoints, and a policy server that decides for both."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from helpers.fakes.fake_openai_server import Fake
from helpers.harnesses.picker_setup import PickerSetup, picking, prompt, run, worker_of

from equipoise.balancer.requests.policy_factory import routing_policy_factory
from equipoise.balancer.requests.remote_policy import RemotePolicy
from equipoise.serve.picker.settings import StaticEndpoints
from equipoise.serve.policy_process import PolicyProcess, PolicyServerSettings
from equipoise.serve.settings import PolicyServerAddress, WorkerSettings

FIT = routing_policy_factory("fit", {"lockstep": False})
SLOTS, REQUESTS = 2, 16
WHO = "x-picker"


def listed(fake: Fake) -> WorkerSettings:
    """An endpoint of fewer slots than the server has, which so sees it where they are exceeded."""
    return worker_of(fake, slots=SLOTS)


@asynccontextmanager
async def two_pickers(
    fakes: Sequence[Fake], second: Sequence[int]
) -> AsyncIterator[tuple[PolicyProcess, PickerSetup, PickerSetup]]:
    """Both joined, and still have at the end; the second one has these endpoints, in this order."""
    process = PolicyProcess(FIT)
    try:
        await process.start(PolicyServerSettings(port=0, metrics_port=0))
        address = PolicyServerAddress("127.0.0.1", process.ports["port"])
        shared: dict[str, Any] = {"factory": FIT, "policy_server": address}
        async with picking(*fakes, workers=listed, **shared) as one:
            endpoints = StaticEndpoints(workers=tuple(listed(fakes[n]) for n in second))
            async with picking(endpoints=endpoints, **shared) as other:
                for setup in (one, other):
                    await setup.until(partial(has_joined, setup))
                await one.until(lambda: used_by(process) == [2] * len(second))
                yield process, one, other
                assert has_joined(one), "it decided alone at last"
                assert has_joined(other)
    finally:
        await process.stop()


def has_joined(setup: PickerSetup) -> bool:
    return isinstance(setup.pool.dispatcher.policy, RemotePolicy)


def used_by(process: PolicyProcess) -> list[int]:
    """By how many pickers each endpoint is used, of those that both know."""
    sessions = process.server.sessions
    return [
        sum(one.uses(number) for one in sessions)
        for number in range(len(process.server.workers))
        if len(sessions) == 2 and all(one.reported(number) is not None for one in sessions)
    ]


async def send_all(one: PickerSetup, other: PickerSetup) -> None:
    """Requests through both, all at once; all are answered."""
    tasks = [
        setup.send(prompt(4), headers={WHO: who})
        for _ in range(REQUESTS // 2)
        for who, setup in (("one", one), ("other", other))
    ]
    assert [answer.status for answer in await asyncio.gather(*tasks)] == [200] * REQUESTS


def most_at_once(fake: Fake) -> int:
    there, most = 0, 0
    for entry in fake.served:
        there += (entry["event"] == "begin") - (entry["event"] == "end")
        most = max(most, there)
    return most


def senders(fake: Fake) -> set[str]:
    return {entry["headers"][WHO] for entry in fake.events("begin")}


@pytest.mark.parametrize("second", [(0, 1), (1, 0)], ids=["same order", "other order"])
def test_two_pickers_give_an_endpoint_no_more_than_its_slots(second: Sequence[int]) -> None:
    async def play() -> None:
        fakes = [Fake("a", pace=0.005), Fake("b", pace=0.005)]
        async with two_pickers(fakes, second) as (process, one, other):
            await send_all(one, other)
            names = [worker.name for worker in process.server.workers]
            assert names == [f"http://127.0.0.1:{fake.port}" for fake in fakes]
        for fake in fakes:
            assert most_at_once(fake) == SLOTS
            assert senders(fake) == {"one", "other"}
        assert sum(len(fake.events("end")) for fake in fakes) == REQUESTS

    run(play())


def test_endpoint_that_one_picker_lacks_gets_requests_of_the_other_only() -> None:
    async def play() -> None:
        shared, new = Fake("a", pace=0.005), Fake("b", pace=0.005)
        async with two_pickers([shared, new], [0]) as (_, one, other):
            await send_all(one, other)
        assert senders(new) == {"one"}
        assert "other" in senders(shared)

    run(play())
