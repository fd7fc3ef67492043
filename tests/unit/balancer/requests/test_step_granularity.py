"""A step's tokens, told at once, by worker, or one by one: the same decisions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balancer.requests.policy import Capacity, Decision, Request, RequestId
from equipoise.balancer.requests.policy_settings import POLICIES, RoutingPolicySettings, WhenFull
from equipoise.balancer.requests.request_router import RequestRouter

Event: TypeAlias = tuple[dict[int, int], list[int]]
"""Tokens by request, and the requests that end."""
Telling: TypeAlias = Callable[[Mapping[int, int], Sequence[int], Random], Iterator[Event]]
"""From the worker of each running request, and those that end in this step, to events."""


def at_once(homes: Mapping[int, int], ended: Sequence[int], dice: Random) -> Iterator[Event]:
    yield dict.fromkeys(homes, 1), list(ended)


def by_worker(homes: Mapping[int, int], ended: Sequence[int], dice: Random) -> Iterator[Event]:
    workers = sorted(set(homes.values()))
    dice.shuffle(workers)
    for worker in workers:
        names = [name for name, home in homes.items() if home == worker]
        yield dict.fromkeys(names, 1), [name for name in names if name in ended]


def one_by_one(homes: Mapping[int, int], ended: Sequence[int], dice: Random) -> Iterator[Event]:
    names = list(homes)
    dice.shuffle(names)
    for name in names:
        yield {name: 1}, [name] * (name in ended)


def ends_before_tokens(
    homes: Mapping[int, int], ended: Sequence[int], dice: Random
) -> Iterator[Event]:
    if ended:
        yield dict.fromkeys(ended, 1), list(ended)
    if len(ended) < len(homes):
        yield {name: 1 for name in homes if name not in ended}, []


@dataclass
class Engine:
    """Workers in lockstep behind a router."""

    router: RequestRouter
    telling: Telling
    seed: int

    def play(self, sizes: Sequence[int], outputs: Sequence[int], backlog: int) -> list[object]:
        """Serve all; returns what was decided in each step."""
        dice, homes, made = Random(self.seed), {}, dict[int, int]()
        history: list[object] = []
        arrived = 0

        def take(decision: Decision) -> None:
            for assignment in decision.assignments:
                name = assignment.request
                assert isinstance(name, int)
                homes[name], made[name] = assignment.worker, 0
                decided.append((name, assignment.worker))

        while arrived < len(sizes) or homes:
            decided: list[tuple[int, int]] = []
            while arrived < len(sizes) and self.router.unassigned < backlog:
                take(self.router.on_arrival(Request(id=arrived, size=sizes[arrived])))
                arrived += 1
            running = dict(homes)
            for name in running:
                made[name] += 1
            ended = [name for name in running if made[name] == outputs[name]]
            for counts, finished in self.telling(running, ended, dice):
                tokens: dict[RequestId, int] = {name: count for name, count in counts.items()}
                for name in finished:
                    del homes[name]
                take(self.router.on_tokens(tokens, finished))
            history.append((decided, self.router.loads))
        return history


@pytest.mark.parametrize("telling", [by_worker, one_by_one, ends_before_tokens])
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=20)
@given(
    workers=st.integers(1, 4),
    slots=st.integers(1, 4),
    backlog=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
def test_decisions_do_not_depend_on_how_a_step_is_told(
    name: str, telling: Telling, workers: int, slots: int, backlog: int, seed: int
) -> None:
    dice = Random(seed)
    sizes = [dice.randint(1, 900) for _ in range(24)]
    outputs = [dice.randint(1, 9) for _ in sizes]
    policy = RoutingPolicySettings(name=name, when_full=WhenFull.HOLD, seed=seed)

    def serve(how: Telling) -> list[object]:
        router = RequestRouter(policy, [Capacity(slots=slots)] * workers)
        return Engine(router, how, seed).play(sizes, outputs, backlog)

    assert serve(telling) == serve(at_once)
