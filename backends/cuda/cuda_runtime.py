"""CUDA's runtime: what is installed, settings of the environment, capture modes, hardware queues.

Works through torch.cuda and cuda-bindings, and initialises nothing before its first use. Everything
of the two is typed `Any`, because a CPU build of torch has neither.
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
"""Environment variables that break the contract: name, when, and what they do."""
QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")
"""The largest number of hardware queues. Streams that share a queue wait for each other, and the
driver's default is 8. The driver shares none while no more streams than that have work."""
INITIAL = Path("/proc/self/environ")
"""The environment that this process was started with: the driver may have been initialised by an
engine before `os.environ` was changed."""
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
    """Why streams cannot use stream memory operations (wait for a value, write one); empty if they
    can.

    Since CUDA 12 they need no permission. With some settings a stream that waits would block all
    others, or the host.
    """
    for name, wrong, effect in BLOCKING_SETTINGS:
        if wrong(text := os.environ.get(name, "")):
            return f"{name}={text} is set: with it {effect}; unset it"
    if not _installed(DRIVER.partition(".")[0]):
        return f"cuda-bindings is not installed: {INSTALL}"
    try:
        driver()
    except ImportError as error:
        return f"cuda-bindings does not import: {first_line(error)}"
    return ""


def driver_initialised() -> bool:
    """Whether anything in this process has initialised the driver, which reads the environment then
    and never again. `torch.cuda.is_available()` does, and torch does not call that initialised."""
    if cuda().is_initialized():
        return True
    try:
        bindings = driver()
        status, *_ = bindings.cuDeviceGetCount()
    except (ImportError, RuntimeError):  # no cuda-bindings, or no driver that they could load
        return False
    return bool(status != bindings.CUresult.CUDA_ERROR_NOT_INITIALIZED)


def check(answer: Any, what: str) -> tuple[Any, ...]:
    """What a call of the driver returned after its status. Raises RuntimeError."""
    status, *rest = answer
    if status != driver().CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{what}: {getattr(status, 'name', status)}")
    return tuple(rest)


THREAD_PREFIX = "equipoise."
"""Prefix of the names of our threads, by which `set_thread_device` knows them from an engine's."""


class _Thread(threading.local):
    """Settings of one thread."""

    settled = False
    relaxed = False
    """Whether its capture mode is relaxed, for its life."""


_thread_state = _Thread()


def _relax() -> bool:
    """Relax the calling thread's capture mode for its life. Returns whether that was possible: it
    needs cuda-bindings."""
    try:
        bindings = driver()
    except ImportError:
        return False
    relaxed = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    check(bindings.cuThreadExchangeStreamCaptureMode(relaxed), "cuThreadExchangeStreamCaptureMode")
    return True


class CudaRuntime(DeviceRuntime):
    """`torch.cuda`, where a call on any thread can invalidate an engine's capture.

    Engines capture in mode `global`, in which a call that might synchronise, from any thread,
    invalidates the capture; querying an event is such a call, allocating page-locked memory
    another. So our own threads run in mode `relaxed` for their life. An engine's thread keeps its
    mode, which checks the engine's captures; there our calls are made under `allowed_in_capture`.
    Both need cuda-bindings. We capture in mode `relaxed`: what a program makes between its launches
    may take new memory from the driver, which is forbidden to the capturing thread in every other
    mode, and happens whenever torch's cache has no room left.
    """

    device_type = "cuda"
    graph_class = "CUDAGraph"
    capture_mode = "relaxed"

    def module(self) -> Any:
        """`torch.cuda`."""
        return cuda()

    def devices(self) -> int:
        """How many devices torch sees; asks for queues, in case that initialises the driver."""
        with _queues_asked():
            return super().devices()

    def select_device(self, index: int) -> None:
        """Select the device. The first time, also ask the driver for the largest number of queues,
        unless it was initialised before."""
        with _queues_asked() as asked:
            super().select_device(index)
            if asked:
                self.free_memory(index)  # makes the context, if nothing has yet

    def set_thread_device(self, index: int) -> None:
        """Make it the calling thread's device, and relax the capture mode of a thread of ours."""
        super().set_thread_device(index)
        if not _thread_state.settled:
            _thread_state.settled = True
            if threading.current_thread().name.startswith(THREAD_PREFIX):
                _thread_state.relaxed = _relax()

    def end_capture(self, graph: Any) -> None:
        """End the capture, without a warning if it is empty."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
            super().end_capture(graph)

    @contextmanager
    def allowed_in_capture(self) -> Iterator[None]:
        """Relax the calling thread's capture mode for a block. Nothing in the block may be meant as
        part of a capture."""
        if _thread_state.relaxed:
            yield
            return
        try:
            bindings = driver()
        except ImportError:
            yield
            return
        exchange = bindings.cuThreadExchangeStreamCaptureMode
        relaxed = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        (before,) = check(exchange(relaxed), "cuThreadExchangeStreamCaptureMode")
        try:
            yield
        finally:
            check(exchange(before), "cuThreadExchangeStreamCaptureMode")


RUNTIME = CudaRuntime()
"""The runtime of this process."""


@contextmanager
def _queues_asked() -> Iterator[bool]:
    """Set the environment variable for a block that may initialise the driver, or make a device's
    context; whether it was set: a driver that was initialised before does not read it.

    Afterwards the environment is restored, since processes that this one starts may not be ours.
    """
    global _queues
    name, most = QUEUES
    if _queues is None and driver_initialised():
        yield False
        return
    before = os.environ.get(name)
    os.environ[name] = wanted = before or most
    try:
        yield True
    finally:
        if driver_initialised():
            _queues = wanted
        if before is None:
            del os.environ[name]


def request_queues() -> None:
    """Let this process, and all that it starts, use the largest number of queues, unless the
    environment sets another. For launchers whose workers initialise CUDA before this backend is
    opened."""
    global _queues
    os.environ.setdefault(*QUEUES)
    if not driver_initialised():
        _queues = os.environ[QUEUES[0]]


def shared_queues() -> str:
    """Why streams may share a hardware queue, and wait for each other there; empty if they do not.
    Initialises nothing.

    The driver cannot be asked; this reports what it was asked for before it was initialised.
    """
    name, most = QUEUES
    queue_count = _initial(name) or _queues
    if queue_count is None and not driver_initialised():
        queue_count = os.environ.get(name, most)  # as `RUNTIME.select_device` will ask
    if queue_count is None:
        return (
            f"CUDA was initialised without {name}={most}, so that streams share queues: "
            "set it where the process is started (torch.cuda.is_available() initialises)"
        )
    if not queue_count.isdigit() or int(queue_count) < int(most):
        return f"{name}={queue_count} is set, so that streams share queues: unset it, or set {most}"
    return ""


def _initial(name: str) -> str | None:
    """A variable of the environment that this process was started with; None where it is not
    set."""
    try:
        entries = INITIAL.read_bytes().split(b"\0")
    except OSError:
        return None
    probed = [entry for entry in entries if entry.startswith(f"{name}=".encode())]
    return probed[0].partition(b"=")[2].decode() if probed else None


_queues: str | None = None
"""The number of queues that this process asked the driver for before it was initialised."""


def bind_context(index: int) -> None:
    """Bind the device's context to the calling thread, for functions of the driver. Asks the device
    nothing, so that it never waits for what hangs there."""
    bindings = driver()
    (current_one,) = check(bindings.cuCtxGetCurrent(), "cuCtxGetCurrent")
    if int(current_one):
        return
    (device,) = check(bindings.cuDeviceGet(index), "cuDeviceGet")
    (context,) = check(bindings.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
    check(bindings.cuCtxSetCurrent(context), "cuCtxSetCurrent")


def _lacks() -> tuple[str, ...]:
    if why := stream_memory():
        return (f"no stream lock: {why}",)
    if why := shared_queues():
        return (f"copies may wait for a held stream: {why}",)
    return ()


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
