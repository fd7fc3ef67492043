"""What has met on the network, and moves."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from equipoise.backends.virtual.arena import Bytes
from equipoise.backends.virtual.operation import Operation
from equipoise.backends.virtual.queue import in_turn

if TYPE_CHECKING:
    from equipoise.backends.virtual.network import Network


class Moving:
    """A transfer or a collective: micro-steps that nothing holds up.

    Args:
        network: forgets it after the last step.
        ranks: numbers, in the world, of those that take part.
        operations: what it belongs to.
    """

    def __init__(
        self, network: "Network", ranks: tuple[int, ...], operations: tuple[Operation, ...]
    ) -> None:
        self.ranks = ranks
        self.operations = operations
        self._network = network
        self._steps: Iterator[None] = in_turn(self.steps())

    def ready(self) -> bool:
        """Always."""
        return True

    def step(self) -> None:
        """One micro-step."""
        for _ in self._steps:
            return
        self._network.forget(self)

    def cut(self) -> None:
        """It moves no more."""
        self._steps = iter(())
        self._network.forget(self)

    def steps(self) -> Iterator[Callable[[], object]]:
        """The micro-steps in order."""
        raise NotImplementedError


def halves(length: int) -> tuple[slice, ...]:
    """The pieces in which so many bytes are copied."""
    half = (length + 1) // 2
    return (slice(0, half), slice(half, length)) if length else ()


def copy(into: Bytes, source: Bytes, part: slice) -> None:
    """One piece of a copy."""
    into[part] = source[part]
