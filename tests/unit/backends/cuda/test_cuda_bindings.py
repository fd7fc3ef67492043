"""The driver calls of the CUDA backend through the real cuda-bindings, to a driver that logs them.

In a process of its own: the loader reads its path at the start. The package lies outside the
environment, since torch imports it wherever it is found, and then no other test is without it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from libcuda import build_stub

FOLDER = "CUDA_BINDINGS"
"""Environment variable: where tox installs the package."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOLDER not in os.environ, reason="tox installs cuda-bindings apart"),
]

PROGRAM = """
from types import SimpleNamespace

import torch

from equipoise.backends.cuda import cuda_runtime, host_flags
from equipoise.backends.cuda.driver_streams import new_stream
from equipoise.backends.cuda.host_flags import CudaAcquireFlag, CudaReleaseFlag

device = SimpleNamespace(index=0, set_current=lambda: None, runtime=cuda_runtime.RUNTIME)
host_flags.pinned = lambda nbytes: torch.ones(nbytes, dtype=torch.uint8)
cuda_runtime.cuda = lambda: SimpleNamespace(
    ExternalStream=lambda handle, device: SimpleNamespace(cuda_stream=handle)
)
with cuda_runtime.RUNTIME.allowed_in_capture():
    pass
own = new_stream(device)
acquire, release = CudaAcquireFlag(device), CudaReleaseFlag(device)
acquire.wait(own.stream)
release.set(SimpleNamespace(cuda_stream=0))
acquire.signal()
print(own.handle, acquire._flag.value, acquire._flag._address, release._flag._address)
"""


def test_driver_calls_arrive_through_real_cuda_bindings(tmp_path: Path) -> None:
    build_stub(tmp_path)
    calls = tmp_path / "calls"
    paths = {
        "PYTHONPATH": os.pathsep.join([os.environ[FOLDER], os.environ.get("PYTHONPATH", "")]),
        "LD_LIBRARY_PATH": str(tmp_path),
        "LIBCUDA_CALLS": str(calls),
    }
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | paths,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    handle, value, acquire, release = map(int, result.stdout.split())
    assert (handle, value) == (0x5EA, 1)
    assert calls.read_text("utf-8").splitlines() == [
        "cuThreadExchangeStreamCaptureMode 2",
        "cuThreadExchangeStreamCaptureMode 0",
        "cuCtxGetCurrent",
        "cuDeviceGet 0",
        "cuDevicePrimaryCtxRetain 40",
        "cuCtxSetCurrent 0xe8",
        "cuCtxGetStreamPriorityRange",
        "cuStreamCreateWithPriority 1 -5",
        "cuCtxGetCurrent",
        "cuThreadExchangeStreamCaptureMode 2",
        "cuThreadExchangeStreamCaptureMode 0",
        "cuMemHostGetDevicePointer 0",
        f"cuStreamWaitValue32 0x5ea {acquire:#x} 1 1",
        f"cuStreamWriteValue32 0x5ea {acquire:#x} 0 0",
        f"cuStreamWriteValue32 0 {release:#x} 1 0",
    ]
