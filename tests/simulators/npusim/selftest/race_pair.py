"""Two programs of two processes that race, and what makes each of them right.

    python -m npusim.selftest.race_pair RANK STORE

Rank 1 prints one JSON object: of ROUNDS rounds, how many were correct, by case and variant.
"""

import json
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from npusim.selftest.race_cases import ROUNDS, Bench, holds, npu

LIMIT = timedelta(seconds=60)
SENDER, RECEIVER = 0, 1


class Pair(Bench):
    """One of the two ranks."""

    def __init__(self, rank: int, store: Path) -> None:
        super().__init__(device=rank)
        self.rank = rank
        self.store = dist.FileStore(str(store), 2)  # type: ignore[attr-defined]
        self.step = 0
        dist.init_process_group("hccl", store=self.store, rank=rank, world_size=2, timeout=LIMIT)
        self.data = self.on_device()
        self.copied = self.on_device()

    def meet(self) -> None:
        """Wait until the other is here, too; through the store, so that no stream is asked."""
        self.step += 1
        self.store.set(f"{self.step}/{self.rank}", "here")
        self.store.wait([f"{self.step}/{1 - self.rank}"], LIMIT)

    def send(self) -> dist.Work:
        """Send `data`."""
        work = dist.isend(self.data, RECEIVER)
        assert work is not None
        return work

    def receive(self) -> dist.Work:
        """Receive into `data`."""
        work = dist.irecv(self.data, SENDER)
        assert work is not None
        return work

    def received(self, k: int) -> bool:
        """Whether what a stream reads from `data` now is what was sent in round `k`."""
        self.copied.copy_(self.data)
        return holds(self.copied.cpu(), k)


def use_without_wait(pair: Pair, k: int, right: bool) -> bool:
    """What was received is read by another stream."""
    if pair.rank == SENDER:
        pair.send().wait()
        return True
    work = pair.receive()
    if right:
        work.wait()
    correct = pair.received(k)
    work.wait()
    return correct


def overwrite_without_wait(pair: Pair, k: int, right: bool) -> bool:
    """What is sent is overwritten by another stream."""
    if pair.rank == RECEIVER:
        pair.receive().wait()
        return pair.received(k)
    work = pair.send()
    if right:
        work.wait()
    pair.data.copy_(pair.stale, non_blocking=True)
    pair.main.synchronize()
    work.wait()
    return True


CASES: Mapping[str, Callable[[Pair, int, bool], bool]] = {
    "received tensor used without wait": use_without_wait,
    "sent tensor overwritten without wait": overwrite_without_wait,
}


def play(pair: Pair, case: Callable[[Pair, int, bool], bool], right: bool) -> int:
    """How many rounds were correct."""
    correct = 0
    for k in range(ROUNDS):
        pair.data.copy_(pair.sources[k] if pair.rank == SENDER else pair.stale)
        npu.synchronize()
        pair.meet()
        correct += case(pair, k, right)
        npu.synchronize()
    return correct


def main(rank: int, store: Path) -> int:
    """Play every case, both variants; returns the exit code."""
    pair = Pair(rank, store)
    correct_rounds = {
        f"{name}/{variant}": play(pair, case, variant == "right")
        for name, case in CASES.items()
        for variant in ("right", "wrong")
    }
    pair.meet()
    dist.destroy_process_group()
    if rank == RECEIVER:
        print(json.dumps(correct_rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
