"""K5, K3: an isend that has ended says so, yet a second wait lasts until the time-out and fails."""

import sys
import tempfile
from datetime import timedelta

import torch
from torch import distributed, multiprocessing


def main(rank: int, store: str, backend: str) -> None:
    meet = {"init_method": f"file://{store}", "rank": rank, "world_size": 2}
    distributed.init_process_group(backend, **meet, timeout=timedelta(seconds=2))
    work = distributed.isend(torch.ones(1), 1) if rank == 0 else distributed.irecv(torch.ones(1), 0)
    work.wait()
    try:
        print(f"rank {rank}: completed {work.is_completed()}; second wait: {work.wait()}")
    except RuntimeError as error:
        print(f"rank {rank}: completed {work.is_completed()}; second wait: {type(error).__name__}")


if __name__ == "__main__":
    multiprocessing.spawn(main, (tempfile.mktemp(), sys.argv[1]), nprocs=2)
