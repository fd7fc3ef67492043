"""What is asked of a deployment in any order, and what must be so always, and at the end."""

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

from helpers.fakes.fake_core_client import Deployment, FakeRequest, Routed, asked, turn
from hypothesis import strategies as st

from equipoise.balancer.requests.request_router import RequestRouter
from equipoise.integrations.vllm.dp.scheduler import Delivery, RoutingMode

ENGINES, SLOTS, LATER = 2, 2, 1e9
INDEX = st.integers(0, 99)
ACTS = st.one_of(
    st.tuples(st.just("arrive"), INDEX, st.none() | st.integers(0, ENGINES - 1)),
    st.tuples(st.just("arrive"), INDEX, st.none()),
    st.tuples(st.sampled_from(["step", "abort", "part"]), INDEX, st.none()),
    st.tuples(st.sampled_from(["turn", "report", "tick", "late"]), INDEX, st.none()),
)
Act = tuple[str, int, int | None]


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())


def drawn(seed: int, count: int) -> list[Act]:
    """Acts as `ACTS` has them, the same for a seed anywhere."""
    random = Random(seed)
    kinds = ("arrive", "arrive", "arrive", "step", "step", "abort", "part", "report", "late")
    ranks = (None, None, None, *range(ENGINES))
    return [
        (random.choice(kinds), random.randrange(100), random.choice(ranks)) for _ in range(count)
    ]


class Play:
    """What arrives, and what is to become of it."""

    def __init__(self, setup: Deployment) -> None:
        self.setup = setup
        self.clock = setup.clock
        for client in setup.clients:
            client.scheduler.dispatcher.clock = self.clock
        self.sent: dict[str, list[FakeRequest]] = {}
        self.client: dict[str, Routed] = {}
        self.given_up: set[str] = set()
        self.never: set[str] = set()
        """Given up before any engine had it."""

    async def act(self, what: str, index: int, rank: int | None) -> None:
        setup = self.setup
        match what:
            case "arrive":
                await self.arrive(index, rank)
            case "step":
                await setup.step(index % len(setup.engines))
            case "report":
                setup.report()
            case "turn":
                await turn()
            case "tick" | "late":
                setup.clients[index % len(setup.clients)].scheduler.poll()
                self.clock.advance(10 * (what == "late"))
            case _ if self.sent:
                await self.touch(what, sorted(self.sent)[index % len(self.sent)])
        self.look()

    async def arrive(self, index: int, rank: int | None) -> None:
        name = f"r{len(self.sent):03}"
        self.client[name] = self.setup.clients[index % len(self.setup.clients)]
        self.sent[name] = [asked(name, 1 + index, 1 + index % 4, rank, index % 3 == 0)]
        await self.client[name].add_request_async(self.sent[name][0])

    async def touch(self, what: str, name: str) -> None:
        if name in self.given_up or self.setup.ended[name]:
            return
        if what == "part":
            await self.go_on(name, len(self.sent) % 3 > 0)
            return
        if any(
            one.id == name and one.delivery is not Delivery.SENT
            for one in self.client[name].scheduler.requests
        ):
            self.never.add(name)
        self.given_up.add(name)
        await self.client[name].abort_requests_async([name])

    async def go_on(self, name: str, more: bool) -> None:
        """A further part of an input that is streamed, the last one or not."""
        if self.sent[name][-1].resumable:
            first = self.sent[name][0]
            size = 1 + len(self.sent[name])
            part = asked(name, size, first.length, first.data_parallel_rank, more)
            self.sent[name].append(part)
            await self.client[name].add_request_async(part)

    def look(self) -> None:
        """Invariants."""
        for client in self.setup.clients:
            for tracked in client.scheduler.requests:
                if tracked.delivery is Delivery.SENT and tracked.worker is not None:
                    there = client.core_engines[tracked.worker]
                    assert client.reqs_in_flight[tracked.id] == there, "where the policy said"
            books = list(client.reqs_in_flight.values())
            assert {one: n for one, n in client.engine_inflight.items() if n} == {
                one: books.count(one) for one in set(books)
            }
        for number, engine in enumerate(self.setup.engines):
            for request in engine.seen:
                assert request.data_parallel_rank in (None, number)
                assert request.request_id not in self.never

    async def finish(self) -> None:
        """All comes to its end, though no time passes in which anything would be overdue."""
        for name in self.sent.keys() - self.given_up:
            await self.go_on(name, more=False)
        await self.setup.run_out()
        self.look()
        for name, parts in self.sent.items():
            there = [
                [one for one in engine.seen if one.request_id == name]
                for engine in self.setup.engines
            ]
            arrived = [one for one in there if one]
            if name in self.never:
                assert arrived == []
                continue
            assert len(arrived) == 1, "one engine, and that one only"
            sizes = [len(one.prompt_token_ids or ()) for one in arrived[0]]
            expected_sizes = [len(one.prompt_token_ids or ()) for one in parts]
            if name in self.given_up:
                assert sizes == expected_sizes[: len(sizes)], (
                    "in order, and nothing after the abort"
                )
            else:
                assert sizes == expected_sizes, "in order, and once"
            assert self.setup.ended[name] == 1
        for client in self.setup.clients:
            assert client.scheduler.requests == ()
            assert not client.reqs_in_flight
            assert set(client.engine_inflight.values()) <= {0}

    def look_at_policies(self) -> None:
        """They have been asked to the end, and know of nothing any more."""
        for client in self.setup.clients:
            scheduler = client.scheduler
            assert scheduler.mode is RoutingMode.POLICY
            again = scheduler._client.new_reports(scheduler._rank_loads)
            assert again == (), "the last were read, and each is read once"
        policy = self.setup.policy
        assert isinstance(policy, RequestRouter)
        assert policy.unassigned == 0
        assert set(policy.loads) == {0}
