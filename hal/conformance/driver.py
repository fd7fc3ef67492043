"""Plays hosts on a controlled world: one thread, every choice taken from the schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from equipoise.hal.conformance.bench import GONE, NEXT, Play, Until
from equipoise.hal.conformance.controlled import ControlledWorld
from equipoise.hal.errors import Violation

PATIENCE = 100_000
"""Moves after which a program that should have ended counts as a hang."""


@dataclass
class Actor:
    """A host that plays: where it stands, and what it returned."""

    rank: int
    host: int
    play: Play
    waits: Until = NEXT
    ended: bool = False
    gone: bool = False
    answer: Any = None

    def proceed(self, world: ControlledWorld) -> None:
        """Run it to its next yield."""
        world.step_in(self.rank, self.host)
        try:
            self.waits = next(self.play)
            if self.waits is GONE:
                self.gone = True
                self.play.close()  # what the host held goes with its rank
        except StopIteration as end:
            self.answer, self.ended = end.value, True


def drive(world: ControlledWorld, actors: Sequence[Actor]) -> list[Any]:
    """Let all play to their ends; their answers, in order.

    Raises:
        Violation: of C8, when some host waits for something that can never come, even after all
            deadlines have struck; or what a host itself raises.
    """
    for _ in range(PATIENCE):
        alive = [actor for actor in actors if not (actor.ended or actor.gone)]
        if not alive:
            return [actor.answer for actor in actors]
        _move(world, alive)
    raise Violation("C8", f"no end after {PATIENCE} moves")


def settle(world: ControlledWorld) -> None:
    """Let the device run until nothing can move."""
    while count := world.movable():
        world.advance(world.choose(count))


def _move(world: ControlledWorld, alive: Sequence[Actor]) -> None:
    """One move: a micro-step of the world, or a host that need not wait; else time passes."""
    count = world.movable()
    ready = [actor for actor in alive if actor.waits.ready()]
    if count + len(ready) == 0:
        if not world.expire():
            raise _hang(alive)
        return
    choice = world.choose(count + len(ready))
    if choice < count:
        world.advance(choice)
    else:
        ready[choice - count].proceed(world)


def _hang(alive: Sequence[Actor]) -> Violation:
    stuck = "; ".join(f"rank {a.rank} host {a.host} waits for {a.waits.what}" for a in alive)
    return Violation("C8", f"a hang that no deadline ends: {stuck}")
