"""A deployment of Ray Serve that decodes like an LLM, without a model, behind Equipoise's router.

    cd examples/ray_serve
    serve run decoder_app:app     # and then: curl http://127.0.0.1:8000 -d '{"max_tokens": 20}'
    python decoder_app.py

Each replica makes steps: a token for every request that it has, in a time that grows with the
tokens in its KV cache. Started as a program, it sends the same heavy-tailed load through Ray's own
router and through Equipoise's, in turns, and prints what it took.
"""

import asyncio
import random
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve
from starlette.requests import Request

from equipoise.integrations.ray.settings import request_router_config

REPLICAS, SLOTS = 3, 8
STEP_SECONDS, TOKEN_SECONDS = 0.004, 0.000008
"""A step takes the first, and the second for every token in the KV cache of the replica."""


@dataclass(eq=False)
class Decoding:
    """A request under way.

    Attributes:
        size: tokens in the KV cache.
        remaining_tokens: tokens of the answer that no step has generated.
        generated_tokens: those of it that are not yet sent to the caller.
    """

    size: int
    remaining_tokens: int
    generated_tokens: asyncio.Queue[int] = field(default_factory=asyncio.Queue)


class Decoder:
    """A replica: all its requests make their next token in the same step."""

    def __init__(self) -> None:
        self._running: set[Decoding] = set()
        self._steps: asyncio.Task[None] | None = None
        self._generated = 0
        self._history: list[tuple[float, int]] = [(0.0, 0)]

    async def __call__(self, request: Request) -> int:
        """Over HTTP: see `complete`."""
        return await self.complete(await request.json())

    async def complete(self, request: Mapping[str, Any]) -> int:
        """Tokens of the answer to `{"prompt": [tokens], "max_tokens": n}`."""
        return sum([1 async for _ in self.stream(request)])

    async def stream(self, request: Mapping[str, Any]) -> AsyncIterator[int]:
        """The answer, token by token."""
        decoding = Decoding(len(request.get("prompt", ())), request["max_tokens"])
        self._running.add(decoding)
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._step())
        try:
            for _ in range(request["max_tokens"]):
                yield await decoding.generated_tokens.get()
        finally:
            self._running.discard(decoding)

    def record_routing_stats(self) -> dict[str, int]:
        """What Equipoise's router reads: tokens made since the start, and requests that run."""
        return {"generated_tokens": self._generated, "ongoing_requests": len(self._running)}

    def history(self) -> list[tuple[float, int]]:
        """Tokens in the KV cache from each of these times on; the clock is the machine's."""
        return self._history

    async def _step(self) -> None:
        while self._running:
            load = sum(one.size for one in self._running)
            self._history.append((time.monotonic(), load))
            await asyncio.sleep(STEP_SECONDS + TOKEN_SECONDS * load)
            for one in [one for one in self._running if one.remaining_tokens]:
                one.size += 1
                one.remaining_tokens -= 1
                one.generated_tokens.put_nowait(one.size)
                self._generated += 1
                if not one.remaining_tokens:
                    self._running.discard(one)
        self._history.append((time.monotonic(), 0))


def build(router: Any = None, decoder: type[Decoder] = Decoder) -> Any:
    """The application, with a `RequestRouterConfig`, or with Ray's own router for None."""
    deployment = serve.deployment(
        name="decoder",
        num_replicas=REPLICAS,
        max_ongoing_requests=SLOTS,
        ray_actor_options={"num_cpus": 0.1},
        **({} if router is None else {"request_router_config": router}),
    )
    return deployment(decoder).bind()


app = build(request_router_config(request_routing_stats_period_s=1))


def load(requests: int, seed: int = 0) -> list[dict[str, Any]]:
    """Requests with heavy-tailed prompts and answers."""
    draw = random.Random(seed)
    return [
        {
            "prompt": [0] * min(4_000, int(100 * draw.paretovariate(1.0))),
            "max_tokens": min(100, int(10 * draw.paretovariate(1.2))),
        }
        for _ in range(requests)
    ]


async def replay(handle: Any, requests: Sequence[Mapping[str, Any]]) -> str:
    """Sends all at once; returns a line that says what it took, and how even the replicas were."""
    began, clock = time.perf_counter(), time.monotonic()

    async def send(request: Mapping[str, Any]) -> float:
        tokens = await handle.complete.remote(request)
        assert tokens == request["max_tokens"]
        return time.perf_counter() - began

    seconds = sorted(await asyncio.gather(*map(send, requests)))
    histories = await handle.broadcast("history").results_async(timeout_s=60)
    # Until three quarters are answered: then nothing is left to be balanced.
    saturated = seconds[len(seconds) * 3 // 4]
    mean = sum(seconds) / len(seconds)
    return (
        f"all in {seconds[-1]:.2f} s, in the mean {mean:.2f} s; "
        f"idle {idle_ratio(histories, clock, clock + saturated):.1%}"
    )


def idle_ratio(histories: Sequence[list[tuple[float, int]]], start: float, end: float) -> float:
    """The part of replicas x largest load that is no load, in the mean over that time."""
    ratios = []
    for moment in range(int(100 * (end - start))):
        at = (start + moment / 100, 1 << 60)
        loads = [history[bisect_right(history, at) - 1][1] for history in histories]
        if max(loads):
            ratios.append(1 - sum(loads) / len(loads) / max(loads))
    return sum(ratios) / len(ratios)


def compare(pairs: int, requests: int) -> None:
    """Both routers on the same loads, in turns."""
    for pair in range(pairs):
        for name, router in (
            ("ray", None),
            ("equipoise", request_router_config(request_routing_stats_period_s=1)),
        ):
            handle = serve.run(build(router), name=name, route_prefix=f"/{name}")
            print(f"{name}: {asyncio.run(replay(handle, load(requests, pair)))}", flush=True)
            serve.delete(name)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20)
    try:
        compare(3, 300)
    finally:
        serve.shutdown()
        ray.shutdown()
