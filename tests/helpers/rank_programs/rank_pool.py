"""What the pool of ranks itself is tried with."""

import os
import signal
import threading
from typing import Any

import torch

from equipoise.hal.communicator import Fabric


def where_am_i(fabric: Fabric, word: str) -> dict[str, Any]:
    print("not for the driver")
    return {
        "word": word,
        "rank": fabric.control.rank,
        "size": fabric.control.size,
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
    }


def raise_on(fabric: Fabric, rank: int) -> str:
    if fabric.control.rank == rank:
        raise ValueError(f"rank {rank} was told to")
    return "fine"


def die_on(fabric: Fabric, rank: int) -> str:
    if fabric.control.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def hang(fabric: Fabric) -> None:
    threading.Event().wait()
