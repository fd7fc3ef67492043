"""E2: a group that has failed takes further calls; their waits say that it has failed."""

import tempfile
import time
from contextlib import suppress
from datetime import timedelta

import torch
from torch import distributed, multiprocessing


def main(rank: int, store: str) -> None:  # noqa: D103
    distributed.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), 2, rank)
    group = distributed.new_group(timeout=timedelta(seconds=2))
    if rank == 1:
        return time.sleep(4)
    with suppress(RuntimeError):
        distributed.recv(torch.zeros(1), 1, group)
    work = distributed.all_reduce(torch.ones(1), group=group, async_op=True)
    try:
        work.wait()
    except RuntimeError as error:
        print(f"SHOWN: accepted at the call, then {str(error).splitlines()[0][-60:]}")


if __name__ == "__main__":
    multiprocessing.spawn(main, (tempfile.mktemp(),), nprocs=2)
