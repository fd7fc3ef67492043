"""Runs a test that is a coroutine function in an event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")
PATIENCE = 60.0
"""Seconds for one test, or one example of it."""


def in_event_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """The test in a loop of its own; bounded."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(PATIENCE):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run
