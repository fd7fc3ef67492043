"""What CUDA has of its own, through torch.cuda and cuda-bindings; nothing is initialised before its
first use. Everything of the two is typed `Any`: a CPU build of torch has neither.
"""

import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from equipoise import install_command
from equipoise.backends.devices.runtime import DeviceRuntime, first_line
from equipoise.hal.capabilities import Available, Probe, Unavailable

DRIVER = "cuda.bindings.driver"
KERNELS = "triton"
BLOCKING_SETTINGS: tuple[tuple[str, Callable[[str], bool], str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", lambda text: text not in ("", "0"), "operations block the host"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", lambda text: text == "1", "streams wait for each other"),
)
"""Settings that break the contract: which, when, and what they do."""
QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")
"""As many of the device's queues as there can be: streams that share one wait for each other, and
the driver's own default is 8."""
INITIAL = Path("/proc/self/environ")
"""The environment that this process was started with, whatever was set since."""
INSTALL = install_command("cuda")


def cuda() -> Any:
    """`torch.cuda`."""
    return torch.cuda


def driver() -> Any:
    """The driver's own functions. Raises ImportError."""
    return import_module(DRIVER)


def probe() -> Probe:
    """Whether torch sees a CUDA device here, or in one line why not; never raises."""
    if torch.version.cuda is None:
        return Unavailable(
            f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch"
        )
    if not _installed(KERNELS):
        return Unavailable(f"triton is not installed: {INSTALL}")
    try:
        probed = RUNTIME.devices()
    except Exception as error:
        return Unavailable(f"torch.cuda does not answer: {first_line(error)}")
    if not probed:
        return Unavailable("torch.cuda sees no device (look at nvidia-smi, CUDA_VISIBLE_DEVICES)")
    answer = f"torch {torch.__version__}, CUDA {torch.version.cuda}, {probed} device(s)"
    return Available("; ".join((answer, *_lacks())))


def stream_memory() -> str:
    """Why streams cannot wait for a value and write one; nothing where they can.

    The driver has had both, as calls that need no permission, since CUDA 12. With some settings a
    stream that waits would hold up all others, or the host.
    """
    for name, wrong, what in BLOCKING_SETTINGS:
        if wrong(text := os.environ.get(name, "")):
            return f"{name}={text} is set: with it {what}; unset it"
    if not _installed(DRIVER.partition(".")[0]):
        return f"cuda-bindings is not installed: {INSTALL}"
    try:
        driver()
    except ImportError as error:
        return f"cuda-bindings does not import: {first_line(error)}"
    return ""


def check(answer: Any, what: str) -> tuple[Any, ...]:
    """What a driver's call returned behind its status. Raises RuntimeError."""
    status, *rest = answer
    if status != driver().CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{what}: {getattr(status, 'name', status)}")
    return tuple(rest)


THREAD_PREFIX = "equipoise."
"""How the names of the threads of ours begin."""


class _Thread(threading.local):
    """What one thread has been set to."""

    settled = False
    relaxed = False
    """For its life."""


_this = _Thread()


def _relax() -> bool:
    """For the calling thread's life; whether that was possible: without cuda-bindings it is not."""
    try:
        known = driver()
    except ImportError:
        return False
    relaxed = known.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    check(known.cuThreadExchangeStreamCaptureMode(relaxed), "cuThreadExchangeStreamCaptureMode")
    return True


class CudaRuntime(DeviceRuntime):
    """`torch.cuda`, and where it differs: the driver ends a capture for what other threads call.

    Engines capture in the mode in which a call that might synchronise, from any thread, ends the
    capture; to ask an event is such a call, to allocate page-locked memory another. So a thread of
    ours is relaxed for its life. An engine's thread keeps its mode, which checks its own captures:
    what we ask on it we ask `unrestricted`. Without cuda-bindings neither is possible.
    """

    device_type = "cuda"
    graph_class = "CUDAGraph"

    def module(self) -> Any:
        """`torch.cuda`."""
        return cuda()

    def select_device(self, index: int) -> None:
        """The first time, the driver is told of as many queues as there can be, unless somebody was
        first."""
        with _queues_asked(index):
            super().select_device(index)

    def set_thread_device(self, index: int) -> None:
        """Make it the calling thread's device, and let others capture whatever a thread of ours
        calls."""
        super().set_thread_device(index)
        if not _this.settled:
            _this.settled = True
            if threading.current_thread().name.startswith(THREAD_PREFIX):
                _this.relaxed = _relax()

    def end_capture(self, graph: Any) -> None:
        """Its end; one that holds nothing is no reason to warn."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
            super().end_capture(graph)

    @contextmanager
    def allowed_in_capture(self) -> Iterator[None]:
        """The driver forbids what on some paths would synchronise; nothing of it is a part of the
        capture."""
        if _this.relaxed:
            yield
            return
        try:
            known = driver()
        except ImportError:
            yield
            return
        exchange = known.cuThreadExchangeStreamCaptureMode
        relaxed = known.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        (before,) = check(exchange(relaxed), "cuThreadExchangeStreamCaptureMode")
        try:
            yield
        finally:
            check(exchange(before), "cuThreadExchangeStreamCaptureMode")


RUNTIME = CudaRuntime()
"""The one of this process."""


@contextmanager
def _queues_asked(index: int) -> Iterator[None]:
    """Initialise CUDA, and the device's context, while the environment asks for many queues.

    Afterwards the environment is as it was: processes that this one starts may be none of ours.
    """
    global _queues
    name, most = QUEUES
    if cuda().is_initialized() and _queues is None:
        yield  # somebody else's: the driver reads the variable no more
        return
    before = os.environ.get(name)
    os.environ[name] = _queues = before or most
    try:
        yield
        RUNTIME.free_memory(index)  # makes the context, if nothing has yet
    finally:
        if before is None:
            del os.environ[name]


def request_queues() -> None:
    """Have this process, and all that it starts, use as many queues as there can be, unless the
    environment says otherwise. For who starts workers that initialise CUDA before we come."""
    global _queues
    os.environ.setdefault(*QUEUES)
    if not cuda().is_initialized():
        _queues = os.environ[QUEUES[0]]


def shared_queues() -> str:
    """Why streams may share one of the device's queues, and wait for each other there; nothing
    where they may not. Initialises nothing.

    By what this process knows: what the driver was asked for before it was initialised.
    """
    name, most = QUEUES
    asked = _initial(name) or _queues
    if asked is None and not cuda().is_initialized():
        asked = os.environ.get(name, most)  # as `RUNTIME.choose` will
    if asked is None:
        return (
            f"CUDA was initialised without {name}={most}, so that streams share queues: "
            "set it where the process is started"
        )
    if not asked.isdigit() or int(asked) < int(most):
        return f"{name}={asked} is set, so that streams share queues: unset it, or set {most}"
    return ""


def _initial(name: str) -> str | None:
    """A variable of the environment that this process was started with."""
    try:
        entries = INITIAL.read_bytes().split(b"\0")
    except OSError:
        return None
    probed = [entry for entry in entries if entry.startswith(f"{name}=".encode())]
    return probed[0].partition(b"=")[2].decode() if probed else None


_queues: str | None = None
"""How many queues the driver was asked for by this process, before it was initialised."""


def bind_context(index: int) -> None:
    """Let the calling thread use the driver's own functions; asks the device nothing, and so never
    waits for what hangs there."""
    known = driver()
    (current_one,) = check(known.cuCtxGetCurrent(), "cuCtxGetCurrent")
    if int(current_one):
        return
    (device,) = check(known.cuDeviceGet(index), "cuDeviceGet")
    (context,) = check(known.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
    check(known.cuCtxSetCurrent(context), "cuCtxSetCurrent")


def _lacks() -> tuple[str, ...]:
    if why := stream_memory():
        return (f"no stream lock: {why}",)
    if why := shared_queues():
        return (f"copies may wait for a held stream: {why}",)
    return ()


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
