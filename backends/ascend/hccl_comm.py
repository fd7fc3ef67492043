"""An HCCL communicator, by torch_npu's process group.

The group is constructed directly, outside torch.distributed's list of groups: this needs no
`init_process_group` and changes nothing of an engine's groups.
"""

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
"""Torch_npu's watchdog ends the process at a time-out; ours (`collectives.watchdog`) raises an
error at the deadline instead."""
PLAIN_FORMATS = (-1, 0, 2, 30)
"""The vendor's numbers of formats that are plain strided layouts: undefined, NCHW, ND, NCDHW."""


class HcclHandle:
    """The handle of an operation.

    Args:
        work: torch_npu's own.
    """

    def __init__(self, work: Any) -> None:
        self._work = work

    def block_stream(self) -> None:
        """Make the current stream wait for the end."""
        self._work.wait()

    def is_complete(self) -> bool:
        """Whether the device has finished the operation."""
        return bool(self._work.is_completed())

    def error(self) -> str:
        """An error of the network, which HCCL reports per communicator; empty if none."""
        return "" if self._work.is_success() else "HCCL reports an error of its communicator"


class HcclComm:
    """A process group of torch_npu, whose HCCL communicator is made by its first operation.

    Args:
        group: the process group.
        store: the store that it was made with, which it refers to as long as it lives.
        pool: the device's pool of streams.
    """

    def __init__(self, group: Any, store: object, pool: HcclStreamPool) -> None:
        self._group: Any = group
        self._store = store
        self._pool = pool
        self._stream: PoolStream | None = None

    @property
    def stream(self) -> PoolStream:
        """The stream that it runs on."""
        assert self._stream is not None, "known after the first operation"
        return self._stream

    def record_stream(self, device: Any, name: str) -> None:
        """Record which stream torch_npu has taken for it; called after the first operation."""
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
        """Not possible: torch_npu's abort releases the communicator, and what is in flight
        hangs."""
        raise NotImplementedError("HCCL cannot abort, and does not say so")

    def close(self) -> None:
        """Release the group, and its stream in the pool."""
        if self._group is not None and self._stream is not None:
            self._pool.release(self._stream)
        self._group = None

    @property
    def closed(self) -> bool:
        """Whether it was released."""
        return self._group is None


def make_process_group(store: Any, spec: CommSpec) -> Any:
    """A process group whose HCCL communicator is made by its first operation, once all ranks call
    it.

    Without the vendor's watchdog, which ends the process at a time-out or an error, where the
    contract requires an exception. Our own watchdog replaces it.
    """
    buffer = link_buffer_mib() if spec.is_link else group_buffer_mib()
    return private_api.make_process_group(
        store, spec.rank, spec.ranks, spec.name, buffer, NO_TIMEOUT
    )


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor is in a private format of the vendor."""
    layout = import_module(private_api.MODULE).get_npu_format
    return all(layout(tensor) in PLAIN_FORMATS for tensor in tensors)
