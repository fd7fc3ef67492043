"""The one door to torch_npu: imported with the first use, and never by importing this module.

Only `torch.npu` is used, never a `torch.cuda` shim. Everything of it is typed `Any` here, so that
the package is checked on machines without it.
"""

import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch

from equipoise import install_command
from equipoise.backends.ascend import private_api
from equipoise.backends.ascend.private_api import MODULE
from equipoise.backends.devices.kept_streams import KeptStreams
from equipoise.backends.devices.runtime import first_line
from equipoise.hal.capabilities import Available, Probe, Unavailable

kind = "npu"
"""What torch calls its devices."""
TESTED = "torch_npu 2.13.0"
SHIM = "torch_npu.contrib.transfer_to_npu"
"""Redirects torch.cuda to the NPU for a whole process."""
VALUE_CALLS = ("aclrtValueWait", "aclrtValueWrite")
"""What the driver must export for external events that reset themselves."""


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
        found, lacking = devices(), private_api.missing()
    except Exception as error:
        return Unavailable(
            f"torch_npu does not import (is CANN's set_env.sh sourced?): {first_line(error)}"
        )
    if lacking:
        return Unavailable(
            f"torch_npu {version()} lacks {', '.join(lacking)}: install {TESTED}, which was tested"
        )
    if not found:
        return Unavailable("torch_npu sees no device (look at npu-smi, ASCEND_RT_VISIBLE_DEVICES)")
    return Available(_detail(found))


def devices() -> int:
    """How many devices torch_npu sees. Raises what `import torch_npu` raises."""
    return int(npu().device_count())


def shimmed() -> bool:
    """Whether torch.cuda means the NPU in this process, and is not to be trusted."""
    return SHIM in sys.modules


def uncapturable() -> str:
    """Torch_npu refuses with the deepest task queue."""
    if os.environ.get("TASK_QUEUE_ENABLE") != "2":
        return ""
    return "torch_npu captures no graph with TASK_QUEUE_ENABLE=2; use 1 or 0"


def begin_capture() -> Any:
    """A graph of the current stream; only this thread is forbidden what a capture forbids."""
    graph = npu().NPUGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    return graph


def end_capture(graph: Any) -> None:
    """Its end."""
    graph.capture_end()


def unrestricted() -> AbstractContextManager[None]:
    """Nothing is forbidden to a thread that captures but what would synchronise."""
    return nullcontext()


def event() -> Any:
    """A `torch.npu.Event`."""
    return npu().Event()


def current_stream(index: int) -> Any:
    """A `torch.npu.Stream`."""
    return npu().current_stream(index)


def free_memory(index: int) -> tuple[int, int]:
    """As the driver counts it."""
    free, total = npu().mem_get_info(index)
    return int(free), int(total)


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


def choose(index: int) -> None:
    """Make it the calling thread's device, and the process's for whoever asks `chosen`."""
    global _latest
    npu().set_device(index)
    _latest = index


def chosen() -> int | None:
    """The device that was chosen last, on whatever thread; None before.

    A thread's own device says nothing: torch_npu leaves the first one behind in a thread that has
    only used tensors of another.
    """
    return _latest


_latest: int | None = None


class _Settled(threading.local):
    """The device that the calling thread was given."""

    index = -1


_settled = _Settled()


def settle_thread(index: int) -> None:
    """Make it the calling thread's device, once a thread.

    The driver refuses calls of a thread without a device. A thread with another one is worse: some
    of torch_npu's calls go to the launch queue of the thread's device, others to that of the stream
    or the event, so that an event may be destroyed before the wait for it is launched. And torch
    leaves the first device behind in a thread that has only used tensors of another.
    """
    if _settled.index != index:
        if private_api.local_device() != index:
            npu().set_device(index)
        _settled.index = index


@contextmanager
def current(stream: Any) -> Iterator[None]:
    """Make a vendor's stream, and its device, the calling thread's.

    What `torch.npu.stream` does, at a thirtieth of its price: it makes stream objects of what it
    puts back, which this leaves as the numbers that torch_npu keeps.
    """
    device, index = private_api.local_device(), int(stream.device_index)
    before = private_api.current_numbers(index)
    npu().set_stream(stream)
    try:
        yield
    finally:
        private_api.set_current(before)
        if device not in (-1, index):
            npu().set_device(device)


def captured(stream: Any) -> bool:
    """Whether a vendor's stream is being captured, by whomever."""
    with current(stream):
        return bool(npu().is_current_stream_capturing())


_streams = KeptStreams(lambda index: npu().Stream(device=index))


def kept_stream(index: int, use: str) -> Any:
    """The `torch.npu.Stream` of this process for a use, made once."""
    return _streams.get(index, use)


def version() -> str:
    """Of torch_npu."""
    return str(import_module(MODULE).__version__)


def _detail(found: int) -> str:
    said = f"torch_npu {version()}, {found} device(s)"
    return f"{said}; torch.cuda is redirected by transfer_to_npu" if shimmed() else said
