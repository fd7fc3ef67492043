"""Streams, events and graphs of torch's devices: one binding for torch.cuda and torch.npu.

What both modules have under one name is taken from the module of the device, and what torch gives
for every device from `torch.accelerator`. docs/design/device-backends.md says, with what was
measured, why not more is taken from there.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from equipoise.hal.errors import Unsupported


class DeviceRuntime:
    """The devices of one kind. A vendor's subclass holds what differs for it, and nothing else.

    Streams, events and graphs are objects of the vendor's module, typed `Any`, because no vendor is
    installed everywhere. Streams have `query`, `synchronize`, `stream_id`, `device_index`; events
    `record(stream)`, `wait(stream)`, `query`; graphs `replay`. All of them report what went wrong
    on the device as a RuntimeError.

    Attributes:
        device_type: the type of the torch devices.
        graph_class: the name of the module's class of graphs.
        capture_mode: what is forbidden to whom while we capture, in the vendor's words.
    """

    device_type: str
    graph_class: str
    capture_mode = "thread_local"

    def __init__(self) -> None:
        self._cached: dict[tuple[int, str], Any] = {}
        self._lock = threading.Lock()
        self._selected_index: int | None = None

    def module(self) -> Any:
        """Torch's module of the devices: `torch.cuda`, `torch.npu`."""
        return torch.get_device_module(self.device_type)

    def devices(self) -> int:
        """How many devices torch sees; asks without initialising one."""
        return int(self.module().device_count())

    def select_device(self, index: int) -> None:
        """Make `index` the calling thread's device, and the process's `selected_device`."""
        self.set_thread_device(index)
        self._selected_index = index

    def selected_device(self) -> int | None:
        """The device that was selected last, on any thread; None before that.

        The calling thread's own device is no answer: it is device 0 until the thread selects one.
        """
        return self._selected_index

    def set_thread_device(self, index: int) -> None:
        """Make device `index` the calling thread's.

        Needed before calls of the driver: it refuses a thread without a device, and torch leaves
        device 0 current in a thread that has only used tensors of another.
        """
        torch.accelerator.set_device_index(index)

    def on_device(self, index: int) -> AbstractContextManager[Any]:
        """Make device `index` the calling thread's for a block."""
        return torch.accelerator.device_index(index)

    @contextmanager
    def current(self, stream: Any) -> Iterator[None]:
        """Make a stream, and its device, the calling thread's current one for a block."""
        with self.on_device(stream.device_index):
            before = torch.accelerator.current_stream(stream.device_index)
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def current_stream(self, index: int) -> Any:
        """The calling thread's current stream of that device."""
        return self.module().current_stream(index)

    def cached_stream(self, index: int, use: str) -> Any:
        """The stream of this process for a use, made once.

        Cached, because torch's pool has 32 streams and then hands out the first one again, and
        accelerators are opened and closed often.
        """
        with self._lock:
            if (index, use) not in self._cached:
                self._cached[index, use] = self.module().Stream(device=index)
            return self._cached[index, use]

    def wrap_stream(self, index: int, stream: Any) -> Any:
        """The module's own object for an engine's stream of that device. Raises `Unsupported`."""
        device = torch.device(self.device_type, index)
        if not isinstance(stream, torch.Stream) or stream.device != device:
            raise Unsupported(f"not a stream of {device}: {stream!r}")
        names = ("stream_id", "device_index", "device_type")
        return self.module().Stream(**{name: getattr(stream, name) for name in names})

    def event(self) -> Any:
        """A fresh event. Querying it during a capture needs `allowed_in_capture`.

        Not a `torch.Event`: that one holds the interpreter's lock while it is recorded or waited
        for, and on a full queue that lasts until another thread signals, which needs the lock.
        """
        return self.module().Event()

    def is_capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured, by us or by an engine."""
        return bool(self.module().is_current_stream_capturing())

    def is_captured(self, stream: Any) -> bool:
        """Whether a stream is being captured, by us or by an engine."""
        with self.current(stream):
            return self.is_capturing()

    def why_uncapturable(self) -> str:
        """Why no graph can be captured; nothing where it can."""
        return ""

    def begin_capture(self) -> Any:
        """A graph that captures the current stream from now on.

        In a mode that forbids nothing to other threads, which can go on querying events.
        """
        graph = getattr(self.module(), self.graph_class)()
        graph.capture_begin(capture_error_mode=self.capture_mode)
        return graph

    def end_capture(self, graph: Any) -> None:
        """End the capture, on the same stream."""
        graph.capture_end()

    def allowed_in_capture(self) -> AbstractContextManager[None]:
        """Let the calling thread allocate page-locked memory and query streams and events for a
        block, also while it or another thread captures."""
        return nullcontext()

    def free_memory(self, index: int) -> tuple[int, int]:
        """Bytes of the device as the driver counts them: free, and all."""
        free, total = self.module().mem_get_info(index)
        return int(free), int(total)


def first_line(error: BaseException) -> str:
    """The first line of a vendor's error, which often has a C++ trace after it; the type of the
    error where it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@dataclass(frozen=True)
class Device:
    """One device of a vendor's.

    Attributes:
        runtime: its binding.
        index: which.
    """

    runtime: DeviceRuntime
    index: int

    @property
    def torch(self) -> torch.device:
        """As torch names it."""
        return torch.device(self.runtime.device_type, self.index)

    def set_current(self) -> None:
        """Make it the calling thread's."""
        self.runtime.set_thread_device(self.index)

    def cached_stream(self, use: str) -> Any:
        """The stream of this process for a use."""
        return self.runtime.cached_stream(self.index, use)
