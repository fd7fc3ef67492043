"""Handles of gloo operations, on operations that end as the test says: clause K3."""

import traceback

import pytest

from equipoise.backends.cpu.work import GlooWork
from equipoise.hal.errors import CommunicatorFailed

DEADLINE = 20.0


def failed_work() -> GlooWork:
    def finish(seconds: float) -> None:
        raise RuntimeError("connection closed by peer")

    return GlooWork(finish, (), "irecv of 'x'", DEADLINE, lambda failure: None, lambda work: None)


def raised_by(work: GlooWork) -> CommunicatorFailed:
    with pytest.raises(CommunicatorFailed, match="irecv of 'x' lost its peer") as raised:
        work.result(DEADLINE)
    return raised.value


def test_gloo_result_raises_with_same_traceback_each_time() -> None:
    work = failed_work()
    first, *_, last = [raised_by(work) for _ in range(100)]
    frames = [len(traceback.extract_tb(error.__traceback__)) for error in (first, last)]
    assert frames[0] == frames[1] <= 3


def test_gloo_result_names_cause_each_time() -> None:
    work = failed_work()
    causes = [raised_by(work).__cause__ for _ in range(2)]
    assert [str(cause) for cause in causes] == ["connection closed by peer"] * 2
