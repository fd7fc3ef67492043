"""P1 of sums: an asynchronous sum of commux blocks the caller until its peer comes."""

import tempfile
import time
from datetime import timedelta

import commux
import torch
from torch import distributed, multiprocessing


def main(rank: int, store: str) -> None:  # noqa: D103
    commux.register()
    distributed.init_process_group("ucx", f"file://{store}", timedelta(seconds=9), 2, rank)
    time.sleep(3 * rank)
    began = time.monotonic()
    work = distributed.all_reduce(torch.ones(1), async_op=True)
    seconds = time.monotonic() - began
    if rank == 0 and seconds > 2:
        print(
            f"SHOWN: the call, which is asynchronous, took {seconds:.1f} s; rank 1 came after 3 s"
        )
    work.wait()


if __name__ == "__main__":
    multiprocessing.spawn(main, (tempfile.mktemp(),), nprocs=2)
