"""Plays cases on a controlled world: all ranks in one thread, every interleaving chosen.

The choices come from the schedule of the case, so hypothesis can vary and shrink them. A backend
offers such a world by implementing `ControlledBackend`, as `backends/virtual` does.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from equipoise.hal.accelerator import Accelerator, Backend
from equipoise.hal.capabilities import CommunicatorCapabilities, SlotFormat
from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.conformance.context import (
    NEXT,
    RANK_ENDED,
    Play,
    RankContext,
    Termination,
    Until,
    require,
)
from equipoise.hal.conformance.program import Case
from equipoise.hal.conformance.property import Property, PropertyScope, Traits
from equipoise.hal.conformance.subject import compare_answers, to_violation
from equipoise.hal.errors import Violation
from equipoise.hal.expert_parallel import ExpertParallelLibrary
from equipoise.hal.slots import Segment
from equipoise.hal.stream import Stream


class ControlledWorld(Protocol):
    """Some ranks, their devices and the network between them, all in one thread, with no clock.

    Nothing moves unless `advance` is called, by the driver or a blocking call of a thread: such a
    call advances the world until its condition holds or nothing can move; then it has timed out.
    """

    def accelerator(self, rank: int) -> Accelerator:
        """The device of `rank`: always the same one."""
        ...

    def fabric(self, rank: int) -> Fabric:
        """The fabric of `rank`: always the same one."""
        ...

    def empty(self, rank: int, nbytes: int) -> Tensor:
        """uint8 [nbytes] of the rank's memory; what is dropped is scribbled and reused at once."""
        ...

    def movable(self) -> int:
        """How many micro-steps could happen now, over all streams and links."""
        ...

    def advance(self, choice: int) -> None:
        """Let micro-step number `choice`, below `movable()`, happen."""
        ...

    def choose(self, count: int) -> int:
        """The schedule's next choice, in [0, count); 0 when the schedule is used up."""
        ...

    def expire(self) -> bool:
        """Let every pending deadline expire. Returns False when nothing changed."""
        ...

    def step_in(self, rank: int, thread: int) -> None:
        """Thread `thread` of `rank` makes the calls from now on (locks see a thread's identity)."""
        ...

    def hold(self, rank: int, stream: Stream) -> None:
        """Nothing that is launched on `stream` from now on runs, until `let_go`."""
        ...

    def let_go(self, rank: int, stream: Stream) -> None:
        """End of `hold`."""
        ...

    def kill(self, rank: int) -> None:
        """The rank has ended, as after SIGKILL; the launcher has reported it to the store."""
        ...

    def stop(self, rank: int) -> None:
        """Nothing of the rank moves any more, as after SIGSTOP; its heartbeat is silent."""
        ...

    def lose_store(self) -> None:
        """The launcher has ended, and with it the store of the control plane."""
        ...

    def leftovers(self) -> dict[str, int]:
        """Resources that are not released yet, by name; all zero once everything was closed."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


@runtime_checkable
class ControlledBackend(Backend, Protocol):
    """A backend that can be run on a schedule."""

    @property
    def groups(self) -> CommunicatorCapabilities:
        """What the communicators of its worlds declare."""
        ...

    def world(self, size: int, schedule: bytes) -> ControlledWorld:
        """A world of `size` ranks; byte k of the schedule is its k-th choice."""
        ...


MAX_MOVES = 100_000
"""Moves after which a program that should have ended counts as a hang."""


@dataclass
class ScheduledThread:
    """A thread that plays: its generator, what it waits for, and what it returned."""

    rank: int
    thread: int
    play: Play
    waits_for: Until = NEXT
    ended: bool = False
    rank_ended: bool = False
    answer: Any = None

    def resume(self, world: ControlledWorld) -> None:
        """Run it to its next yield."""
        world.step_in(self.rank, self.thread)
        try:
            self.waits_for = next(self.play)
            if self.waits_for is RANK_ENDED:
                self.rank_ended = True
                self.play.close()  # what the thread held ends with its rank
        except StopIteration as end:
            self.answer, self.ended = end.value, True


def run_schedule(world: ControlledWorld, threads: Sequence[ScheduledThread]) -> list[Any]:
    """Play all to their ends; returns their answers, in order.

    Raises:
        Violation: of C8, when a thread waits for something that can never come, even after all
            deadlines have expired; or what a thread itself raises.
    """
    for _ in range(MAX_MOVES):
        alive = [thread for thread in threads if not (thread.ended or thread.rank_ended)]
        if not alive:
            return [thread.answer for thread in threads]
        _make_move(world, alive)
    raise Violation("C8", f"no end after {MAX_MOVES} moves")


def run_until_idle(world: ControlledWorld) -> None:
    """Let the device run until nothing can move."""
    while count := world.movable():
        world.advance(world.choose(count))


def _make_move(world: ControlledWorld, alive: Sequence[ScheduledThread]) -> None:
    """Make one move: a micro-step of the world, or a thread that is ready; else time passes."""
    count = world.movable()
    ready = [thread for thread in alive if thread.waits_for.ready()]
    if count + len(ready) == 0:
        if not world.expire():
            raise _hang(alive)
        return
    choice = world.choose(count + len(ready))
    if choice < count:
        world.advance(choice)
    else:
        ready[choice - count].resume(world)


def _hang(alive: Sequence[ScheduledThread]) -> Violation:
    stuck = "; ".join(f"rank {a.rank} host {a.thread} waits for {a.waits_for.what}" for a in alive)
    return Violation("C8", f"a hang that no deadline ends: {stuck}")


NOMINAL_DEADLINE = 1.0
"""Nominal seconds of an operation; there is no clock: it expires when nothing can move."""
GROUP_SIZES = (1, 2, 3, 4, 5, 8)


@dataclass
class ControlledEnvironment:
    """What a controlled world does for the context of one rank."""

    world: ControlledWorld
    rank: int

    def empty(self, nbytes: int) -> Tensor:
        """Memory that is scribbled and reused as soon as it is dropped."""
        return self.world.empty(self.rank, nbytes)

    def empty_private(self, elements: int, dtype: torch.dtype, padding: int) -> Tensor:
        """Memory whose storage continues after the elements."""
        nbytes = elements * dtype.itemsize
        return self.empty(nbytes + padding)[:nbytes].view(dtype)

    def storage_bytes(self, tensor: Tensor) -> Tensor:
        """The whole storage."""
        return Segment("", tensor, SlotFormat.PRIVATE).bytes

    def scribble_freed_memory(self) -> None:
        """Does nothing: dropped memory is overwritten at once."""

    def hold(self, stream: Stream) -> Callable[[], None]:
        """The world holds the stream."""
        self.world.hold(self.rank, stream)
        return lambda: self.world.let_go(self.rank, stream)

    def inject_delay(self, stream: Stream) -> None:
        """Does nothing: the schedule already varies the interleaving."""

    def open(self, purpose: str, ranks: Sequence[int] | None) -> Communicator:
        """The world is fresh in every case, and so is every purpose."""
        return self.world.fabric(self.rank).open(purpose, ranks)

    def close(self, communicator: Communicator) -> None:
        """Raises what it raises."""
        communicator.close()

    def fresh_purpose(self, purpose: str) -> str:
        """As it is: so is the world."""
        return purpose

    def end_rank(self, how: Termination) -> None:
        """By the world."""
        if how is Termination.KILL:
            self.world.kill(self.rank)
        else:
            self.world.stop(self.rank)

    def lose_store(self, how: Termination) -> None:
        """Done by the world; without a clock an ended store and a silent one are the same."""
        self.world.lose_store()

    def pause(self, seconds: float) -> None:
        """Does nothing: others may overtake wherever a thread yields."""

    def leftovers(self) -> Mapping[str, int]:
        """As the world counts them, over all ranks."""
        return self.world.leftovers()


class ControlledSubject:
    """A controlled backend on schedules.

    Args:
        backend: what makes the worlds.
        library: the expert-parallel library that is judged on it, if one is.
    """

    def __init__(
        self, backend: ControlledBackend, library: ExpertParallelLibrary | None = None
    ) -> None:
        self._backend = backend
        self._library = library
        self._traits = Traits(
            backend.capabilities,
            backend.groups,
            GROUP_SIZES,
            controlled=True,
            can_end_ranks=True,
            expert_parallel=library.capabilities if library else None,
        )

    @property
    def name(self) -> str:
        """The backend's name."""
        return self._backend.name

    @property
    def traits(self) -> Traits:
        """As declared; any number of ranks."""
        return self._traits

    def play(self, prop: Property, case: Case) -> str | None:
        """On a fresh world."""
        world = self._backend.world(case.program.size, case.schedule)
        try:
            threads = [
                thread
                for rank in range(case.program.size)
                for thread in self._threads_of_rank(world, prop, case, rank)
            ]
            reported = compare_answers(prop, case, run_schedule(world, threads))
            if prop.lost_ranks is not None:
                _close_and_check_leaks(world, case.program.size, prop.lost_ranks(case.program))
            return reported
        except Exception as error:
            raise to_violation(prop, error) from error
        finally:
            world.close()

    def close(self) -> None:
        """Nothing is held between cases."""

    def _threads_of_rank(
        self, world: ControlledWorld, prop: Property, case: Case, rank: int
    ) -> list[ScheduledThread]:
        shared: dict[str, Any] = {}
        threads = []
        for host in range(prop.threads):
            ctx = RankContext(
                rank=rank,
                size=case.program.size,
                thread=host,
                backend=self._backend,
                accelerator=world.accelerator(rank),
                fabric=world.fabric(rank) if prop.scope is PropertyScope.GROUP else None,
                deadline=NOMINAL_DEADLINE,
                timeout=2 * NOMINAL_DEADLINE,
                environment=ControlledEnvironment(world, rank),
                shared=shared,
                library=self._library,
            )
            threads.append(ScheduledThread(rank, host, prop.play(ctx, case.program)))
        return threads


def _close_and_check_leaks(world: ControlledWorld, size: int, lost_ranks: frozenset[int]) -> None:
    """Close everything, as the survivors would. Raises `Violation` of R1 if anything is left."""
    for rank in range(size):
        if rank in lost_ranks:
            world.kill(rank)  # a stopped one holds what it has until its launcher ends it
            continue
        world.step_in(rank, 0)
        world.fabric(rank).close()
        world.accelerator(rank).close()
    if any(world.leftovers().values()):
        gc.collect()  # an error and the frames it came through hold each other
    leaks = {name: count for name, count in world.leftovers().items() if count}
    require("R1", not leaks, f"after everything was closed there are {leaks}")
