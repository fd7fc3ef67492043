"""K5, K3: a message that has ended says so, yet a second wait fails by time-out."""

import tempfile
from datetime import timedelta

import torch
from torch import distributed, multiprocessing


def main(rank: int, store: str) -> None:  # noqa: D103
    distributed.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), 2, rank)
    group = distributed.new_group(timeout=timedelta(seconds=2))
    issue = distributed.irecv if rank else distributed.isend
    work = issue(torch.ones(1), 1 - rank, group)
    work.wait()
    try:
        work.wait()
    except RuntimeError as error:
        print(f"SHOWN by rank {rank}: completed is {work.is_completed()}, yet {str(error)[-60:]}")


if __name__ == "__main__":
    multiprocessing.spawn(main, (tempfile.mktemp(),), nprocs=2)
