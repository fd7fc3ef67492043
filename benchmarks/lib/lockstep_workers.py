"""Servers of the OpenAI API in lockstep, as the data-parallel ranks of an engine.

    python lockstep_workers.py WORKERS SLOTS STEP_SECONDS SPREAD_SECONDS

Each has a port; says them on standard output, as a list of JSON. A worker admits requests in order
while it has slots, and in each step makes one token for each; nobody begins a step before all have
ended the one before. Tokens of a step leave in the order of a draw, worker by worker, over the
spread: as an API server passes them on. `GET /steps` of any worker returns, of each step so far,
the KV tokens of every worker and the number of requests that ran.

Started by `live_routing.py`.
"""

import asyncio
import json
import random
import sys
from collections import deque
from dataclasses import dataclass, field
from time import monotonic

from aiohttp import web

TOKEN = b'data: {"choices": [{"index": 0, "text": "token"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@dataclass(eq=False)
class Generation:
    """One request; `ended` is set when all of its tokens were sent."""

    prompt: int
    output: int
    response: web.StreamResponse
    made: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class Worker:
    """One rank."""

    slots: int
    waiting: deque[Generation] = field(default_factory=deque)
    running: list[Generation] = field(default_factory=list)

    def admit(self) -> None:
        """Give slots to those that wait."""
        while self.waiting and len(self.running) < self.slots:
            self.running.append(self.waiting.popleft())

    @property
    def tokens(self) -> int:
        """In the KV cache."""
        return sum(each.prompt + each.made for each in self.running)

    async def send_tokens(self) -> None:
        """Make and send one token for each request."""
        for each in list(self.running):
            each.made += 1
            is_last = each.made == each.output
            try:
                await each.response.write(TOKEN + DONE if is_last else TOKEN)
            except ConnectionError:
                is_last = True
            if is_last:
                self.running.remove(each)
                each.ended.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`, streamed, of a prompt of token ids."""
        body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        generation = Generation(len(body["prompt"]), body["max_tokens"], response)
        self.waiting.append(generation)
        await generation.ended.wait()
        return response


async def step(workers: list[Worker], spread: float) -> tuple[list[int], int]:
    """Play one step; the KV tokens of each worker in it, and how many requests ran."""
    for worker in workers:
        worker.admit()
    played = [worker.tokens for worker in workers], sum(len(worker.running) for worker in workers)
    for worker in random.sample(workers, len(workers)):
        await worker.send_tokens()
        await asyncio.sleep(spread / len(workers))
    return played


async def main(workers: int, slots: int, seconds: float, spread: float) -> None:
    """Serve until killed."""
    ranks = [Worker(slots) for _ in range(workers)]
    steps: list[tuple[list[int], int]] = []

    async def played(_: web.Request) -> web.Response:
        return web.json_response(steps)

    async def healthy(_: web.Request) -> web.Response:
        return web.Response()

    ports = []
    for rank in ranks:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/completions", rank.answer)
        app.router.add_get("/steps", played)
        app.router.add_get("/health", healthy)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert runner.addresses
        ports.append(runner.addresses[0][1])
    print(json.dumps(ports), flush=True)
    while True:
        began = monotonic()
        steps.append(await step(ranks, spread))
        await asyncio.sleep(max(0.0, began + seconds - monotonic()))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
