"""What the Ascend backend says where it cannot run: clauses B1, B2, R4. Needs no torch_npu."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from equipoise.backends.ascend import BACKEND, npu_runtime, private_api
from equipoise.hal.capabilities import Available, Unavailable
from equipoise.hal.errors import BackendUnavailable


def pretend(monkeypatch: pytest.MonkeyPatch, *, installed: bool) -> None:
    spec = importlib.util.spec_from_loader("torch_npu", None) if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(private_api, "missing", lambda: ())


def reason() -> str:
    answer = BACKEND.probe()
    assert isinstance(answer, Unavailable)
    assert "\n" not in answer.reason
    return answer.reason


def test_probe_names_missing_torch_npu_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, installed=False)
    assert "pip install '.[ascend]' in a clone of equipoise" in reason()
    assert BACKEND.devices() == 0
    with pytest.raises(BackendUnavailable, match="not installed"):
        BACKEND.open(0)


def test_probe_refuses_cuda_build_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, installed=True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "CUDA build" in reason()


def test_probe_reports_missing_driver_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise ImportError("libhccl.so: cannot open shared object file\nand more")

    pretend(monkeypatch, installed=True)
    monkeypatch.setattr(npu_runtime.RUNTIME, "devices", fail)
    assert reason().endswith("libhccl.so: cannot open shared object file")


def test_probe_reports_machine_without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, installed=True)
    monkeypatch.setattr(npu_runtime.RUNTIME, "devices", lambda: 0)
    assert "no device" in reason()


def test_probe_mentions_transfer_to_npu_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, installed=True)
    monkeypatch.setattr(npu_runtime.RUNTIME, "devices", lambda: 2)
    monkeypatch.setattr(npu_runtime, "version", lambda: "2.13.0")
    monkeypatch.setitem(sys.modules, npu_runtime.CUDA_SHIM, sys)
    answer = BACKEND.probe()
    assert isinstance(answer, Available)
    assert "transfer_to_npu" in answer.detail


def test_graph_capture_undeclared_with_task_queue_level_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    assert not BACKEND.capabilities.graph_capture


@pytest.mark.slow
def test_backend_import_does_not_import_torch_npu() -> None:
    result = subprocess.run(
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
    assert result.stdout.strip() == "False"
