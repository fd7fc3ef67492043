"""A fabric for a subset of the ranks, numbered from 0.

Each pipeline stage has its own balancer, exchange and ballots, which know nothing of other stages:
they get a fabric that contains only the ranks of the stage.
"""

from collections.abc import Sequence
from typing import Any, cast

from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import RankLost, Unsupported


class SubgroupControlPlane:
    """The control plane of a run, for a subset of its ranks.

    Questions belong to the group. Operations, exits and losses belong to the run: `lost_rank` gives
    the number of a rank in the run, and may name one outside the group.

    Args:
        control: of the run.
        name: of the group, part of every question; groups that share a rank differ in name.
        ranks: numbers of the run, in the order of their ranks here.
    """

    def __init__(self, control: ControlPlane, name: str, ranks: Sequence[int]) -> None:
        self._control = control
        self._name = name
        self._ranks = tuple(ranks)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._ranks.index(self._control.rank)

    @property
    def size(self) -> int:
        """How many ranks are in the group."""
        return len(self._ranks)

    def cast(self, question: str, ballot: bytes) -> None:
        """See `ControlPlane`."""
        self._control.cast(self._own(question), ballot)

    def collect(
        self, question: str, timeout: float, ranks: Sequence[int] | None = None
    ) -> tuple[bytes, ...]:
        """See `ControlPlane`; ranks are the group's."""
        return self._control.collect(self._own(question), timeout, self._of_run(ranks))

    def decide(self, question: str, value: bytes) -> bytes:
        """See `ControlPlane`."""
        return self._control.decide(self._own(question), value)

    def forget(self, question: str, ranks: Sequence[int] | None = None) -> None:
        """See `ControlPlane`; ranks are the group's."""
        self._control.forget(self._own(question), self._of_run(ranks))

    def set_operation(self, operation: str) -> None:
        """See `ControlPlane`."""
        self._control.set_operation(operation)

    def announce_exit(self, reason: str) -> None:
        """See `ControlPlane`: the rank exits the run."""
        self._control.announce_exit(reason)

    def lost_rank(self, timeout: float) -> RankLost | None:
        """See `ControlPlane`; the number is the run's."""
        return self._control.lost_rank(timeout)

    def close(self) -> None:
        """Does nothing: the control plane belongs to the run."""

    def _own(self, question: str) -> str:
        return f"{self._name}/{question}"

    def _of_run(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        return self._ranks if ranks is None else tuple(self._ranks[rank] for rank in ranks)


class _SubgroupCommunicator:
    """A communicator whose `rebuild` takes numbers of the group."""

    def __init__(self, communicator: Communicator, ranks: Sequence[int]) -> None:
        self._communicator = communicator
        self._of_run = tuple(ranks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def rebuild(self, ranks: Sequence[int]) -> None:
        """See `Communicator`."""
        self._communicator.rebuild([self._of_run[rank] for rank in ranks])


class SubgroupFabric:
    """The fabric of a run, for a subset of its ranks.

    Args:
        fabric: of the run.
        name: of the group; groups that share a rank differ in name.
        ranks: numbers of the run, in the order of their ranks here; this rank is one of them.

    Raises:
        Unsupported: it is not, or a rank is listed twice.
    """

    def __init__(self, fabric: Fabric, name: str, ranks: Sequence[int]) -> None:
        mine, every = fabric.control.rank, range(fabric.control.size)
        if mine not in ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(every):
            raise Unsupported(f"group {name!r} of rank {mine}: {list(ranks)} of {len(every)} ranks")
        self._fabric = fabric
        self._name = name
        self._ranks = tuple(ranks)
        self._control = SubgroupControlPlane(fabric.control, name, ranks)
        self._open: list[Communicator] = []

    @property
    def control(self) -> SubgroupControlPlane:
        """The control plane, among the group."""
        return self._control

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> Communicator:
        """Open a communicator among ranks of the group, by their numbers in it; see `Fabric`."""
        here = range(len(self._ranks)) if ranks is None else ranks
        members = [self._ranks[rank] for rank in here]
        communicator = self._fabric.open(f"{self._name}/{purpose}", members)
        self._open.append(communicator)
        # mypy cannot see that `__getattr__` forwards the rest of the protocol.
        return cast(Communicator, cast(Any, _SubgroupCommunicator(communicator, self._ranks)))

    def close(self) -> None:
        """Close the communicators that were opened here; the run's control plane stays."""
        for communicator in self._open:
            communicator.close()
        self._open.clear()
