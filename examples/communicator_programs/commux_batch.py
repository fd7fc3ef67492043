"""X1: batch_isend_irecv of commux waits for nothing: the message is not there."""

import tempfile
from datetime import timedelta

import commux
import torch
from torch import distributed, multiprocessing


def main(rank: int, store: str) -> None:  # noqa: D103
    commux.register()
    distributed.init_process_group("ucx", f"file://{store}", timedelta(seconds=9), 2, rank)
    message = torch.full((4,), 7 - 7 * rank)
    call = (distributed.isend, distributed.irecv)[rank]
    works = distributed.batch_isend_irecv([distributed.P2POp(call, message, 1 - rank)])
    for work in works:
        work.wait()
    if rank == 1 and message.tolist() != [7] * 4:
        print(f"SHOWN: {len(works)} handles were waited for, and {message.tolist()} is here")


if __name__ == "__main__":
    multiprocessing.spawn(main, (tempfile.mktemp(),), nprocs=2)
