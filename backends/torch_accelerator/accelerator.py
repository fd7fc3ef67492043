"""The backend of a family, and the device that it opens."""

import platform
import threading
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points

import torch
from torch import Tensor

from equipoise.backends.devices.runtime import first_line
from equipoise.backends.torch_accelerator.slots import TorchSlotStore
from equipoise.backends.torch_accelerator.stream import TorchEvent, TorchGraph, TorchStream
from equipoise.hal.accelerator import Memory, Topology
from equipoise.hal.capabilities import Available, Capabilities, Probe, Unavailable
from equipoise.hal.errors import BackendUnavailable, Unsupported
from equipoise.hal.lock import StreamLock
from equipoise.hal.slots import SlotLayout
from equipoise.hal.stream import Role
from equipoise.hal.support.page_pool import PagePool
from equipoise.hal.support.reference_kernels import ReferenceKernels

PLUGINS = "torch.backends"
"""Torch's group of entry points: callables that register a vendor's kind of device."""
CLOSE_TIMEOUT = 5.0
"""Seconds that closing waits for each stream."""


class TorchAccelerator:
    """One device, through `torch.accelerator`.

    Args:
        backend: its name.
        device: the device.
    """

    def __init__(self, backend: str, device: torch.device) -> None:
        self._name = f"{backend}:{device.index}"
        self._device = device
        self._issue_lock = threading.RLock()
        self._streams = {role: self._stream(role, torch.Stream(device=device)) for role in Role}
        self._adopted: list[TorchStream] = []
        self.kernels = ReferenceKernels()

    @property
    def name(self) -> str:
        """The backend's name and the device's index."""
        return self._name

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        return self._device

    def stream(self, role: Role) -> TorchStream:
        """The stream of that role."""
        return self._streams[role]

    def adopt(self, native_stream: object) -> TorchStream:
        """Wrap a `torch.Stream` of the device; a new object at each call."""
        if not isinstance(native_stream, torch.Stream) or native_stream.device != self._device:
            raise Unsupported(f"not a stream of {self._device}: {native_stream!r}")
        adopted = self._stream(Role.COMPUTE, native_stream, adopted=True)
        self._adopted.append(adopted)
        return adopted

    def event(self) -> TorchEvent:
        """A fresh event."""
        return TorchEvent(self._device)

    def stream_lock(self, deadline: float) -> StreamLock:
        """Torch has no way for every device to make a stream wait for the host."""
        raise Unsupported("torch gives no stream lock for every device")

    def slot_store(self, layout: SlotLayout) -> TorchSlotStore:
        """Slots in device memory."""
        return TorchSlotStore(layout, self._device, self.event)

    def empty_private(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Torch has no private format for every device."""
        raise Unsupported(f"no private format is declared for {dtype} {list(shape)}")

    def storage_bytes(self, tensor: Tensor) -> Tensor:
        """The bytes of its storage."""
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return whole.set_(tensor.untyped_storage())

    def pinned(self, nbytes: int) -> Tensor:
        """As torch pins memory for the accelerator that is here."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def host_pool(self, page_bytes: int, pages: int) -> PagePool:
        """Page-locked host memory in pages."""
        return PagePool(self.pinned, page_bytes, pages)

    def graph(self) -> TorchGraph:
        """An empty graph. Raises `Unsupported` where torch has none for this kind of device."""
        if not _has_graphs():
            raise Unsupported(f"torch has no graphs for {self._device.type}")
        return TorchGraph()

    def topology(self) -> Topology:
        """The index and the machine; torch does not know the NUMA node."""
        return Topology(self._device.index, platform.node(), -1)

    def memory(self) -> Memory:
        """As torch says."""
        free, total = torch.accelerator.get_memory_info(self._device.index)
        return Memory(total=int(total), free=int(free))

    def synchronize(self, timeout: float) -> None:
        """Every stream, one after the other."""
        for stream in (*self._streams.values(), *self._adopted):
            stream.synchronize(timeout)

    def close(self) -> None:
        """Every stream refuses work from now on. Waits at most `CLOSE_TIMEOUT` for each."""
        for stream in (*self._streams.values(), *self._adopted):
            stream.close(CLOSE_TIMEOUT)

    def _stream(self, role: Role, native: torch.Stream, adopted: bool = False) -> TorchStream:
        return TorchStream(role, native, self._issue_lock, adopted)


class TorchBackend:
    """A member of the family `accelerator`.

    Args:
        device_type: torch's name of the kind of device; empty for the one that torch has here.
    """

    communicator = ""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    @property
    def name(self) -> str:
        """As users select it, with the kind of device that was found."""
        device = _device()
        found = "" if device is None else device.type
        return f"accelerator:{self._device_type or found}"

    @property
    def capabilities(self) -> Capabilities:
        """What torch offers for every device, and graphs where this kind has them.

        No stream lock, no private format. The kernels are the reference's, which read the device
        from the host, so no graph can hold them.
        """
        return Capabilities(streams=len(Role), graph_capture=_has_graphs(), pinned_memory=True)

    def probe(self) -> Probe:
        """Whether torch has this kind of accelerator here, and a device of it."""
        device = _device()
        if device is None:
            why = _load_plugins() or "install the vendor's plug-in for this torch"
            return Unavailable(f"torch has no accelerator here: {why}")
        if self._device_type not in ("", device.type):
            return Unavailable(
                f"torch's accelerator here is {device.type}, not {self._device_type}"
            )
        count = torch.accelerator.device_count()
        if count < 1:
            return Unavailable(f"torch sees no device of type {device.type}")
        return Available(f"torch {torch.__version__}, {count} device(s) of type {device.type}")

    def devices(self) -> int:
        """As torch counts them."""
        return 0 if isinstance(self.probe(), Unavailable) else torch.accelerator.device_count()

    def open(self, index: int) -> TorchAccelerator:
        """Make that device the calling thread's."""
        answer = self.probe()
        if isinstance(answer, Unavailable):
            raise BackendUnavailable(answer.reason)
        if not 0 <= index < self.devices():
            raise BackendUnavailable(f"{self.name} has {self.devices()} device(s): no {index}")
        torch.accelerator.set_device_index(index)
        kind = _device()
        assert kind is not None
        return TorchAccelerator(self.name, torch.device(kind.type, index))


def _device() -> torch.device | None:
    """Torch's accelerator, after the plug-ins of vendors were loaded."""
    _load_plugins()
    return torch.accelerator.current_accelerator()


@cache
def _load_plugins() -> str:
    """Load what `import torch` loads by itself, unless the environment says otherwise; the command
    `equipoise` says so. Returns why some of it does not load."""
    if torch.accelerator.current_accelerator() is not None:
        return ""
    failures = []
    for plugin in entry_points(group=PLUGINS):
        try:
            plugin.load()()
        except Exception as error:
            failures.append(f"{plugin.name} does not load: {first_line(error)}")
    return "; ".join(failures)


@cache
def _has_graphs() -> bool:
    """Whether torch makes graphs for the accelerator that is here; makes one and drops it."""
    if _device() is None or not hasattr(torch.accelerator, "Graph"):
        return False
    try:
        torch.accelerator.Graph()
    except RuntimeError:
        return False
    return True
