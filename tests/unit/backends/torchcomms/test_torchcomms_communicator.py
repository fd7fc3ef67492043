"""A TorchComm as a communicator, over a stand-in with the published signatures."""

import os
import sys
from datetime import timedelta
from enum import Enum
from types import ModuleType
from typing import Any

import pytest
import torch

from equipoise.backends.torchcomms.backend import torchcomms_backend
from equipoise.backends.torchcomms.communicator import TorchCommsCommunicator, TorchCommsWork
from equipoise.hal.capabilities import Operation
from equipoise.hal.communicator import Exchange, PeerBuffer
from equipoise.hal.errors import BackendUnavailable, OperationTimeout, ResultPending


class ReduceOp(Enum):
    """Sums."""

    SUM = "sum"


class Work:
    """A handle; torchcomms' has no wait with a time-out."""

    def __init__(self, error: str = "", completed: bool = True) -> None:
        self.error = error
        self.completed = completed

    def is_completed(self) -> bool:
        return self.completed

    def wait(self) -> None:
        self.wait_blocking()

    def wait_blocking(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


class Batch:
    """Messages that are issued together."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def send(self, tensor: Any, dst: int) -> None:
        self._calls.append(("send", dst))

    def recv(self, tensor: Any, src: int) -> None:
        self._calls.append(("recv", src))

    def issue(self, async_op: bool) -> Work:
        assert async_op
        return Work()


class Comm:
    """A communicator of one rank that knows all collectives but one."""

    def __init__(self, **how: Any) -> None:
        self.how = how
        self.where = os.environ["TORCHCOMM_RANK"], os.environ["TORCHCOMM_SIZE"]
        self.calls: list[Any] = []
        self.finalized = False

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, async_op: bool) -> Work:
            assert async_op
            if name == "reduce_scatter_single":
                raise RuntimeError("reduce_scatter_single not supported by this backend")
            self.calls.append(name)
            return Work()

        return call

    def batch_op_create(self) -> Batch:
        return Batch(self.calls)

    def is_abort_supported(self) -> bool:
        return False

    def finalize(self) -> None:
        self.finalized = True


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[Comm]:
    made: list[Comm] = []
    module = ModuleType("torchcomms")

    def new_comm(backend: str, device: Any, name: str, **how: Any) -> Comm:
        made.append(Comm(backend=backend, device=device, name=name, **how))
        return made[-1]

    module.__dict__.update(new_comm=new_comm, ReduceOp=ReduceOp)
    monkeypatch.setitem(sys.modules, "torchcomms", module)
    for variable in ("TORCHCOMM_RANK", "TORCHCOMM_SIZE", "EQUIPOISE_LIBRARY_TRIAL_TORCHCOMMS_GLOO"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    return made


def test_trial_finds_what_the_backend_lacks(library: list[Comm]) -> None:
    declared = torchcomms_backend("gloo").capabilities
    absent = {Operation.REDUCE_SCATTER, Operation.CANCEL}
    assert declared.operations == frozenset(Operation) - absent
    assert not declared.abort


def test_communicator_is_made_for_its_group(library: list[Comm]) -> None:
    backend = torchcomms_backend("gloo")
    communicator = backend._open_alone(7)
    assert isinstance(communicator, TorchCommsCommunicator)
    made = library[-1]
    assert made.where == ("0", "1")
    assert made.how["timeout"] == timedelta(seconds=30)
    assert made.how["abort_process_on_timeout_or_error"] is False
    assert made.how["device"] == torch.device("cpu")
    blob = torch.zeros(1, dtype=torch.uint8)
    communicator.exchange(Exchange((PeerBuffer(0, blob),), (PeerBuffer(0, blob),))).result(1.0)
    assert made.calls == [("recv", 0), ("send", 0)]
    communicator.close()
    assert made.finalized


def test_result_polls_for_a_short_timeout() -> None:
    work = TorchCommsWork(Work(completed=False), "barrier of 'p'", 1000.0)
    with pytest.raises(ResultPending, match="barrier of 'p'"):
        work.result(0.0)


def test_result_beyond_the_deadline_waits_for_the_library() -> None:
    work = TorchCommsWork(Work("operation timed out", completed=False), "barrier of 'p'", 1.0)
    with pytest.raises(OperationTimeout, match="barrier of 'p'"):
        work.result(5.0)


def test_absent_library_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchcomms", ModuleType("torchcomms"))
    with pytest.raises(BackendUnavailable, match="torchcomms does not import"):
        torchcomms_backend("gloo")
