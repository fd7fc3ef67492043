"""S2: a broadcast of a strided tensor is accepted, and only a part of it arrives."""

import tempfile
from datetime import timedelta

import torch
from torch import distributed, multiprocessing


def main(rank: int, store: str) -> None:  # noqa: D103
    distributed.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), 2, rank)
    matrix = torch.full((2, 4), 9.0)
    columns = matrix[:, :2]
    if rank == 0:
        columns.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    distributed.broadcast(columns, 0)
    if columns.tolist() != [[1.0, 2.0], [3.0, 4.0]]:
        print(f"SHOWN by rank {rank}: no error, and the columns are {columns.tolist()}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(main, (tempfile.mktemp(),), nprocs=2)
