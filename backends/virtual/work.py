"""The handle of an operation of the virtual network."""

from typing import TYPE_CHECKING

from equipoise.backends.virtual.stream import VirtualStreamOp, own_stream
from equipoise.hal.errors import CommunicatorFailed, ResultPending
from equipoise.hal.stream import Stream

if TYPE_CHECKING:
    from equipoise.backends.virtual.operation import VirtualOperation

DEADLINE = 1.0
"""Nominal seconds of every operation: whoever waits that long lets time pass."""
SOFT_WAIT_STEPS = 8
"""A soft wait gives up after fewer micro-steps than these; the schedule says how many."""


class VirtualWork:
    """One operation; any number of handles may be dropped without any effect (clause K2)."""

    __slots__ = ("_operation",)

    def __init__(self, operation: "VirtualOperation") -> None:
        self._operation = operation

    def done(self) -> bool:
        """Whether the operation ended, well or not."""
        return self._operation.ended

    def wait(self, stream: Stream) -> None:
        """Let nothing launched on `stream` from now on move before the end (clause X7).

        Raises what it has failed with already (clause E10).
        """
        operation = self._operation
        if operation.ended:
            operation.check()
        own_stream(stream).issue(
            VirtualStreamOp(lambda on: on.follow(lambda: operation.ended, operation.check))
        )

    def result(self, timeout: float) -> None:
        """Advance the world until the end."""
        if not self._operation.ended:
            self._await(timeout)
        self._operation.check()

    def cancel(self) -> None:
        """Stop waiting, and fail the communicator; the network keeps the buffers (clause E4)."""
        self._operation.fail(CommunicatorFailed, f"{self._operation.what} was cancelled")

    def _await(self, timeout: float) -> None:
        wait = self._softly if timeout < DEADLINE else self._to_the_deadline
        if timeout <= 0 or not wait():
            raise ResultPending(f"{self._operation.what} has not ended within {timeout:g} s")

    def _softly(self) -> bool:
        """A few micro-steps; whether it ended."""
        world = self._operation.communicator.world
        for _ in range(world.choose(SOFT_WAIT_STEPS)):
            count = world.movable()
            if self._operation.ended or not count:
                break
            world.advance(world.choose(count))
        return self._operation.ended

    def _to_the_deadline(self) -> bool:
        """Until nothing can move; then time passes."""
        world = self._operation.communicator.world
        while not world.until(lambda: self._operation.ended, DEADLINE):
            if not world.expire():
                return False
        return True
