"""Torch_npu's process group over HCCL, with the types that it does not bring.

A group is constructed by itself, outside torch.distributed's own list of groups, so that neither
`init_process_group` is needed nor anything of an engine's groups changes.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from equipoise.backends.ascend import native

UNTIL_DOOMSDAY = timedelta(days=10_000)
HIGH = "TORCH_HCCL_HIGH_PRIORITY"
PLAIN_FORMATS = (-1, 0, 2, 30)
"""The vendor's numbers for layouts that are nothing but strides: undefined, NCHW, ND, NCDHW."""


class Native(Protocol):
    """What an operation of the group returns. Nothing here blocks the host."""

    def wait(self) -> bool:
        """Make the current stream wait for the end."""
        ...

    def is_completed(self) -> bool:
        """Whether the device has come behind the operation. Raises RuntimeError after an error."""
        ...

    def is_success(self) -> bool:
        """Whether HCCL reports no error of the communicator."""
        ...


class Group(Protocol):
    """The operations in use; tensors are contiguous, on the device, and lists hold one.

    Each is ordered behind the current stream, and runs on the one stream of the group, in the order
    of the calls.
    """

    def allreduce(self, tensors: list[Tensor]) -> Native:
        """Sum in place."""
        ...

    def _allgather_base(self, out: Tensor, tensor: Tensor) -> Native: ...

    def _reduce_scatter_base(self, out: Tensor, tensor: Tensor) -> Native: ...

    def broadcast(self, tensor: Tensor, root: int) -> Native:
        """From one rank to all."""
        ...

    def alltoall_base(
        self, out: Tensor, tensor: Tensor, receives: list[int], sends: list[int]
    ) -> Native:
        """Rows of the first dimension; empty lists mean even parts."""
        ...

    def batch_isend_irecv(self, ways: list[str], tensors: list[Tensor], peers: list[int]) -> Native:
        """Messages, at most one a peer and direction; `ways` are isend and irecv."""
        ...

    def get_coll_stream_id(self, device: Any) -> int:
        """The number of the stream that it runs on, once it has run anything."""
        ...


@dataclass(frozen=True)
class Membership:
    """What a process group is made of.

    Attributes:
        name: no other of this process has it.
        ranks: members, numbers of the run.
        rank: this rank's place among them.
        buffer: MiB of each of HCCL's two buffers.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    buffer: int


def make_group(store: Any, membership: Membership) -> Group:
    """A group whose communicator is made by its first operation, which blocks until all call it.

    The group is shut down at once, which ends the vendor's watchdog and nothing else: that thread
    would end the process at a time-out or an error, where the contract wants an error that is
    raised. Ours watches instead. Later a shutdown would wait for what is under way, for ever.
    """
    kind = import_module(native.MODULE)._C._distributed_c10d.ProcessGroupHCCL
    options = kind.Options()
    options._timeout = UNTIL_DOOMSDAY
    options.op_timeout = UNTIL_DOOMSDAY
    # Named even where they are all: a group that names none becomes the process's global one.
    options.global_ranks_in_group = list(membership.ranks)
    options.group_id = membership.name
    options.hccl_config = {"hccl_buffer_size": membership.buffer}
    group = kind(store, membership.rank, len(membership.ranks), options)
    group.shutdown()
    made: Group = group
    return made


@contextmanager
def high_priority() -> Iterator[None]:
    """Let torch_npu take a communicator's stream from the pool that nobody else uses.

    It reads this variable whenever a communicator is made, and ignores the option of that name.
    """
    before = os.environ.get(HIGH)
    os.environ[HIGH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[HIGH]
        else:
            os.environ[HIGH] = before


def plain(tensors: Sequence[Tensor]) -> bool:
    """Whether every tensor is laid out by its strides alone, not in a format of the vendor's."""
    layout = import_module(native.MODULE).get_npu_format
    return all(layout(tensor) in PLAIN_FORMATS for tensor in tensors)
