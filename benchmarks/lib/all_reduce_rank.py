"""One rank of `shares.py --speed`, as a process: sums counts over the ranks, and times it.

Told what to do on standard input, in JSON; writes one line of JSON.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from equipoise.hal import registry
from equipoise.hal.communicator import Rendezvous

DEADLINE = 30.0
ROUNDS, CALLS = 15, 200


def main() -> None:
    """Serve what standard input says."""
    task: dict[str, Any] = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    rendezvous = Rendezvous(
        rank=task["rank"],
        size=task["ranks"],
        host=task["host"],
        port=task["port"],
        deadline=DEADLINE,
    )
    fabric = registry.communicator("gloo").connect(rendezvous)
    group = fabric.open("counts")
    counts = torch.ones(task["experts"], dtype=torch.int64)
    rounds = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        for _ in range(CALLS):
            counts.fill_(1)
            group.all_reduce(counts).result(DEADLINE)
        rounds.append((time.perf_counter() - began) / CALLS * 1e6)
    group.close()
    fabric.close()
    # The first round makes the links.
    Path(task["told"]).write_text(json.dumps({"microseconds": rounds[1:]}) + "\n")


if __name__ == "__main__":
    main()
