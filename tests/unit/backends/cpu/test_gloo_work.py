"""Handles of gloo operations, over an operation that the test ends."""

import threading
import traceback
from collections.abc import Callable

import pytest

from equipoise.backends.cpu.gloo_work import GlooWork
from equipoise.hal.errors import CommunicatorFailed


def make_work(finish: Callable[[float], None], failures: list[CommunicatorFailed]) -> GlooWork:
    return GlooWork(finish, (), "irecv of 'tests'", 5.0, failures.append, lambda _: None)


def test_failed_work_raises_short_traceback_every_time() -> None:
    def finish(_: float) -> None:
        raise RuntimeError("Connection closed by peer")

    work = make_work(finish, [])
    lengths = []
    for _ in range(50):
        with pytest.raises(CommunicatorFailed, match="lost its peer") as error:
            work.result(1.0)
        lengths.append(len(traceback.extract_tb(error.value.__traceback__)))
    assert lengths[0] == lengths[-1]
    assert isinstance(error.value.__cause__, RuntimeError)


def test_cancelled_work_ends_before_gloo_lets_go() -> None:
    let_go, failures = threading.Event(), list[CommunicatorFailed]()

    def finish(seconds: float) -> None:
        let_go.wait(seconds)

    work = make_work(finish, failures)
    work.cancel()
    assert work.done()
    with pytest.raises(CommunicatorFailed, match="was cancelled"):
        work.result(0.0)
    let_go.set()
    with pytest.raises(CommunicatorFailed, match="was cancelled"):
        work.result(5.0)
    assert [str(failure) for failure in failures] == ["irecv of 'tests' was cancelled"]
