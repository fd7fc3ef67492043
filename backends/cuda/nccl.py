"""The NCCL backend: the entry point `equipoise.communicators: nccl`."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from equipoise.backends.cuda import cuda_runtime, nccl_api
from equipoise.backends.cuda.driver_streams import bind_device, driver_streams, release_stream
from equipoise.backends.cuda.host_flags import host_flag_pool
from equipoise.backends.cuda.nccl_api import MIN_VERSION, NcclApi, NcclError
from equipoise.backends.cuda.nccl_comm import NcclComm
from equipoise.backends.cuda.nccl_settings import (
    MAX_CTAS,
    SHARED_DEVICES_VERSION,
    blocking_setting,
    estimate_bytes,
    sharing_requested,
    sum_dtypes,
)
from equipoise.backends.devices.collectives.bootstrap import Bootstrap
from equipoise.backends.devices.collectives.ccl import (
    TRANSFER_DTYPES,
    CclComm,
    CommSpec,
    Warmup,
    WarmupOps,
)
from equipoise.backends.devices.collectives.fabric import DeviceCommunicatorBackend
from equipoise.backends.devices.runtime import Device, DeviceRuntime
from equipoise.hal.capabilities import Available, CommunicatorCapabilities, Probe, Unavailable

WARMUP_SIZES: tuple[int, ...] = (4, 1 << 12, 1 << 16, 1 << 20, 1 << 23)
"""Bytes of the warm-up's all-reduces, reduce-scatters and all-gathers: NCCL chooses an algorithm
and protocol by size, and connects each when it is first used. A larger message that takes yet
another algorithm connects it with its first launch, which its deadline bounds."""
POLL_INTERVAL = 0.001
"""Seconds between two polls of whether all ranks have joined: joining takes tenths of a second, and
is done once per communicator."""


class FlagEvent:
    """A deferred event: a host flag that streams wait for until another stream sets it. Used once.

    An order through a flag is not visible to CUDA (see `host_flags`). So a wait that comes after
    the recording uses an event; only a wait that comes before it uses the flag.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._flag = host_flag_pool(device).take()
        self._lock = threading.Lock()
        self._recorded: Any = None

    def wait(self) -> None:
        """Make the current stream wait for the recording."""
        device = self._device
        bind_device(device)
        stream = device.runtime.current_stream(device.index)
        with self._lock:
            if self._recorded is None:
                self._flag.enqueue_wait(stream, 1)
            else:
                self._recorded.wait(stream)

    def record(self, stream: Any) -> None:
        """Record on `stream`, which sets the flag for the streams that already wait."""
        bind_device(self._device)
        # Under the lock: a wait sees either no event, and then its flag is set after it, or the
        # event.
        with self._lock:
            self._flag.enqueue_write(stream, 1)
            self._recorded = self._device.runtime.event()
            self._recorded.record(stream)


class Nccl:
    """NCCL, by its C interface.

    Not by torch's process group: its watchdog ends the process, and its streams come from a pool
    of 32, after which two communicators share a stream.

    Args:
        load: loads NCCL. Raises OSError, and AttributeError if a function is missing.
    """

    name = "nccl"
    title = "NCCL"
    runtime: DeviceRuntime = cuda_runtime.RUNTIME
    one_at_a_time = False
    """Each communicator is made on a thread and a stream of its own; none of it is per process."""

    def __init__(self, load: Callable[[], NcclApi] = nccl_api.load) -> None:
        self._load = load

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """What NCCL can do, as the environment sets it up."""
        return CommunicatorCapabilities(
            stream_ordered=True,
            # Kernels of two communicators may wait for each other's multiprocessors (NCCL #783).
            independent_groups=False,
            abort=True,
            rebuild=True,
            shared_devices=sharing_requested() and self._version() >= SHARED_DEVICES_VERSION,
            dtypes=TRANSFER_DTYPES,
            reductions=sum_dtypes(),
        )

    def probe(self) -> Probe:
        """Whether torch sees a GPU, NCCL loads, and no setting breaks the contract."""
        answer = cuda_runtime.probe()
        if isinstance(answer, Unavailable):
            return answer
        if reason := blocking_setting() or cuda_runtime.stream_memory() or self._why_unusable():
            return Unavailable(reason)
        return Available(f"{answer.detail}; NCCL {'.'.join(map(str, self._version()))}")

    def device(self, rank: int) -> int:
        """The device that this process has opened, else the one of the rank's number."""
        device_index = self.runtime.selected_device()
        return rank % self.runtime.devices() if device_index is None else device_index

    def capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured."""
        return self.runtime.is_capturing()

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Accept everything: CUDA has no private formats."""

    def deferred_event(self, index: int) -> FlagEvent:
        """A new host flag."""
        return FlagEvent(Device(self.runtime, index))

    def release_stream(self, index: int) -> Any:
        """A stream that the driver made for this use only."""
        return release_stream(Device(self.runtime, index)).stream

    def estimate_bytes(self, link: bool) -> int:
        """An estimate from the settings: NCCL reports nothing before it has made a communicator."""
        return estimate_bytes(link)

    def init_comm(
        self, spec: CommSpec, device: Device, bootstrap: Bootstrap, warmup: Warmup
    ) -> tuple[NcclComm, WarmupOps]:
        """Exchange the unique id, then join. Joining is polled up to the bootstrap's deadline, and
        then aborted.

        No rank joins before all have the id: an abort ends this rank's part only, and the others
        would go on waiting.
        """
        api, size = self._load(), len(spec.ranks)
        bind_device(device)
        where = _where(api, spec, bootstrap)
        comm = api.join(where, size, spec.rank, MAX_CTAS)
        try:
            while api.in_progress(comm):
                if bootstrap.remaining == 0.0:
                    raise NcclError("not all ranks have joined in time; it was aborted")
                time.sleep(POLL_INTERVAL)
            place = (spec.rank, size)
            streams = driver_streams(device)
            group = NcclComm(api, comm, place, streams, device, spec.deadline)
        except BaseException:
            api.abort(comm)
            raise
        try:
            with device.runtime.current(group.stream):
                memory = () if spec.is_link else connect_algorithms(group, size, device.torch)
                ops = warmup(group, spec.rank, size, device.torch)
            return group, replace(ops, buffers=(*ops.buffers, *memory))
        except BaseException:
            group.abort()
            raise

    def _version(self) -> tuple[int, ...]:
        try:
            return self._load().version()
        except (OSError, AttributeError):
            return ()

    def _why_unusable(self) -> str:
        try:
            version = self._load().version()
        except (OSError, AttributeError, RuntimeError) as error:
            return f"NCCL does not load: {error}"
        if version[: len(MIN_VERSION)] < MIN_VERSION:
            older, oldest = (".".join(map(str, numbers)) for numbers in (version, MIN_VERSION))
            return f"NCCL {older} is too old: {oldest} is needed"
        return ""


def connect_algorithms(group: CclComm, size: int, device: Any) -> tuple[Tensor, ...]:
    """Use each collective at the sizes of `WARMUP_SIZES`, so that NCCL connects every algorithm.
    Returns the memory, which is in use until the warm-up has ended."""
    whole = torch.zeros(max(WARMUP_SIZES) // 4, dtype=torch.int32).to(device)
    part = torch.zeros(max(WARMUP_SIZES) // 4, dtype=torch.int32).to(device)
    for nbytes in WARMUP_SIZES:
        count = max(nbytes // 4, 1)
        each = max(count // size, 1)
        if each * size > whole.numel():
            continue  # more ranks than elements; a larger size covers it
        group.all_reduce(whole[:count])
        group.reduce_scatter(part[:each], whole[: each * size])
        group.all_gather(whole[: each * size].view(torch.int8), part[:each].view(torch.int8))
    return whole, part


def _where(api: NcclApi, spec: CommSpec, bootstrap: Bootstrap) -> bytes:
    """The unique id. The first member publishes it, and goes on when all others have read it, so
    that all of them are about to join."""
    first, *other_ranks = bootstrap.ranks
    if spec.rank == 0:
        where = api.unique_id()
        bootstrap.publish("where", where)
        bootstrap.wait_for("heard", tuple(other_ranks))
        return where
    (where,) = bootstrap.wait_for("where", (first,))
    bootstrap.publish("heard")
    return where


class NcclBackend(DeviceCommunicatorBackend):
    """Communicators over NCCL."""

    def __init__(self, load: Callable[[], NcclApi] = nccl_api.load) -> None:
        super().__init__(Nccl(load))


NCCL = NcclBackend()
