"""Worlds whose every interleaving somebody else decides: the contract of the virtual executor."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from equipoise.hal.accelerator import Accelerator, Backend
from equipoise.hal.capabilities import CommunicatorCapabilities
from equipoise.hal.communicator import Fabric
from equipoise.hal.stream import Stream


class ControlledWorld(Protocol):
    """Some ranks, their devices and the network between them, all in one thread, with no clock.

    Nothing moves unless `advance` is called, by the driver or by a blocking call of a host: such a
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
        """Time passes: every deadline of what is pending strikes. False when nothing changed."""
        ...

    def step_in(self, rank: int, host: int) -> None:
        """Host `host` of `rank` is the one that calls from now on (threads have an identity)."""
        ...

    def hold(self, rank: int, stream: Stream) -> None:
        """Nothing that is launched on `stream` from now on runs, until `let_go`."""
        ...

    def let_go(self, rank: int, stream: Stream) -> None:
        """End of `hold`."""
        ...

    def kill(self, rank: int) -> None:
        """The rank is gone, as after SIGKILL; the launcher has told the store."""
        ...

    def stop(self, rank: int) -> None:
        """Nothing of the rank moves any more, as after SIGSTOP; its heartbeat is silent."""
        ...

    def lose_store(self) -> None:
        """The launcher is gone, and with it the store of the control plane."""
        ...

    def leftovers(self) -> dict[str, int]:
        """What is not given back yet, by name; all zero at rest after everything was closed."""
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
        """A world of so many ranks; byte k of the schedule is its k-th choice."""
        ...
