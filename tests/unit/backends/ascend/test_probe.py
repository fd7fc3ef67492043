"""What the Ascend backend says where it cannot run: clauses B1, B2, R4. Needs no torch_npu."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from equipoise.backends.ascend import BACKEND, native
from equipoise.hal.capabilities import Available, Unavailable
from equipoise.hal.errors import BackendUnavailable


def pretend(monkeypatch: pytest.MonkeyPatch, *, installed: bool) -> None:
    spec = importlib.util.spec_from_loader("torch_npu", None) if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)


def reason() -> str:
    answer = BACKEND.probe()
    assert isinstance(answer, Unavailable)
    assert "\n" not in answer.reason
    return answer.reason


def test_a_missing_torch_npu_is_named_with_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, installed=False)
    assert "pip install 'equipoise[ascend]'" in reason()
    assert BACKEND.devices() == 0
    with pytest.raises(BackendUnavailable, match="not installed"):
        BACKEND.open(0)


def test_a_cuda_build_of_torch_is_refused_before_torch_npu_would_end_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, installed=True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "CUDA build" in reason()


def test_a_driver_that_is_not_there_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise ImportError("libhccl.so: cannot open shared object file\nand more")

    pretend(monkeypatch, installed=True)
    monkeypatch.setattr(native, "devices", fail)
    assert reason().endswith("libhccl.so: cannot open shared object file")


def test_a_machine_without_a_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, installed=True)
    monkeypatch.setattr(native, "devices", lambda: 0)
    assert "no device" in reason()


def test_the_shim_that_redirects_torch_cuda_is_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, installed=True)
    monkeypatch.setattr(native, "devices", lambda: 2)
    monkeypatch.setattr(native, "version", lambda: "2.13.0")
    monkeypatch.setitem(sys.modules, native.SHIM, sys)
    answer = BACKEND.probe()
    assert isinstance(answer, Available)
    assert "transfer_to_npu" in answer.detail


def test_no_graph_is_declared_with_the_deepest_task_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    assert not BACKEND.capabilities.graph_capture


def test_importing_the_backend_imports_no_vendor() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, equipoise.backends.ascend; print('torch_npu' in sys.modules)",
        ],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stdout.strip() == "False"
