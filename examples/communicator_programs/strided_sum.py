"""S2, A4: a sum of a strided tensor is accepted, and sums the first elements of the memory."""

import tempfile
from datetime import timedelta

import torch
from torch import distributed, multiprocessing


def main(rank: int, store: str) -> None:  # noqa: D103
    distributed.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), 2, rank)
    vector = torch.arange(8.0)
    distributed.all_reduce(vector[::2])
    if vector.tolist() != [0.0, 1.0, 4.0, 3.0, 8.0, 5.0, 12.0, 7.0]:
        print(f"SHOWN by rank {rank}: no error, and the vector is {vector.tolist()}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(main, (tempfile.mktemp(),), nprocs=2)
