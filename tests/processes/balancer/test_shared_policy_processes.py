"""Front ends in processes of their own share a policy, and some of the processes are killed."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import shared_policy_process
from helpers.watchdog import WATCHDOG

PROGRAM = str(Path(shared_policy_process.__file__))
FAILED = "the policy that front ends share is lost: the connection has ended"


class Child:
    """One of the processes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, *command: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        return json.loads(await self.process.stdout.readline())

    async def become(self, expected: Any) -> None:
        """Wait until its status is this; the watchdog says how long."""
        while (status := await self.ask("status")) != expected:
            print(status)
            await asyncio.sleep(0.02)

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def family(folder: Path) -> AsyncIterator[Callable[[str], Awaitable[Child]]]:
    """Starts children, and ends them."""
    children: list[Child] = []

    async def start(role: str) -> Child:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, PROGRAM, role, "test", stdin=pipe, stdout=pipe,
            env={**os.environ, "TMPDIR": str(folder)},
        )  # fmt: skip
        children.append(Child(process))
        return children[-1]

    try:
        async with asyncio.timeout(WATCHDOG):
            yield start
    finally:
        for child in children:
            if child.process.returncode is None:
                await child.kill()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short enough for the path of a socket."""
    return tmp_path_factory.mktemp("s")


def test_slots_of_killed_front_end_go_to_the_others(folder: Path) -> None:
    async def work() -> None:
        async with family(folder) as start:
            server, first, second = [
                await start(role) for role in ("serve", "front_end", "front_end")
            ]
            await first.ask("submit", "a")
            await first.ask("submit", "b")
            await first.become([{"a": "BoundToWorker", "b": "BoundToWorker"}, []])
            for name in ("c", "d", "e"):
                await second.ask("submit", name)
            await server.become([2, [1, 1], 3])
            await first.kill()
            await second.become([{"c": "BoundToWorker", "d": "BoundToWorker", "e": "Queued"}, []])
            await second.ask("finish", "c")
            await server.become([1, [1, 1], 0])

    asyncio.run(work())


def test_front_ends_of_killed_server_fail_their_policy_once(folder: Path) -> None:
    async def work() -> None:
        async with family(folder) as start:
            server, *front_ends = [
                await start(role) for role in ("serve", "front_end", "front_end")
            ]
            for child in front_ends:
                await child.ask("submit", "a")
                await child.ask("submit", "b")
            await server.become([2, [1, 1], 2])
            await server.kill()
            for child in front_ends:
                await child.become([{"a": "RequestClosed", "b": "RequestClosed"}, [FAILED]])
            # One that was killed leaves its socket, which the next one replaces.
            again = await start("serve")
            late = await start("front_end")
            await late.ask("submit", "c")
            await again.become([1, [1, 0], 0])

    asyncio.run(work())


def test_front_end_that_starts_first_waits_for_the_server(folder: Path) -> None:
    async def work() -> None:
        async with family(folder) as start:
            front_end = await start("front_end")
            await front_end.ask("submit", "a")
            await front_end.become([{"a": "Queued"}, []])
            server = await start("serve")
            await front_end.become([{"a": "BoundToWorker"}, []])
            await server.ask("close")
            assert list(folder.iterdir()) == []
            [states, [failure]] = await front_end.ask("status")
            while states == {"a": "BoundToWorker"}:
                [states, [failure]] = await front_end.ask("status")
            assert "the process that has the policy ends" in failure

    asyncio.run(work())
