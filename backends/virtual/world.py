"""Ranks in one thread, and no clock: nothing moves unless somebody says what."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from equipoise.backends.virtual.accelerator import VirtualAccelerator
from equipoise.backends.virtual.fabric import VirtualFabric
from equipoise.backends.virtual.scheduling import Schedule
from equipoise.backends.virtual.stream import own_stream
from equipoise.hal.capabilities import Capabilities, CommunicatorCapabilities
from equipoise.hal.stream import Stream

if TYPE_CHECKING:
    from equipoise.backends.virtual.backend import VirtualParts
    from equipoise.backends.virtual.device import VirtualDevice


class Stepper(Protocol):
    """Something that moves in micro-steps, one after another.

    Attributes:
        ranks: whose it is; it stands still when one of them does.
    """

    ranks: tuple[int, ...]

    def ready(self) -> bool:
        """Whether a micro-step can happen; has no side effect."""
        ...

    def step(self) -> None:
        """Let it happen."""
        ...


class VirtualWorld:
    """Some ranks and what they share.

    Attributes:
        size: how many ranks.
        steppers: everything that can move, in the order in which it was made.
        host: the host of a rank that calls at this moment.
        stopped: ranks of which nothing moves any more.
        silent: those of them whose silence has been noticed.
        parts: the classes that everything is made from.
        network: what lies between the ranks.
        store: what the launcher holds for them.
    """

    def __init__(
        self,
        size: int,
        schedule: bytes,
        parts: "VirtualParts",
        declared: Capabilities,
        groups: CommunicatorCapabilities,
    ) -> None:
        self.size = size
        self.steppers: list[Stepper] = []
        self.host = 0
        self.stopped: set[int] = set()
        self.silent: set[int] = set()
        self.parts = parts
        self.network = parts.network(self)
        self.store = parts.store()
        self._schedule = Schedule(schedule)
        self._devices = [parts.device(self, rank, parts, declared) for rank in range(size)]
        self._groups = groups
        self._accelerators: dict[int, VirtualAccelerator] = {}
        self._fabrics: dict[int, VirtualFabric] = {}
        self._ready: list[Stepper] = []

    def accelerator(self, rank: int) -> VirtualAccelerator:
        """The device of `rank`."""
        if rank not in self._accelerators:
            self._accelerators[rank] = self.parts.accelerator(self._devices[rank])
        return self._accelerators[rank]

    def fabric(self, rank: int) -> VirtualFabric:
        """The connection of `rank`."""
        if rank not in self._fabrics:
            self._fabrics[rank] = self.parts.fabric(self, rank, self._groups)
        return self._fabrics[rank]

    def device(self, rank: int) -> "VirtualDevice":
        """What the parts of `rank` share."""
        return self._devices[rank]

    def empty(self, rank: int, nbytes: int) -> Tensor:
        """uint8 [nbytes] of the rank's memory."""
        return self._devices[rank].arena.empty(nbytes)

    def movable(self) -> int:
        """How many micro-steps could happen now."""
        self._ready = [stepper for stepper in self.steppers if stepper.ready()]
        self._ready += self.network.moving
        if self.stopped:
            self._ready = [
                stepper for stepper in self._ready if self.stopped.isdisjoint(stepper.ranks)
            ]
        return len(self._ready)

    def advance(self, choice: int) -> None:
        """Let one of them happen: `choice` counts those that `movable()` has found."""
        if not self._ready:
            self.movable()
        stepper, self._ready = self._ready[choice], []
        stepper.step()

    def choose(self, count: int) -> int:
        """The schedule's next choice."""
        return self._schedule.choose(count)

    def until(self, holds: Callable[[], bool], timeout: float) -> bool:
        """Advance until `holds`, or nothing can move; whether it holds. Timeout 0 only looks."""
        while not holds():
            count = self.movable() if timeout > 0 else 0
            if not count:
                return False
            self.advance(self.choose(count))
        return True

    def submitted(self) -> None:
        """Something was launched or issued."""

    def expire(self) -> bool:
        """Every deadline of what is pending strikes; whether anything changed."""
        changed = [self.network.expire(), self._notice_silence()]
        return any([*changed, *(device.expire() for device in self._moving())])

    def step_in(self, rank: int, host: int) -> None:
        """Host `host` of `rank` calls from now on; each rank's hosts have currents of their own."""
        self.host = host

    def hold(self, rank: int, stream: Stream) -> None:
        """Nothing launched on `stream` from now on runs, until `let_go`."""
        own_stream(stream).hold()

    def let_go(self, rank: int, stream: Stream) -> None:
        """End of `hold`."""
        own_stream(stream).let_go()

    def kill(self, rank: int) -> None:
        """The rank is gone; its peers learn it one by one, and the launcher has told the store."""
        self._devices[rank].close()
        self.network.kill(rank)
        self.store.report_lost_rank(rank, "was killed by signal 9")

    def stop(self, rank: int) -> None:
        """Nothing of the rank moves any more; it counts as silent when time has passed."""
        self.stopped.add(rank)

    def lose_store(self) -> None:
        """The launcher is gone, and its store."""
        self.store.lose()

    def leftovers(self) -> dict[str, int]:
        """What is not given back yet."""
        return {
            "blocks": sum(device.arena.block_count for device in self._devices),
            "tasks": sum(device.tasks for device in self._devices),
            "operations": len(self.network.pending),
            "events": sum(device.events for device in self._devices),
        }

    def close(self) -> None:
        """Let go of everything."""
        for device in self._devices:
            device.close()
        self.network.close()
        self.steppers.clear()
        self._ready.clear()

    def _notice_silence(self) -> bool:
        news = self.stopped - self.silent
        self.silent |= news
        return bool(news)

    def _moving(self) -> "list[VirtualDevice]":
        return [device for device in self._devices if device.rank not in self.stopped]


class EagerWorld(VirtualWorld):
    """A world of whoever opens a device by name: what is launched moves at once."""

    def submitted(self) -> None:
        """Run until nothing can move."""
        self.until(lambda: False, float("inf"))
