"""A3: all-to-all in place is accepted, and gives wrong data."""

import tempfile
from datetime import timedelta

import torch
from torch import distributed, multiprocessing


def main(rank: int, store: str) -> None:  # noqa: D103
    distributed.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), 2, rank)
    expected, wrong = [rank, 10 + rank], 0
    for _ in range(500):
        tensor = torch.arange(2) + 10 * rank
        distributed.all_to_all_single(tensor, tensor)
        wrong += tensor.tolist() != expected
    if wrong:
        print(f"SHOWN by rank {rank}: no error, and {wrong} of 500 results are not {expected}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(main, (tempfile.mktemp(),), nprocs=2)
