"""A torch process group for libraries that need one: ranks meet over the control plane."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from equipoise.hal.communicator import Fabric
from equipoise.hal.errors import CommunicatorFailed

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""Backend of torch.distributed by type of device."""


_open_groups: list["ProcessGroup"] = []
"""The process group that is open, if one is."""


class ProcessGroup:
    """The default process group of this process; there is one at a time.

    Collective among the ranks of `fabric`. Rank 0 holds the store. One that an earlier case has
    left open, because it failed, is ended first.

    Args:
        fabric: how the ranks meet.
        purpose: a name that nothing else has on the control plane.
        device: of this rank.
        deadline: seconds that any wait may last.

    Raises:
        CommunicatorFailed: the ranks cannot meet, or a group is open that is not one of these.
        BallotIncomplete: rank 0 did not say in time where its store is.
    """

    def __init__(self, fabric: Fabric, purpose: str, device: torch.device, deadline: float) -> None:
        control, question = fabric.control, f"{purpose}/store"
        while _open_groups:
            _open_groups[-1].close()
        if dist.is_initialized():
            raise CommunicatorFailed("torch.distributed has a default process group already")
        timeout = timedelta(seconds=deadline)
        rank, size = control.rank, control.size
        with _as_failure(purpose):
            if rank == 0:
                host = _own_address()
                store = TCPStore(host, 0, is_master=True, timeout=timeout)
                control.cast(question, f"{host} {store.port}".encode())
            else:
                (where,) = control.collect(question, deadline, [0])
                host, port = where.decode().split()
                store = TCPStore(host, int(port), is_master=False, timeout=timeout)
            dist.init_process_group(
                BACKENDS[device.type], store=store, rank=rank, world_size=size, timeout=timeout
            )
        assert dist.group.WORLD is not None
        self.group: dist.ProcessGroup = dist.group.WORLD
        self.rank = rank
        self.size = size
        _open_groups.append(self)

    def close(self) -> None:
        """End it; closing again is no error."""
        if self in _open_groups:
            _open_groups.remove(self)
            dist.destroy_process_group()


def _own_address() -> str:
    """What other machines reach this one by; loopback where its name means nothing."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


@contextmanager
def _as_failure(purpose: str) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        reason = " ".join(str(error).split())
        raise CommunicatorFailed(f"{purpose}: the ranks cannot meet: {reason}") from error
