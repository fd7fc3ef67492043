"""A process group as a communicator: what is translated, and what is left as it is."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]

from equipoise.backends.c10d.backend import c10d_backend
from equipoise.backends.c10d.communicator import C10dCommunicator
from equipoise.backends.c10d.work import MIN_WAIT, C10dWork
from equipoise.backends.common.library_trial import OUTCOME, UNTRIED
from equipoise.hal.capabilities import Operation
from equipoise.hal.communicator import Exchange, Rendezvous
from equipoise.hal.errors import (
    BackendUnavailable,
    CommunicatorFailed,
    OperationTimeout,
    ResultPending,
    Unsupported,
)

ALONE = Rendezvous(rank=0, size=1, host="", port=0, deadline=30.0)
LONG = 1000.0


class FakeHandle:
    """A handle of c10d: what it says, what its wait raises, and how it was waited for."""

    def __init__(self, error: str = "", completed: bool = False) -> None:
        self.error = error
        self.completed = completed
        self.waits: list[float | None] = []

    def is_completed(self) -> bool:
        return self.completed

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits.append(timeout.total_seconds() if timeout else None)
        if self.error:
            raise RuntimeError(self.error)
        return True


@pytest.fixture
def alone() -> Iterator[C10dCommunicator]:
    with closing(C10dCommunicator("gloo", HashStore(), "tests", (0,), ALONE, UNTRIED)) as group:
        yield group


def test_result_is_wait_with_its_timeout() -> None:
    handle = FakeHandle()
    C10dWork([handle], "isend to 1 of 'p'", LONG).result(2.0)
    assert handle.waits == [pytest.approx(2.0, abs=0.5)]


def test_result_without_time_still_passes_a_timeout() -> None:
    handle = FakeHandle()
    C10dWork([handle], "isend to 1 of 'p'", LONG).result(0.0)
    assert handle.waits == [MIN_WAIT]


def test_result_beyond_the_deadline_leaves_the_timeout_to_the_library() -> None:
    handle = FakeHandle()
    C10dWork([handle], "isend to 1 of 'p'", 1.0).result(5.0)
    assert handle.waits == [None]


@pytest.mark.parametrize(
    ("text", "timeout", "expected"),
    [
        ("Timed out waiting 2000ms for recv operation", 2.0, ResultPending),
        ("Timed out waiting 2000ms for recv operation", 2 * LONG, OperationTimeout),
        ("Application timeout caused pair closure", 2.0, CommunicatorFailed),
        ("Connection closed by peer", 2 * LONG, CommunicatorFailed),
    ],
)
def test_error_of_wait_names_operation_and_purpose(
    text: str, timeout: float, expected: type[Exception]
) -> None:
    work = C10dWork([FakeHandle(f"{text}\nand a stack")], "isend to 1 of 'p'", LONG)
    with pytest.raises(expected, match=r"isend to 1 of 'p'") as caught:
        work.result(timeout)
    assert type(caught.value) is expected
    assert "stack" not in str(caught.value)


def test_batch_is_done_when_each_handle_is() -> None:
    ended, pending = FakeHandle(completed=True), FakeHandle()
    assert not C10dWork([ended, pending], "exchange of 'p'", LONG).done()
    assert C10dWork([ended], "exchange of 'p'", LONG).done()
    assert C10dWork([], "exchange of 'p'", LONG).done()


def test_cancel_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="cannot cancel"):
        C10dWork([FakeHandle()], "isend to 1 of 'p'", LONG).cancel()


def test_group_of_one_gives_definitions(alone: C10dCommunicator) -> None:
    tensor = torch.arange(6, dtype=torch.int32).view(1, 2, 3)
    calls: list[Callable[[torch.Tensor], C10dWork]] = [
        lambda out: alone.all_gather(out, tensor[0]),
        lambda out: alone.reduce_scatter(out[0], tensor),
        lambda out: alone.all_to_all(out, tensor),
        lambda out: alone.all_to_all_uneven(out, tensor, [1], [1]),
    ]
    for call in calls:
        out = torch.zeros_like(tensor)
        call(out).result(LONG)
        assert torch.equal(out, tensor)


def test_empty_round_is_no_call(alone: C10dCommunicator) -> None:
    work = alone.exchange(Exchange((), ()))
    work.result(0.0)
    assert work.done()


def test_shape_is_refused_before_the_call(alone: C10dCommunicator) -> None:
    with pytest.raises(Unsupported, match="shape"):
        alone.all_gather(torch.zeros(2, 3), torch.zeros(3))


def test_undeclared_dtype_and_operation_are_refused(alone: C10dCommunicator) -> None:
    alone.capabilities = replace(
        UNTRIED,
        operations=frozenset(Operation) - {Operation.BARRIER},
        dtypes=frozenset({torch.uint8}),
        reductions=frozenset(),
    )
    with pytest.raises(Unsupported, match="does not offer"):
        alone.barrier()
    with pytest.raises(Unsupported, match="float32 is not declared"):
        alone.broadcast(torch.zeros(1), 0)
    with pytest.raises(Unsupported, match="uint8 is not declared"):
        alone.all_reduce(torch.zeros(1, dtype=torch.uint8))


def test_refusal_of_the_library_is_unsupported(alone: C10dCommunicator) -> None:
    out, tensor = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(Unsupported, match=r"all_gather of 'tests' is refused"):
        alone.all_gather(out, tensor)


def test_closed_communicator_takes_nothing(alone: C10dCommunicator) -> None:
    alone.close()
    alone.close()
    with pytest.raises(CommunicatorFailed, match="was closed"):
        alone.barrier()


def test_group_that_cannot_be_made_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommunicatorFailed, match="made no group for 'tests'"):
        C10dCommunicator("no-such", HashStore(), "tests", (0,), ALONE, UNTRIED)
    assert distributed.group.WORLD is None


def test_default_group_and_hooks_stay_as_they_were(alone: C10dCommunicator) -> None:
    hook = sys.excepthook
    other = C10dCommunicator("gloo", HashStore(), "other", (0,), ALONE, UNTRIED)
    assert not distributed.is_initialized()
    assert sys.excepthook is hook
    alone.barrier().result(LONG)
    other.close()
    alone.barrier().result(LONG)


def test_gloo_declares_what_it_can_do_alone() -> None:
    declared = c10d_backend("gloo").capabilities
    assert declared.operations == frozenset(Operation) - {Operation.CANCEL}
    assert torch.float32 in declared.reductions
    assert torch.int16 not in declared.dtypes
    assert not declared.abort
    assert not declared.rebuild


def test_processes_of_a_run_share_one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(f"{OUTCOME}C10D_GLOO", raising=False)
    first = c10d_backend("gloo").capabilities
    monkeypatch.setattr("equipoise.backends.common.library_trial.try_library", _never)
    assert os.environ[f"{OUTCOME}C10D_GLOO"]
    assert c10d_backend("gloo").capabilities == first


def _never(*_: Any) -> None:
    raise AssertionError("tried twice")


def test_unknown_backend_lists_known_ones() -> None:
    with pytest.raises(BackendUnavailable, match=r"no backend 'pigeon'; it has: .*gloo"):
        c10d_backend("pigeon")
    with pytest.raises(BackendUnavailable, match="no_such_module does not import"):
        c10d_backend("no_such_module:pigeon")


def test_backend_that_makes_no_group_is_unavailable() -> None:
    if distributed.is_mpi_available():
        pytest.skip("this torch has MPI")
    with pytest.raises(BackendUnavailable, match="doesn't have MPI built in"):
        _ = c10d_backend("mpi").capabilities
