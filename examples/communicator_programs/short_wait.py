"""E3: a wait whose own time-out passes ends the operation, and the group with it."""

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
    work = distributed.irecv(torch.zeros(1), 1, group)
    with suppress(RuntimeError):
        work.wait(timedelta(seconds=0.1))
    try:
        work.wait()
    except RuntimeError as error:
        print(f"SHOWN: the operation's 2 s have not passed, and it has ended: {error}")


if __name__ == "__main__":
    multiprocessing.spawn(main, (tempfile.mktemp(),), nprocs=2)
