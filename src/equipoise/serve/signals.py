"""Signals whose handlers raise, while an event loop runs.

A handler raises wherever the loop is just then: within a callback the loop logs that and goes on,
and within a task of a group it comes out wrapped.
"""

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGHUP)


async def until_told(work: Coroutine[Any, Any, T]) -> T:
    """What `work` comes to; a signal cancels it, and is then handed to its own handler.

    Signals that are ignored, or that nobody handles, are left as they are.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    main = threading.current_thread() is threading.main_thread()
    found = {number: signal.getsignal(number) for number in SIGNALS if main}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    told: list[signal.Signals] = []

    def hear(number: signal.Signals) -> None:
        assert task is not None
        told.append(number)
        task.cancel()

    for number in handlers:
        loop.add_signal_handler(number, hear, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not told:
            raise
    finally:
        for number, handler in handlers.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
    handlers[told[0]](told[0], None)
    raise asyncio.CancelledError  # its handler did not raise
