"""K2: a send whose handle is dropped never reaches its receive."""

import tempfile
import time
from datetime import timedelta

import torch
from torch import distributed, multiprocessing


def main(rank: int, store: str) -> None:  # noqa: D103
    distributed.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), 2, rank)
    group = distributed.new_group(timeout=timedelta(seconds=2))
    if rank == 0:
        distributed.isend(torch.ones(1), 1, group)
        time.sleep(4)
        return
    time.sleep(1)
    try:
        distributed.recv(torch.zeros(1), 0, group)
    except RuntimeError as error:
        print(f"SHOWN: the message never came: {str(error)[-60:]}")


if __name__ == "__main__":
    multiprocessing.spawn(main, (tempfile.mktemp(),), nprocs=2)
