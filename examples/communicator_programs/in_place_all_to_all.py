"""A3: all-to-all in place is accepted, and gives wrong data."""

import tempfile
from datetime import timedelta

import torch
from torch import distributed, multiprocessing


def main(rank: int, store: str) -> None:  # noqa: D103
    distributed.init_process_group("gloo", f"file://{store}", timedelta(seconds=2), 2, rank)
    tensor = torch.arange(2) + 10 * rank
    distributed.all_to_all_single(tensor, tensor)
    if tensor.tolist() != [rank, 10 + rank]:
        print(f"SHOWN by rank {rank}: no error, and {tensor.tolist()}, not {[rank, 10 + rank]}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(main, (tempfile.mktemp(),), nprocs=2)
