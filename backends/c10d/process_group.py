"""Opens and closes process groups by the public calls of `torch.distributed`.

A group is made as a user makes one, by `init_process_group`, so every backend that it knows can be
had: built in, registered by a plug-in, or wrapped by `TORCH_DISTRIBUTED_DEBUG=DETAIL`. Its one
default group would do for one communicator only: after each opening the place of the default group
is given back.
"""

import hashlib
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

from torch import distributed
from torch.distributed import ProcessGroup, Store, distributed_c10d  # type: ignore[attr-defined]

_OPENING = threading.Lock()
"""Held while a group is in the place of the default one: that place is the process's."""


def open_group(
    backend: str, store: Store, rank: int, size: int, timeout: float, label: str
) -> ProcessGroup:
    """A process group of its own. Raises what the library raises.

    Args:
        backend: the name that `init_process_group` knows.
        store: where the ranks of this group, and no others, meet.
        rank: this rank's number in the group.
        size: number of ranks.
        timeout: seconds; the library's own time-out of its operations.
        label: different for every group of this process, the same on all its ranks.
    """
    world: Any = distributed_c10d._world
    default_group: Any = distributed.group
    with _OPENING:
        default, count, excepthook = default_group.WORLD, world.group_count, sys.excepthook
        default_group.WORLD = None
        # torch names the keys of a group by how many the process has made, which is the same on
        # all ranks only if every rank takes part in every group.
        world.group_count = int.from_bytes(hashlib.sha256(label.encode()).digest()[:7])
        try:
            with _mpi_warning_ignored() if backend == "mpi" else nullcontext():
                distributed.init_process_group(
                    backend,
                    store=store,
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(seconds=timeout),
                )
            return cast(ProcessGroup, default_group.WORLD)
        finally:
            default_group.WORLD = default
            world.group_count, sys.excepthook = count, excepthook


@contextmanager
def _mpi_warning_ignored() -> Iterator[None]:
    """Without torch's warning that MPI numbers the ranks, even where torch was built without MPI.

    Filters are the process's, so those of other backends are left alone.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "For MPI backend, world_size", UserWarning)
        yield


def close_group(group: ProcessGroup) -> None:
    """Destroy it. Raises what the library raises."""
    with _OPENING:
        distributed.destroy_process_group(group)
