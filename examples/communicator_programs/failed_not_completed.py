"""K3: a collective that has failed says for ever that it has not ended."""

import tempfile
import time
from datetime import timedelta

import torch
from torch import distributed, multiprocessing


def main(rank: int, store: str) -> None:  # noqa: D103
    distributed.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), 2, rank)
    group = distributed.new_group(timeout=timedelta(seconds=2))
    if rank == 1:
        time.sleep(4)
        return
    work = distributed.reduce_scatter_tensor(
        torch.zeros(1), torch.ones(2), group=group, async_op=True
    )
    try:
        work.wait()
    except RuntimeError:
        print(f"SHOWN: it has raised, and completed is {work.is_completed()}")


if __name__ == "__main__":
    multiprocessing.spawn(main, (tempfile.mktemp(),), nprocs=2)
