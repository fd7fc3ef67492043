"""Torch_npu's process group over HCCL, with the types that it does not bring.

A group is constructed by itself, outside torch.distributed's own list of groups, so that neither
`init_process_group` is needed nor anything of an engine's groups changes.
"""

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

from torch import Tensor

from equipoise.backends.ascend import private_api
from equipoise.backends.ascend.hccl_settings import group_buffer_mib, link_buffer_mib
from equipoise.backends.ascend.hccl_streams import HcclStreamPool, PoolStream
from equipoise.backends.devices.collectives.ccl import CommSpec

NO_TIMEOUT = timedelta(days=10_000)
HIGH_PRIORITY_VARIABLE = "TORCH_HCCL_HIGH_PRIORITY"
PLAIN_FORMATS = (-1, 0, 2, 30)
"""The vendor's numbers for layouts that are nothing but strides: undefined, NCHW, ND, NCDHW."""


class HcclHandle:
    """What an operation of a process group returns.

    Args:
        work: torch_npu's own.
    """

    def __init__(self, work: Any) -> None:
        self._work = work

    def block_stream(self) -> None:
        """Make the current stream wait for the end."""
        self._work.wait()

    def is_complete(self) -> bool:
        """Whether the device has come behind the operation."""
        return bool(self._work.is_completed())

    def error(self) -> str:
        """The network's errors; HCCL reports those of a whole communicator."""
        return "" if self._work.is_success() else "HCCL reports an error of its communicator"


class HcclComm:
    """A process group of torch_npu's, whose communicator is made by its first operation.

    Args:
        group: the process group.
        store: what it was introduced by; it calls that as long as it lives.
        pool: the account of the device's streams.
    """

    def __init__(self, group: Any, store: object, pool: HcclStreamPool) -> None:
        self._group: Any = group
        self._store = store
        self._pool = pool
        self._stream: PoolStream | None = None

    @property
    def stream(self) -> PoolStream:
        """The stream that it runs on."""
        assert self._stream is not None, "known once it has run anything"
        return self._stream

    def record_stream(self, device: Any, name: str) -> None:
        """It has run something: enter which stream torch_npu took for it."""
        self._stream = self._pool.assign(private_api.stream_of(self._group, device), name)

    def all_reduce(self, tensor: Tensor) -> HcclHandle:
        """Sum in place."""
        return HcclHandle(self._group.allreduce([tensor]))

    def all_gather(self, out: Tensor, tensor: Tensor) -> HcclHandle:
        """Into one tensor."""
        return HcclHandle(self._group._allgather_base(out, tensor))

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> HcclHandle:
        """From one tensor."""
        return HcclHandle(self._group._reduce_scatter_base(out, tensor))

    def broadcast(self, tensor: Tensor, root: int) -> HcclHandle:
        """From one rank to all."""
        return HcclHandle(self._group.broadcast(tensor, root))

    def all_to_all(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> HcclHandle:
        """Rows of the first dimension; empty lists mean even parts."""
        return HcclHandle(self._group.alltoall_base(out, tensor, list(receives), list(sends)))

    def message(self, operation: str, blob: Tensor, peer: int) -> HcclHandle:
        """One message."""
        return self.batch([operation], [blob], [peer])

    def batch(
        self, operations: Sequence[str], blobs: Sequence[Tensor], peers: Sequence[int]
    ) -> HcclHandle:
        """Messages, at most one a peer and direction."""
        return HcclHandle(self._group.batch_isend_irecv(list(operations), list(blobs), list(peers)))

    def abort(self) -> None:
        """Torch_npu's abort gives the communicator back, and what is in flight hangs."""
        raise NotImplementedError("HCCL cannot abort, and does not say so")

    def close(self) -> None:
        """Let go of the group, and of its stream."""
        if self._group is not None and self._stream is not None:
            self._pool.release(self._stream)
        self._group = None

    @property
    def closed(self) -> bool:
        """Whether that has happened."""
        return self._group is None


def make_process_group(store: Any, spec: CommSpec) -> Any:
    """A process group whose communicator is made by its first operation, when all have called it.

    Without the vendor's watchdog: it would end the process at a time-out or an error, where the
    contract wants an error that is raised. Ours watches instead.
    """
    buffer = link_buffer_mib() if spec.is_link else group_buffer_mib()
    return private_api.make_process_group(
        store, spec.rank, spec.ranks, spec.name, buffer, NO_TIMEOUT
    )


class HighPriorityStreams:
    """Let torch_npu take a communicator's stream from the pool that nobody else uses.

    It reads an environment variable whenever a communicator is made, and ignores the option of that
    name. The variable is restored when the last of those that are being made has come through: one
    whose peer was lost may still be there when the next is made.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: str | None = None

    def __enter__(self) -> None:
        """Set the variable."""
        with self._lock:
            if not self._inside:
                self._before = os.environ.get(HIGH_PRIORITY_VARIABLE)
                os.environ[HIGH_PRIORITY_VARIABLE] = "1"
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        """Restore it after the last."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                if self._before is None:
                    del os.environ[HIGH_PRIORITY_VARIABLE]
                else:
                    os.environ[HIGH_PRIORITY_VARIABLE] = self._before


HIGH_PRIORITY_STREAMS = HighPriorityStreams()
"""Of this process."""


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether every tensor is laid out by its strides alone, not in a format of the vendor's."""
    layout = import_module(private_api.MODULE).get_npu_format
    return all(layout(tensor) in PLAIN_FORMATS for tensor in tensors)
