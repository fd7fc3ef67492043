"""One rank of the communication self-test: `python -m npusim.selftest.hccl_rank PROGRAM ...`."""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = 60.0
"""Seconds that anything in a rank may take."""


@dataclass
class Rank:
    """This process among the others, and what it has compared."""

    index: int
    world: int
    store: dist.Store
    compared: int = 0
    kept: list[object] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """A device of its own."""
        return torch.device("npu", self.index)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device."""
        return tensor.to(self.device)

    def expect(self, got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        """Equal to the bit, or the process ends."""
        host = got.cpu()
        if host.shape != wanted.shape or host.dtype != wanted.dtype or not _same(host, wanted):
            raise AssertionError(f"rank {self.index}: {what}: {host} instead of {wanted}")
        self.compared += 1

    def check(self, holds: bool, what: str) -> None:
        """True, or the process ends."""
        if not holds:
            raise AssertionError(f"rank {self.index}: {what}")
        self.compared += 1

    def meet(self, name: str) -> None:
        """All ranks come here, through the store: no device has a part in it."""
        self.store.add(name, 1)
        until(lambda: self.store.add(name, 0) == self.world, name)


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))


def until(holds: Callable[[], bool], what: str, limit: float = PATIENCE) -> None:
    """Wait; raises `TimeoutError` after `limit` seconds."""
    start = time.monotonic()
    while not holds():
        if time.monotonic() - start > limit:
            raise TimeoutError(f"{what} has not come within {limit} s")
        time.sleep(0.002)


def join(index: int, world: int, path: str) -> Rank:
    """Take part; every rank has a device of its own."""
    torch.npu.set_device(index)
    store = dist.FileStore(path, world)
    inside = dist.PrefixStore("groups", store)
    limit = timedelta(seconds=PATIENCE)
    dist.init_process_group("hccl", store=inside, rank=index, world_size=world, timeout=limit)
    return Rank(index, world, dist.PrefixStore("test", store))


def main() -> None:
    """Run one program and print how many comparisons it made."""
    from npusim.selftest import hccl_right, hccl_wrong

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=[*hccl_right.PROGRAMS, *hccl_wrong.PROGRAMS])
    parser.add_argument("index", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("store")
    asked = parser.parse_args()
    rank = join(asked.index, asked.world, asked.store)
    (hccl_right.PROGRAMS | hccl_wrong.PROGRAMS)[asked.program](rank)
    print(f"compared {rank.compared}", flush=True)
    if asked.program in hccl_wrong.PROGRAMS:
        os._exit(0)  # streams that have failed are not taken down in order
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
