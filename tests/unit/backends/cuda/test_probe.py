"""What the CUDA backend says of a machine before anything is opened: clauses B1, B2, R4."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from equipoise.backends.cuda import BACKEND, native
from equipoise.hal.capabilities import Available, Unavailable
from equipoise.hal.errors import BackendUnavailable


def pretend(monkeypatch: pytest.MonkeyPatch, *installed: str, devices: int = 1) -> None:
    """A CUDA build of torch with these packages beside it."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(native, "devices", lambda: devices)
    found = {name: object() for name in installed}
    monkeypatch.setattr(importlib.util, "find_spec", found.get)


def reason() -> str:
    answer = BACKEND.probe()
    assert isinstance(answer, Unavailable)
    return answer.reason


def test_a_build_of_torch_without_cuda_is_named_with_what_would_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "install a CUDA build of torch" in reason()
    assert torch.__version__ in reason()
    assert BACKEND.devices() == 0
    with pytest.raises(BackendUnavailable, match="built without CUDA"):
        BACKEND.open(0)


def test_without_triton_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cuda")
    assert "triton" in reason()
    assert "equipoise[cuda]" in reason()


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "triton", "cuda", devices=0)
    assert "nvidia-smi" in reason()


def test_a_driver_that_does_not_answer_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("driver too old\nand a long story")

    pretend(monkeypatch, "triton", "cuda")
    monkeypatch.setattr(native, "devices", fail)
    assert reason() == "torch.cuda does not answer: driver too old"


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "triton", "cuda", devices=2)
    with pytest.raises(BackendUnavailable, match="no device 2"):
        BACKEND.open(2)


def test_without_cuda_bindings_no_lock_is_declared_and_the_probe_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, "triton")
    answer = BACKEND.probe()
    assert isinstance(answer, Available)
    assert "no stream lock: cuda-bindings is not installed" in answer.detail
    assert not BACKEND.capabilities.stream_lock
    assert not BACKEND.capabilities.copy_independent_of_launch
    assert BACKEND.capabilities.graph_capture


def test_with_cuda_bindings_the_lock_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "triton", "cuda")
    monkeypatch.setattr(native, "driver", lambda: SimpleNamespace())
    assert BACKEND.capabilities.stream_lock
    answer = BACKEND.probe()
    assert isinstance(answer, Available)
    assert "lock" not in answer.detail


def test_bindings_that_do_not_import_are_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> object:
        raise ImportError("libcuda.so.1: cannot open\nmore")

    pretend(monkeypatch, "triton", "cuda")
    monkeypatch.setattr(native, "driver", fail)
    assert native.stream_memory() == "cuda-bindings does not import: libcuda.so.1: cannot open"


def test_importing_the_backend_imports_no_vendor_and_initialises_nothing() -> None:
    code = (
        "import sys, torch, equipoise.backends.cuda as cuda; cuda.BACKEND.capabilities; "
        "print([name for name in ('triton', 'cuda') if name in sys.modules], "
        "torch.cuda.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.split() == ["[]", "False"]
