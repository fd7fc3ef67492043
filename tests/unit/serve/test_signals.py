"""A signal ends what an event loop runs, wherever the loop is when it comes."""

import asyncio
import signal
from collections.abc import Callable

import pytest

from equipoise.cli.process import SIGNALS, TerminatedBySignal, raise_on_signal
from equipoise.serve.load_client import cancel_on_signal

PATIENCE = 20.0


async def _group(*works: Callable[[], object]) -> None:
    """Tasks that do this first, and then nothing for long."""

    async def one(work: Callable[[], object]) -> None:
        await asyncio.sleep(0)
        work()
        await asyncio.wait_for(asyncio.Event().wait(), PATIENCE)

    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(one(work))


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("where", ["task", "callback"])
def test_signal_raises_unwrapped_terminated_from_event_loop(
    number: signal.Signals, where: str
) -> None:
    def within_a_callback() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, number)

    def within_a_task() -> None:
        signal.raise_signal(number)

    first = within_a_task if where == "task" else within_a_callback
    before = signal.getsignal(number)
    with raise_on_signal(), pytest.raises(TerminatedBySignal) as error:
        asyncio.run(cancel_on_signal(_group(first, lambda: None)))
    assert error.value.number == number
    assert signal.getsignal(number) == before


def test_finished_coroutine_returns_result_and_restores_handlers() -> None:
    async def work() -> int:
        return 7

    with raise_on_signal():
        before = [signal.getsignal(number) for number in SIGNALS]
        assert asyncio.run(cancel_on_signal(work())) == 7
        assert [signal.getsignal(number) for number in SIGNALS] == before


def test_cancelled_coroutine_without_handler_stays_cancelled() -> None:
    async def work() -> None:
        async with asyncio.timeout(0.01):
            await cancel_on_signal(asyncio.Event().wait())

    with pytest.raises(TimeoutError):
        asyncio.run(work())
