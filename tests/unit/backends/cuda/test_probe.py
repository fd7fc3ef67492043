"""What the CUDA backend says of a machine before anything is opened: clauses B1, B2, R4."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from equipoise.backends.cuda import BACKEND, cuda_runtime
from equipoise.hal.capabilities import Available, Unavailable
from equipoise.hal.errors import BackendUnavailable


def pretend(monkeypatch: pytest.MonkeyPatch, *installed: str, devices: int = 1) -> None:
    """A CUDA build of torch with these packages beside it."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda_runtime.RUNTIME, "devices", lambda: devices)
    specs = {name: object() for name in installed}
    monkeypatch.setattr(importlib.util, "find_spec", specs.get)


def reason() -> str:
    answer = BACKEND.probe()
    assert isinstance(answer, Unavailable)
    return answer.reason


def test_probe_names_missing_cuda_build_and_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "install a CUDA build of torch" in reason()
    assert torch.__version__ in reason()
    assert BACKEND.devices() == 0
    with pytest.raises(BackendUnavailable, match="built without CUDA"):
        BACKEND.open(0)


def test_probe_names_missing_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cuda")
    assert "triton" in reason()
    assert "pip install '.[cuda]'" in reason()


def test_probe_reports_machine_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "triton", "cuda", devices=0)
    assert "nvidia-smi" in reason()


def test_probe_reports_driver_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("driver too old\nand a long story")

    pretend(monkeypatch, "triton", "cuda")
    monkeypatch.setattr(cuda_runtime.RUNTIME, "devices", fail)
    assert reason() == "torch.cuda does not answer: driver too old"


def test_open_refuses_missing_device_index(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "triton", "cuda", devices=2)
    with pytest.raises(BackendUnavailable, match="no device 2"):
        BACKEND.open(2)


def test_stream_lock_undeclared_without_cuda_bindings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, "triton")
    answer = BACKEND.probe()
    assert isinstance(answer, Available)
    assert "no stream lock: cuda-bindings is not installed" in answer.detail
    assert not BACKEND.capabilities.stream_lock
    assert not BACKEND.capabilities.copy_independent_of_launch
    assert BACKEND.capabilities.graph_capture
    assert BACKEND.capabilities.levelled_routing_on_device


def test_stream_lock_declared_with_cuda_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "triton", "cuda")
    monkeypatch.setattr(cuda_runtime, "driver", SimpleNamespace)
    monkeypatch.setattr(cuda_runtime, "driver_initialised", lambda: False)
    assert BACKEND.capabilities.stream_lock
    assert BACKEND.capabilities.copy_independent_of_launch
    answer = BACKEND.probe()
    assert isinstance(answer, Available)
    assert "lock" not in answer.detail


def test_independent_copies_undeclared_where_streams_share_queues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, "triton", "cuda")
    monkeypatch.setattr(cuda_runtime, "driver", lambda: SimpleNamespace())
    monkeypatch.setattr(cuda_runtime, "shared_queues", lambda: "CUDA was initialised by an engine")
    assert BACKEND.capabilities.stream_lock
    assert not BACKEND.capabilities.copy_independent_of_launch
    answer = BACKEND.probe()
    assert isinstance(answer, Available)
    assert "copies may wait for a held stream: CUDA was initialised by an engine" in answer.detail


def test_stream_memory_reports_bindings_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> object:
        raise ImportError("libcuda.so.1: cannot open\nmore")

    pretend(monkeypatch, "triton", "cuda")
    monkeypatch.setattr(cuda_runtime, "driver", fail)
    assert (
        cuda_runtime.stream_memory() == "cuda-bindings does not import: libcuda.so.1: cannot open"
    )


@pytest.mark.slow
def test_backend_import_initialises_no_vendor() -> None:
    code = (
        "import sys, torch, equipoise.backends.cuda as cuda; "
        "print([name for name in ('triton', 'cuda') if name in sys.modules]); "
        "cuda.BACKEND.capabilities; print('triton' in sys.modules, torch.cuda.is_initialized())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert result.stdout.split() == ["[]", "False", "False"]
