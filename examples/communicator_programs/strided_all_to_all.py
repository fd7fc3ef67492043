"""S2: an all-to-all accepts an output that is not contiguous, and fills its memory in order."""

import tempfile
from datetime import timedelta

import torch
from torch import distributed, multiprocessing


def main(rank: int, store: str) -> None:  # noqa: D103
    distributed.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), 2, rank)
    received = torch.zeros(2, 2).t()
    distributed.all_to_all_single(received, torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank)
    right = [[1.0 + 2 * rank, 2.0 + 2 * rank], [11.0 + 2 * rank, 12.0 + 2 * rank]]
    if received.tolist() != right:
        print(f"SHOWN by rank {rank}: no error, and {received.tolist()}, not {right}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(main, (tempfile.mktemp(),), nprocs=2)
