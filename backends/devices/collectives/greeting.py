"""The first operations of a group: libraries build their links with them, and block meanwhile.

Each kind of collective has links of its own, and so has every pair of ranks in a batch. So all of
them are used once, by all ranks at once, before anybody else uses the group.
"""

from typing import Any

import torch
from torch import Tensor

from equipoise.backends.devices.collectives.library import Greeting, Group


def greet_all(group: Group, rank: int, size: int, device: Any) -> Greeting:
    """Use every kind of operation of a communicator; the sum comes last, for it joins all."""
    word, words = _zeros(1, torch.int32, device), _zeros(size, torch.int32, device)
    into, given = _zeros(size, torch.int8, device), _zeros(size, torch.int8, device)
    byte = _zeros(1, torch.int8, device)
    group.all_gather(into, byte)
    group.reduce_scatter(word, words)
    group.broadcast(byte, 0)
    group.all_to_all(into, given, (), ())
    group.all_to_all(into, given, [1] * size, [1] * size)
    peers = [peer for peer in range(size) if peer != rank]
    if peers:
        ways = ["irecv"] * len(peers) + ["isend"] * len(peers)
        blobs = [part[peer : peer + 1] for part in (into, given) for peer in peers]
        group.batch(ways, blobs, peers + peers)
    last = group.all_reduce(word)
    return Greeting(last, (word, words, into, given, byte), byte)


def greet_peer(group: Group, rank: int, size: int, device: Any) -> Greeting:
    """Send a byte from rank 0 to rank 1."""
    byte = _zeros(1, torch.int8, device)
    sent = group.message("isend" if rank == 0 else "irecv", byte, 1 - rank)
    return Greeting(sent, (byte,), byte)


def _zeros(count: int, dtype: torch.dtype, device: Any) -> Tensor:
    return torch.zeros(count, dtype=dtype).to(device)
