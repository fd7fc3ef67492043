"""A part of a task that is ended: by a deadline that may be moved, or by somebody else."""

import asyncio

import pytest
from helpers.harnesses.proxy_site import run

from equipoise.serve.cancel_scope import Interrupted, Reason, Scope

FOREVER = 3600.0


async def blocked(scope: Scope) -> None:
    async with scope:
        await asyncio.Event().wait()


def test_scope_survives_postponed_deadline() -> None:
    async def work() -> None:
        async with Scope() as scope:
            scope.within(0.02, Reason.TOKEN)
            scope.within(FOREVER, Reason.TOKEN)
            await asyncio.sleep(0.1)

    assert run(work()) is None


def test_scope_ends_at_earlier_deadline() -> None:
    async def work() -> None:
        async with Scope() as scope:
            scope.within(FOREVER, Reason.FIRST_TOKEN)
            scope.within(0.02, Reason.STALLED)
            await asyncio.Event().wait()

    with pytest.raises(Interrupted) as ended:
        run(work())
    assert ended.value.reason is Reason.STALLED


def test_scope_total_deadline_precedes_later_one() -> None:
    async def work() -> None:
        async with Scope(asyncio.get_running_loop().time() + 0.02) as scope:
            scope.within(FOREVER, Reason.TOKEN)
            await asyncio.Event().wait()

    with pytest.raises(Interrupted) as ended:
        run(work())
    assert ended.value.reason is Reason.TOTAL


def test_scope_keeps_first_interrupt_reason() -> None:
    async def work() -> None:
        scope = Scope()
        task = asyncio.create_task(blocked(scope))
        await asyncio.sleep(0)
        scope.interrupt(Reason.UNBOUND)
        scope.interrupt(Reason.LOST)
        await task

    with pytest.raises(Interrupted) as ended:
        run(work())
    assert ended.value.reason is Reason.UNBOUND


def test_scope_passes_on_task_cancellation() -> None:
    async def work() -> bool:
        task = asyncio.create_task(blocked(Scope()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert run(work())


def test_scope_is_not_interrupted_after_exit() -> None:
    async def work() -> str:
        async with Scope() as scope:
            scope.within(0.01, Reason.TOKEN)
        scope.interrupt(Reason.LOST)
        await asyncio.sleep(0.05)
        return "whole"

    assert run(work()) == "whole"


def test_scope_passes_on_foreign_timeout_error() -> None:
    async def work() -> None:
        async with Scope():
            raise TimeoutError("theirs")

    with pytest.raises(TimeoutError, match="theirs"):
        run(work())
