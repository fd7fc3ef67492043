"""A part of a task that is ended: by a deadline that may be moved, or by somebody else."""

import asyncio

import pytest
from helpers.harnesses.proxy_setup import run

from equipoise.serve.cancel_scope import CancelReason, CancelScope, ScopeCancelled

FOREVER = 3600.0


async def wait_in_scope(scope: CancelScope) -> None:
    async with scope:
        await asyncio.Event().wait()


def test_scope_survives_postponed_deadline() -> None:
    async def work() -> None:
        async with CancelScope() as scope:
            scope.set_timeout(0.02, CancelReason.TOKEN)
            scope.set_timeout(FOREVER, CancelReason.TOKEN)
            await asyncio.sleep(0.1)

    assert run(work()) is None


def test_scope_ends_at_earlier_deadline() -> None:
    async def work() -> None:
        async with CancelScope() as scope:
            scope.set_timeout(FOREVER, CancelReason.FIRST_TOKEN)
            scope.set_timeout(0.02, CancelReason.CLIENT_STALLED)
            await asyncio.Event().wait()

    with pytest.raises(ScopeCancelled) as error:
        run(work())
    assert error.value.reason is CancelReason.CLIENT_STALLED


def test_scope_total_deadline_precedes_later_one() -> None:
    async def work() -> None:
        async with CancelScope(asyncio.get_running_loop().time() + 0.02) as scope:
            scope.set_timeout(FOREVER, CancelReason.TOKEN)
            await asyncio.Event().wait()

    with pytest.raises(ScopeCancelled) as error:
        run(work())
    assert error.value.reason is CancelReason.TOTAL


def test_scope_keeps_first_interrupt_reason() -> None:
    async def work() -> None:
        scope = CancelScope()
        task = asyncio.create_task(wait_in_scope(scope))
        await asyncio.sleep(0)
        scope.cancel(CancelReason.LOST_BEFORE_FIRST_TOKEN)
        scope.cancel(CancelReason.WORKER_LOST)
        await task

    with pytest.raises(ScopeCancelled) as error:
        run(work())
    assert error.value.reason is CancelReason.LOST_BEFORE_FIRST_TOKEN


def test_scope_passes_on_task_cancellation() -> None:
    async def work() -> bool:
        task = asyncio.create_task(wait_in_scope(CancelScope()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert run(work())


def test_scope_is_not_interrupted_after_exit() -> None:
    async def work() -> str:
        async with CancelScope() as scope:
            scope.set_timeout(0.01, CancelReason.TOKEN)
        scope.cancel(CancelReason.WORKER_LOST)
        await asyncio.sleep(0.05)
        return "whole"

    assert run(work()) == "whole"


def test_scope_passes_on_foreign_timeout_error() -> None:
    async def work() -> None:
        async with CancelScope():
            raise TimeoutError("theirs")

    with pytest.raises(TimeoutError, match="theirs"):
        run(work())
