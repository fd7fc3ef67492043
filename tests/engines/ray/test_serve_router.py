"""The request router in a real Ray Serve: three replicas, of which one is killed."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

REQUESTS, KILLED_AFTER = 360, 60
NAMES = count()
PATIENCE = 120.0
"""Seconds for Ray to notice something; nothing is asserted of them."""
# Ray leaves sockets and loops open at its end, and has deprecated names of its own.
pytestmark = [pytest.mark.usefixtures("_ray"), pytest.mark.filterwarnings("default")]


@pytest.fixture
def deploy() -> Iterator[Callable[..., Any]]:
    """Runs an application; it is deleted at the end.

    Each has a name of its own: a process keeps the handles of an application by name, and with them
    the routers that they began with.
    """
    from ray import serve

    name = f"app-{next(NAMES)}"

    def run(application: Any) -> Any:
        return serve.run(application, name=name, route_prefix=None)

    yield run
    serve.delete(name)


def decoder(policy: str | None = "fit", **options: Any) -> Any:
    from decoder_app import build
    from helpers.harnesses.journaled_decoder import JournaledDecoder

    from equipoise.integrations.ray.settings import request_router_config

    if policy is None:
        return build(None, JournaledDecoder)
    config = request_router_config(policy, options, request_routing_stats_period_s=0.5)
    return build(config, JournaledDecoder)


def requests_of(number: int, journal: Path, seed: int = 0) -> list[dict[str, Any]]:
    from decoder_app import load

    journal.touch()
    return [
        {**one, "number": n, "journal": str(journal)} for n, one in enumerate(load(number, seed))
    ]


def router_of(handle: Any) -> Any:
    return handle._router._asyncio_router.request_router


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def check_empty_books(router: Any) -> None:
    """No request is left, though the last word of Ray may come a moment after the last answer."""
    pool = router.pool
    wait_until(lambda: not pool.dispatcher.requests and pool.attempts == 0)
    assert pool.dispatcher.policy_errors == 0
    assert all(not view.requests and not view.load for view in pool.dispatcher.workers)


async def send(handle: Any, request: dict[str, Any]) -> int:
    """Every third answer is streamed."""
    if request["number"] % 3:
        return int(await handle.complete.remote(request))
    stream = handle.options(stream=True).stream.remote(request)
    return len([token async for token in stream])


def test_killed_replica_costs_no_request_that_had_not_begun(
    deploy: Callable[..., Any], tmp_path: Path
) -> None:
    from decoder_app import REPLICAS, SLOTS
    from helpers.harnesses.journaled_decoder import read_journal
    from ray.exceptions import RayActorError

    handle = deploy(decoder())
    journal = tmp_path / "journal"
    requests = requests_of(REQUESTS, journal)
    killed: list[int] = []

    async def serve_all() -> list[int | BaseException]:
        calls = [asyncio.create_task(send(handle, one)) for one in requests]
        for answer in islice(asyncio.as_completed(calls), KILLED_AFTER):
            await answer
        # Whoever began last has requests under way.
        killed.append(read_journal(journal)[-1][0])
        os.kill(killed[0], signal.SIGKILL)
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = asyncio.run(serve_all())
    begun = read_journal(journal)
    failed = {n for n, answer in enumerate(answers) if isinstance(answer, BaseException)}
    print(f"{len(failed)} of {REQUESTS} requests had begun on the replica that was killed")
    for number, answer in enumerate(answers):
        if number in failed:
            assert isinstance(answer, RayActorError)
            assert (killed[0], number) in begun
        else:
            assert answer == requests[number]["max_tokens"]
    assert 0 < len(failed) <= SLOTS
    assert len({process for process, _ in begun}) >= REPLICAS
    # None was begun twice: what had begun is not tried again.
    assert max(Counter(number for _, number in begun).values()) == 1
    router = router_of(handle)
    check_empty_books(router)
    print(f"choices: {dict(router.counts)}")
    assert set(router.counts) <= {"policy", "retried"}
    assert router.counts["policy"] >= REQUESTS
    # Serve starts another one, which gets requests too.
    wait_until(lambda: len(router.pool.replicas) == REPLICAS)
    later = requests_of(60, tmp_path / "later")

    async def serve_later() -> list[int]:
        return await asyncio.gather(*(send(handle, one) for one in later))

    assert asyncio.run(serve_later()) == [one["max_tokens"] for one in later]
    assert len({process for process, _ in read_journal(tmp_path / "later")}) == REPLICAS
    check_empty_books(router)


def test_cancelled_requests_give_their_slots_back(
    deploy: Callable[..., Any], tmp_path: Path
) -> None:
    from decoder_app import REPLICAS, SLOTS

    handle = deploy(decoder())
    long = requests_of(3 * REPLICAS * SLOTS, tmp_path / "journal")

    async def cancel_all() -> None:
        responses = [handle.complete.remote({**one, "max_tokens": 100_000}) for one in long]
        waits = asyncio.gather(*map(_answer, responses), return_exceptions=True)
        while router_of(handle) is None or router_of(handle).pool.queued != 2 * REPLICAS * SLOTS:
            await asyncio.sleep(0.05)
        for response in responses:  # some are running, and the others wait
            response.cancel()
        assert all(isinstance(one, BaseException) for one in await waits)

    asyncio.run(asyncio.wait_for(cancel_all(), PATIENCE))
    check_empty_books(router_of(handle))
    short = [{**one, "max_tokens": 2} for one in long]

    async def serve_all() -> list[int]:
        return await asyncio.gather(*(send(handle, one) for one in short))

    assert asyncio.run(serve_all()) == [2] * len(short)


async def _answer(response: Any) -> Any:
    return await response


@pytest.mark.parametrize("front_ends", [1, 2])
def test_two_routers_share_the_replicas(
    deploy: Callable[..., Any], tmp_path: Path, front_ends: int
) -> None:
    from helpers.harnesses.journaled_decoder import Ingress
    from ray import serve

    ingress = serve.deployment(
        name="ingress",
        num_replicas=2,
        max_ongoing_requests=8,
        ray_actor_options={"num_cpus": 0.1},
    )(Ingress)
    # Where neither knows of the other, replicas reject what is too much.
    handle = deploy(ingress.bind(decoder(front_ends=front_ends)))
    requests = requests_of(60, tmp_path / "journal")
    answers = handle.broadcast("complete_all", requests).results(timeout_s=PATIENCE)
    assert answers == [[one["max_tokens"] for one in requests]] * 2
    time.sleep(0.5)  # the last word of Ray may come after the last answer
    counts = handle.broadcast("counts").results(timeout_s=PATIENCE)
    print(f"choices of the two routers: {counts}")
    assert [one["policy"] - one.get("retried", 0) for one in counts] == [len(requests)] * 2
    assert all(set(one) <= {"policy", "retried", "left"} for one in counts)
    assert all(one["left"] == 0 for one in counts)


@pytest.mark.parametrize("policy", [None, "fit"])
def test_heavy_tailed_load_is_served(
    deploy: Callable[..., Any], tmp_path: Path, policy: str | None
) -> None:
    from decoder_app import replay
    from helpers.harnesses.journaled_decoder import read_journal

    handle = deploy(decoder(policy))
    requests = requests_of(300, tmp_path / "journal")
    print(f"{policy or 'power of two'}: {asyncio.run(replay(handle, requests))}")
    chosen = set(getattr(router_of(handle), "counts", {"ray": 1}))
    assert chosen <= ({"ray"} if policy is None else {"policy", "retried"})
    begun = {number for _, number in read_journal(tmp_path / "journal")}
    assert begun == set(range(len(requests)))
