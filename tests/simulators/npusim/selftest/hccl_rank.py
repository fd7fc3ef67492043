"""One rank of the communication self-test."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

npu: Any = torch.get_device_module("npu")
"""torch_npu's part of torch; it has no types."""
TIMEOUT = 60.0
"""Seconds that anything in a rank may take."""


@dataclass
class Rank:
    """This process among the others, and what it has compared."""

    index: int
    world: int
    store: Any
    compared: int = 0
    kept_works: list[object] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """A device of its own."""
        return torch.device("npu", self.index)

    def group(self, ranks: list[int] | None = None) -> dist.ProcessGroup:
        """A group of its own communicator; all ranks of the world call it. By default all."""
        new_group: Any = dist.new_group(ranks)
        return new_group  # type: ignore[no-any-return]

    def backend(self, group: dist.ProcessGroup) -> Any:
        """torch_npu's side of a group."""
        return group._get_backend(self.device)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device."""
        return tensor.to(self.device)

    def expect(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Equal to the bit, or the process ends."""
        host = actual.cpu()
        if (
            host.shape != expected.shape
            or host.dtype != expected.dtype
            or not _same(host, expected)
        ):
            raise AssertionError(f"rank {self.index}: {what}: {host} instead of {expected}")
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


def until(holds: Callable[[], bool], what: str, limit: float = TIMEOUT) -> None:
    """Wait; raises `TimeoutError` after `limit` seconds."""
    start = time.monotonic()
    while not holds():
        if time.monotonic() - start > limit:
            raise TimeoutError(f"{what} has not come within {limit} s")
        time.sleep(0.002)


def join(index: int, world: int, path: str) -> Rank:
    """Take part; every rank has a device of its own."""
    npu.set_device(index)
    store = dist.FileStore(path, world)  # type: ignore[attr-defined]
    inside = dist.PrefixStore("groups", store)  # type: ignore[attr-defined]
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("hccl", store=inside, rank=index, world_size=world, timeout=limit)
    return Rank(index, world, dist.PrefixStore("test", store))  # type: ignore[attr-defined]


def run(program: Callable[[Rank], None], index: int, world: int, store: str) -> int:
    """Take part in one program; how many comparisons were made."""
    rank = join(index, world, store)
    program(rank)
    return rank.compared


def leave() -> None:
    """End all groups in order."""
    dist.destroy_process_group()
