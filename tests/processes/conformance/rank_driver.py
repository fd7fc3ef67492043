"""A rank that answers who it is; as a program, a driver of three that waits to be killed."""

import os
import signal
import sys
import threading
from typing import Any

from equipoise.hal.conformance.executors.worker_pool import WorkerPool
from equipoise.hal.conformance.executors.worker_process import serve_requests

RANK = DRIVER = "processes.conformance.rank_driver"
THREADED = "processes.conformance.threaded_rank"
FAILING = "processes.conformance.failing_rank"
IMPORTED_BY = os.getpid()
LIMIT = 180.0
"""Seconds that three ranks may take to answer."""


def answer(order: dict[str, Any]) -> dict[str, Any]:
    """Answers who this is, unless the order is to end."""
    if "exit" in order:
        os._exit(order["exit"])
    if "kill" in order:
        os.kill(os.getpid(), order["kill"])
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "imported_by": IMPORTED_BY,
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def main() -> None:
    """Be a rank."""
    serve_requests(answer)


def drive() -> None:
    """Start three ranks of the named module, stop one, print their process ids, and wait."""
    pool = WorkerPool(sys.argv[1:])
    pool.start(range(3))
    pool.send({rank: {} for rank in range(3)})
    # Three imports of torch at once take more than half a minute on a busy machine.
    replies = pool.gather(range(3), (), LIMIT, lambda _rank, _how: None)
    os.kill(replies[1]["pid"], signal.SIGSTOP)
    print(replies[0]["parent"], *[replies[rank]["pid"] for rank in range(3)], flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    drive()
