"""Torch_npu's runtime: what is installed, what the driver can do, and where it differs from CUDA's.

torch_npu is imported at its first use, never by importing this module. Only `torch.npu` is used,
not a `torch.cuda` shim. Everything of it is typed `Any`, so that the package can be type-checked on
machines without it.
"""

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch

from equipoise import install_command
from equipoise.backends.ascend import private_api
from equipoise.backends.ascend.private_api import MODULE
from equipoise.backends.devices.runtime import DeviceRuntime, first_line
from equipoise.hal.capabilities import Available, Probe, Unavailable
from equipoise.hal.errors import Unsupported

TESTED = "torch_npu 2.13.0"
CUDA_SHIM = "torch_npu.contrib.transfer_to_npu"
"""Redirects torch.cuda to the NPU for a whole process."""
VALUE_CALLS = ("aclrtValueWait", "aclrtValueWrite")
"""Functions that the driver must export for external events that reset themselves."""


@cache
def npu() -> Any:
    """`torch.npu`. Raises what `import torch_npu` raises."""
    return import_module(MODULE).npu


def probe() -> Probe:
    """Whether torch_npu imports here and sees a device, or in one line why not; never raises."""
    if importlib.util.find_spec(MODULE) is None:
        return Unavailable(f"torch_npu is not installed: {install_command('ascend')}")
    if torch.version.cuda is not None:
        return Unavailable(
            f"torch {torch.__version__} is a CUDA build; torch_npu needs the CPU build of torch"
        )
    try:
        probed, lacking = RUNTIME.devices(), private_api.missing()
    except Exception as error:
        return Unavailable(
            f"torch_npu does not import (is CANN's set_env.sh sourced?): {first_line(error)}"
        )
    if lacking:
        return Unavailable(
            f"torch_npu {version()} lacks {', '.join(lacking)}: install {TESTED}, which was tested"
        )
    if not probed:
        return Unavailable("torch_npu sees no device (look at npu-smi, ASCEND_RT_VISIBLE_DEVICES)")
    return Available(_detail(probed))


def cuda_is_redirected() -> bool:
    """Whether torch.cuda means the NPU in this process, and is not to be trusted."""
    return CUDA_SHIM in sys.modules


class NpuRuntime(DeviceRuntime):
    """`torch.npu`, and where it differs."""

    device_type = "npu"
    graph_class = "NPUGraph"

    def module(self) -> Any:
        """`torch.npu`. Raises what `import torch_npu` raises."""
        return npu()

    @contextmanager
    def on_device(self, index: int) -> Iterator[None]:
        """Make it the calling thread's device for a block; a thread that had none keeps it.

        To ask torch for the device of such a thread would give it the first one, with a context on
        it. A thread with another device than its streams is worse than one without: some of
        torch_npu's calls go to the launch queue of the thread's device, others to that of the
        stream or the event, so that an event may be destroyed before the wait for it is launched.
        """
        before = private_api.local_device()
        self.set_thread_device(index)
        try:
            yield
        finally:
            if before not in (-1, index):
                self.set_thread_device(before)

    def wrap_stream(self, index: int, stream: Any) -> Any:
        """Not an external stream, which torch_npu can neither record nor wait on."""
        # torch_npu 2.10 has no such class.
        if isinstance(stream, getattr(npu(), "ExternalStream", ())):
            raise Unsupported(f"not a stream that torch_npu made: {stream!r}")
        return super().wrap_stream(index, stream)

    def why_uncapturable(self) -> str:
        """Torch_npu refuses with the deepest task queue."""
        if os.environ.get("TASK_QUEUE_ENABLE") != "2":
            return ""
        return "torch_npu captures no graph with TASK_QUEUE_ENABLE=2; use 1 or 0"


RUNTIME = NpuRuntime()
"""The one of this process."""


@cache
def value_waits() -> bool:
    """Whether the driver can wait for a value: without it external events do not reset themselves.

    torch_npu then falls back to events that need a host's reset, on which no lock can stand.
    """
    try:
        npu()
        driver = ctypes.CDLL("libascendcl.so")
    except Exception:
        return False
    return all(hasattr(driver, name) for name in VALUE_CALLS)


def version() -> str:
    """Of torch_npu."""
    return str(import_module(MODULE).__version__)


def _detail(probed: int) -> str:
    answer = f"torch_npu {version()}, {probed} device(s)"
    return (
        f"{answer}; torch.cuda is redirected by transfer_to_npu" if cuda_is_redirected() else answer
    )
