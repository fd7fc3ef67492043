"""The first operations of a communicator: HCCL builds its links with them, and blocks meanwhile.

Each kind of collective has links of its own, and so has every pair of ranks in a batch. So all of
them are used once, by all ranks at once, before anybody else uses the communicator.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.backends.ascend.flight import Flight
from equipoise.backends.ascend.group import Group


@dataclass(frozen=True)
class Greeting:
    """What ends when every member has called everything.

    Attributes:
        flight: the last operation, behind all others.
        scratch: int8 [1], whose contents nobody wants.
    """

    flight: Flight
    scratch: Tensor


def greet_all(group: Group, rank: int, size: int, device: Any) -> Greeting:
    """Use every kind of operation of a communicator; the sum comes last, for it joins all."""
    word, words = _zeros(1, torch.int32, device), _zeros(size, torch.int32, device)
    into, given = _zeros(size, torch.int8, device), _zeros(size, torch.int8, device)
    byte = _zeros(1, torch.int8, device)
    group._allgather_base(into, byte)
    group._reduce_scatter_base(word, words)
    group.broadcast(byte, 0)
    group.alltoall_base(into, given, [], [])
    group.alltoall_base(into, given, [1] * size, [1] * size)
    peers = [peer for peer in range(size) if peer != rank]
    if peers:
        ways = ["irecv"] * len(peers) + ["isend"] * len(peers)
        blobs = [part[peer : peer + 1] for part in (into, given) for peer in peers]
        group.batch_isend_irecv(ways, blobs, peers + peers)
    last = group.allreduce([word])
    return Greeting(Flight(last, (word, words, into, given, byte), device.index), byte)


def greet_peer(group: Group, rank: int, size: int, device: Any) -> Greeting:
    """Send a byte from rank 0 to rank 1."""
    byte = _zeros(1, torch.int8, device)
    sent = group.batch_isend_irecv(["isend" if rank == 0 else "irecv"], [byte], [1 - rank])
    return Greeting(Flight(sent, (byte,), device.index), byte)


def _zeros(count: int, dtype: torch.dtype, device: Any) -> Tensor:
    return torch.zeros(count, dtype=dtype).to(device)
