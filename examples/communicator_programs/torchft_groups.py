"""Registers torchft's process groups with torch.distributed: `c10d:torchft_groups:torchft-gloo`.

torchft configures a group by the address of a store, not by a store; the address is that of the
store that the ranks have met at.
"""

import uuid
from datetime import timedelta
from typing import Any

from torch.distributed import Backend, PrefixStore, TCPStore
from torchft.process_group import ProcessGroup, ProcessGroupBabyGloo, ProcessGroupGloo


def address(store: Any, rank: int) -> str:
    """HOST:PORT/PREFIX, the prefix new and the same on all ranks."""
    tcp = store
    while isinstance(tcp, PrefixStore):
        tcp = tcp.underlying_store
    if not isinstance(tcp, TCPStore):  # a group of one rank meets nowhere
        tcp = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        STORES.append(tcp)
    if rank == 0:
        store.set("prefix", uuid.uuid4().hex)
    return f"{tcp.host}:{tcp.port}/{store.get('prefix').decode()}"


STORES: list[TCPStore] = []


def creator(kind: type[ProcessGroup]) -> Any:
    """What `init_process_group` calls."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
        group = kind(timeout=timeout)
        group.configure(address(store, rank), "replica", rank, size)
        return group

    return create


Backend.register_backend("torchft-gloo", creator(ProcessGroupGloo), devices=["cpu"])
Backend.register_backend("torchft-baby-gloo", creator(ProcessGroupBabyGloo), devices=["cpu"])
