"""The executor for controlled worlds: all ranks in one thread, every interleaving chosen."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.communicator import Communicator
from equipoise.hal.conformance.bench import Bench, End, demand
from equipoise.hal.conformance.controlled import ControlledBackend, ControlledWorld
from equipoise.hal.conformance.driver import Actor, drive
from equipoise.hal.conformance.program import Case
from equipoise.hal.conformance.property import Property, Ranks, Traits
from equipoise.hal.conformance.subject import blame, judge
from equipoise.hal.slots import Segment
from equipoise.hal.stream import Stream

DEADLINE = 1.0
"""Nominal seconds of an operation; there is no clock, it strikes when nothing can move."""
SIZES = (1, 2, 3, 4, 5, 8)


@dataclass
class ControlledSurroundings:
    """What a controlled world does for one rank's bench."""

    world: ControlledWorld
    rank: int

    def empty(self, nbytes: int) -> Tensor:
        """Memory that is scribbled and reused as soon as it is dropped."""
        return self.world.empty(self.rank, nbytes)

    def private(self, elements: int, dtype: torch.dtype, padding: int) -> Tensor:
        """Memory whose storage goes on behind the elements."""
        nbytes = elements * dtype.itemsize
        return self.empty(nbytes + padding)[:nbytes].view(dtype)

    def stored(self, tensor: Tensor) -> Tensor:
        """The whole storage."""
        return Segment("", tensor, SlotFormat.PRIVATE).bytes

    def churn(self) -> None:
        """Nothing to do: dropped memory is scribbled at once."""

    def hold(self, stream: Stream) -> Callable[[], None]:
        """The world holds the stream."""
        self.world.hold(self.rank, stream)
        return lambda: self.world.let_go(self.rank, stream)

    def disturb(self, stream: Stream) -> None:
        """Nothing to do: the schedule disturbs enough."""

    def open(self, purpose: str, ranks: Sequence[int] | None) -> Communicator:
        """The world is fresh in every case, and so is every purpose."""
        return self.world.fabric(self.rank).open(purpose, ranks)

    def end(self, how: End) -> None:
        """By the world."""
        if how is End.KILL:
            self.world.kill(self.rank)
        else:
            self.world.stop(self.rank)

    def lose_store(self, how: End) -> None:
        """By the world, which has no clock: to be gone and to be silent is one and the same."""
        self.world.lose_store()

    def pause(self, seconds: float) -> None:
        """Nothing to do: others may overtake wherever a host yields."""

    def leftovers(self) -> Mapping[str, int]:
        """As the world counts them, over all ranks."""
        return self.world.leftovers()


class ControlledSubject:
    """A controlled backend on schedules."""

    def __init__(self, backend: ControlledBackend) -> None:
        self._backend = backend
        self._traits = Traits(
            backend.capabilities, backend.groups, SIZES, controlled=True, expendable=True
        )

    @property
    def name(self) -> str:
        """The backend's name."""
        return self._backend.name

    @property
    def traits(self) -> Traits:
        """As declared; any number of ranks."""
        return self._traits

    def play(self, claim: Property, case: Case) -> str | None:
        """On a fresh world."""
        world = self._backend.world(case.program.size, case.schedule)
        try:
            actors = [
                actor
                for rank in range(case.program.size)
                for actor in _actors(self._backend, world, claim, case, rank)
            ]
            reported = judge(claim, case, drive(world, actors))
            if claim.loses is not None:
                _rest(world, case.program.size, claim.loses(case.program))
            return reported
        except Exception as error:
            raise blame(claim, error) from error
        finally:
            world.close()

    def close(self) -> None:
        """Nothing is held between cases."""


def _rest(world: ControlledWorld, size: int, lost: frozenset[int]) -> None:
    """Close everything, as the survivors would. Raises `Violation` of R1 if anything is left."""
    for rank in range(size):
        if rank in lost:
            world.kill(rank)  # a stopped one holds what it has until its launcher ends it
            continue
        world.step_in(rank, 0)
        world.fabric(rank).close()
        world.accelerator(rank).close()
    if any(world.leftovers().values()):
        gc.collect()  # an error and the frames it came through hold each other
    left = {name: count for name, count in world.leftovers().items() if count}
    demand("R1", not left, f"after everything was closed there are {left}")


def _actors(
    backend: ControlledBackend, world: ControlledWorld, claim: Property, case: Case, rank: int
) -> list[Actor]:
    fabric = world.fabric(rank) if claim.ranks is Ranks.GROUP else None
    around = ControlledSurroundings(world, rank)
    shared: dict[str, Any] = {}
    actors = []
    for host in range(claim.hosts):
        bench = Bench(
            rank=rank,
            size=case.program.size,
            host=host,
            backend=backend,
            accelerator=world.accelerator(rank),
            fabric=fabric,
            deadline=DEADLINE,
            patience=2 * DEADLINE,
            surroundings=around,
            shared=shared,
        )
        actors.append(Actor(rank, host, claim.play(bench, case.program)))
    return actors
