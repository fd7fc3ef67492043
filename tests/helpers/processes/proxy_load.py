"""Many requests to servers that are processes, one of which is killed and comes back meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.fakes.fake_server_process import FakeProcess, events_of
from helpers.harnesses.proxy_setup import tokens_of
from helpers.tiers import DEEP

REQUESTS, AT_ONCE, WATCHDOG = (10_000, 500, 900.0) if DEEP else (1_000, 100, 250.0)
SERVERS, TOKENS, SLOTS, PACE = 3, 12, 24, 0.005
DOOMED = "w1"
"""The server that is killed."""


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


@dataclass
class Attempt:
    """What one server did for a request that it was sent, by its own record.

    Attributes:
        tokens: their numbers, in the order in which they were made.
        ended: whether it came to the end of the answer.
    """

    worker: str
    tokens: list[int] = field(default_factory=list)
    ended: bool = False


def attempts_of(events: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """Of one request; those of each server in its own order."""
    attempts: list[Attempt] = []
    for one in events:
        if one["event"] == "begin":
            attempts.append(Attempt(one["worker"]))
        assert attempts, "a server answers what it was never sent"
        assert attempts[-1].worker == one["worker"]
        assert not attempts[-1].ended, "a server goes on behind the end"
        if one["event"] == "token":
            attempts[-1].tokens.append(one["index"])
        attempts[-1].ended = one["event"] == "end"
    return attempts


@contextmanager
def three_servers(folder: Path) -> Iterator[list[FakeProcess]]:
    """Started, and ended behind it; the second one is `DOOMED`."""
    servers = [FakeProcess(f"w{n}", folder / f"w{n}.jsonl", SLOTS, PACE) for n in range(SERVERS)]
    try:
        for one in servers:
            one.start()
        yield servers
    finally:
        for one in servers:
            one.close()


@dataclass
class Load:
    """`REQUESTS` of them, `AT_ONCE` at once; `DOOMED` dies at a quarter, and starts at the half.

    The last quarter waits until it serves again, however soon the rest was answered.

    Attributes:
        ask: one request by its number, to its end.
        doomed: the server.
        serves: whether the proxy believes it to serve; called in a thread.
        first_life: answers that the server had come to the end of when it died.
    """

    ask: Callable[[int], Awaitable[object]]
    doomed: FakeProcess
    serves: Callable[[], bool]
    first_life: int = 0
    ended: int = 0
    _server_back: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Within `WATCHDOG` seconds."""
        numbers = iter(range(REQUESTS))
        async with asyncio.timeout(WATCHDOG):
            await self._until_serving()  # else none of the first requests may go to it
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(self._client(numbers))
                group.create_task(self._disturb())

    async def _client(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            if number >= REQUESTS * 3 // 4:
                await self._server_back.wait()
            await self.ask(number)
            self.ended += 1

    async def _disturb(self) -> None:
        while self.ended < REQUESTS // 4:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self.doomed.kill)
        self.first_life = answers_of(self.doomed)
        while self.ended < REQUESTS // 2:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self.doomed.start)
        await self._until_serving()
        self._server_back.set()

    async def _until_serving(self) -> None:
        while not await asyncio.to_thread(self.serves):
            await asyncio.sleep(0.05)


def answers_of(fake: FakeProcess) -> int:
    """Those that a server has come to the end of, so far."""
    return sum(one["event"] == "end" for each in events_of([fake]).values() for one in each)
