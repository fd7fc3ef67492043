"""The devices that tests of `backends/devices` run on: whatever is here."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from equipoise.backends.devices.accelerator import DeviceAccelerator
from equipoise.backends.devices.runtime import Device
from equipoise.hal import registry
from equipoise.hal.accelerator import Backend, check_device_count
from equipoise.hal.errors import UsageError

KINDS = ("cuda", "ascend", pytest.param("cudasim", marks=pytest.mark.deep))
"""A GPU; a simulated NPU; the CUDA backend on that, which tells little that the NPU does not."""


@cache
def backend(kind: str) -> Backend:
    """Of that kind. Skips the test where it cannot be opened here, saying why."""
    gpu = torch.cuda.is_available()
    if kind == "cuda" and not gpu:  # the stand-in takes the place of the real one
        pytest.skip("no GPU: torch.cuda is not available")
    if kind == "cudasim" and gpu:
        pytest.skip("the stand-in for CUDA is for machines without a GPU")
    candidate = _finders()[kind]()
    if not candidate.devices():
        pytest.skip(f"{kind}: {candidate.probe()}")
    return candidate


@dataclass(frozen=True)
class Network:
    """What rank processes open.

    Attributes:
        backend: by name, or PACKAGE:OBJECT.
        communicator: likewise.
    """

    backend: str
    communicator: str

    def need(self, ranks: int) -> None:
        """Skip the test where so many ranks find too few devices, saying why."""
        backends = registry.accelerator(self.backend), registry.communicator(self.communicator)
        try:
            check_device_count(*backends, ranks)
        except UsageError as error:
            pytest.skip(str(error))


NETWORKS = {
    "cuda": Network("cuda", "nccl"),
    "ascend": Network("ascend", "equipoise.backends.ascend:HCCL"),
    "cudasim": Network("cudasim:BACKEND", "cudasim.nccl:NCCL"),
}
"""What several ranks work with, by kind."""


def device_of(accelerator: DeviceAccelerator) -> Device:
    """The vendor's side of it."""
    return accelerator._device


def current_stream(accelerator: DeviceAccelerator) -> Any:
    """The vendor's stream that is current on the calling thread."""
    device = device_of(accelerator)
    return device.runtime.current_stream(device.index)


def fresh_stream(accelerator: DeviceAccelerator) -> Any:
    """A stream as an engine makes one."""
    return device_of(accelerator).runtime.module().Stream(device=accelerator.device)


def handle(stream: Any) -> int:
    """The driver's number of a vendor's stream."""
    return int(stream.cuda_stream if hasattr(stream, "cuda_stream") else stream.npu_stream)


def _finders() -> dict[str, Callable[[], Backend]]:
    return {"cuda": _cuda, "ascend": _ascend, "cudasim": _cudasim}


def _cuda() -> Backend:
    from equipoise.backends.cuda import BACKEND

    return BACKEND


def _ascend() -> Backend:
    from equipoise.backends.ascend import BACKEND

    return BACKEND


def _cudasim() -> Backend:
    pytest.importorskip("torch_npu", reason="the stand-in for CUDA runs on simulated NPUs")
    from cudasim import BACKEND

    return BACKEND
