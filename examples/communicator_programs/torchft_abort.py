"""E8: abort of torchft's ProcessGroupGloo returns, and what was in flight is not ended."""

import time
from datetime import timedelta

import torch
from torch import multiprocessing
from torch.distributed import TCPStore
from torchft.process_group import ProcessGroupGloo


def main(rank: int, port: int) -> None:  # noqa: D103
    group = ProcessGroupGloo(timeout=timedelta(seconds=4))
    group.configure(f"127.0.0.1:{port}/abort", "replica", rank, 2)
    work = group.recv([torch.zeros(1)], 1 - rank, 0)
    group.abort()
    began = time.monotonic()
    try:
        work.wait()
    except RuntimeError as error:
        seconds = round(time.monotonic() - began)
        print(f"SHOWN by rank {rank}: {seconds} s after the abort: {str(error)[-52:]}")


if __name__ == "__main__":
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(main, (store.port,), nprocs=2)
