"""Worlds for the tests of the virtual backend, and what they are played with."""

from collections.abc import Callable, Sequence

from torch import Tensor

from equipoise.backends.virtual.communicator import VirtualCommunicator
from equipoise.backends.virtual.work import VirtualWork
from equipoise.backends.virtual.world import VirtualWorld

SECONDS = 1.0
"""The deadline of every operation: whoever waits so long waits until nothing can move."""
Worlds = Callable[..., VirtualWorld]
"""`make_world(size=1, schedule=b"", backend=BACKEND)`; all are closed at the end of the test."""


def opened(world: VirtualWorld, ranks: Sequence[int] | None = None) -> list[VirtualCommunicator]:
    members = range(world.size) if ranks is None else ranks
    return [world.fabric(rank).open("main", ranks) for rank in members]


def settle(world: VirtualWorld) -> None:
    world.until(lambda: False, SECONDS)


def filled(world: VirtualWorld, rank: int, value: int, nbytes: int = 8) -> Tensor:
    return world.empty(rank, nbytes).fill_(value)


def works_of_a_sum(world: VirtualWorld) -> list[VirtualWork]:
    return [end.all_reduce(filled(world, rank, rank + 1)) for rank, end in enumerate(opened(world))]
