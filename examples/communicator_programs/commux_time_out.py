"""C8: a receive of commux without a send ignores the time-out of its group."""

import os
import tempfile
import threading
import time
from datetime import timedelta

import commux
import torch
from torch import distributed, multiprocessing


def main(rank: int, store: str) -> None:  # noqa: D103
    commux.register()
    distributed.init_process_group("ucx", f"file://{store}", timedelta(seconds=2), 2, rank)
    if rank == 0:
        receive = threading.Thread(target=distributed.recv, args=(torch.zeros(1), 1), daemon=True)
        receive.start()
        receive.join(6)
        print(f"SHOWN: after 6 s, with a time-out of 2 s: waiting is {receive.is_alive()}")
    time.sleep(7)
    os._exit(0)


if __name__ == "__main__":
    multiprocessing.spawn(main, (tempfile.mktemp(),), nprocs=2)
