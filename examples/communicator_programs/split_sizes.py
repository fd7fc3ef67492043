"""X5: split sizes that do not fit the group are refused after the call."""

import tempfile
from datetime import timedelta

import torch
from torch import distributed, multiprocessing


def main(rank: int, store: str) -> None:  # noqa: D103
    distributed.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), 2, rank)
    out, tensor = torch.zeros(2), torch.ones(2)
    work = distributed.all_to_all_single(out, tensor, [1, 1], [1], async_op=True)
    try:
        work.wait()
    except RuntimeError as error:
        print(f"SHOWN by rank {rank}: accepted at the call, then {str(error).splitlines()[0]}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(main, (tempfile.mktemp(),), nprocs=2)
