"""The executor for ranks as processes of this machine, which the suite itself starts."""

from collections.abc import Collection, Mapping

from equipoise.hal import registry
from equipoise.hal.communicator import CommunicatorBackend, RendezvousHost
from equipoise.hal.conformance.executors.multi_rank import (
    DEADLINES,
    SIZES,
    Call,
    RankedSubject,
    observed,
)
from equipoise.hal.conformance.executors.rank_worker import Answer, Order
from equipoise.hal.conformance.executors.worker_pool import Crew
from equipoise.hal.conformance.property import Pace, Traits

START = 60.0
"""Seconds that a process may take to import everything."""
HOLDER = -1
"""What stands in the place of a rank for the process that holds a store."""
SEAT = "equipoise.hal.conformance.executors.rank_worker"


class _Elsewhere:
    """A store in a process of its own: a member of the crew that is no rank."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        crew.start([HOLDER])
        crew.order({HOLDER: {"do": "hold"}})
        told = crew.gather([HOLDER], (), START, lambda _rank, _how: None)
        name, port = observed("C6", told)[HOLDER]
        self.holder: int = crew.members[HOLDER].pid
        self.address: tuple[str, int] = (name, port)

    def report_loss(self, rank: int, how: str) -> None:
        """Nobody: whose store may be gone hears of no rank."""

    def close(self) -> None:
        """End the process, unless it was ended with all others."""
        self._crew.end({HOLDER} & self._crew.members.keys())


class ProcessRankGroup:
    """Processes that are reused by all cases; a broken one is replaced.

    Args:
        backend: the accelerator backend by name, or PACKAGE:OBJECT.
        communicator: the communicator backend, likewise.
    """

    def __init__(self, backend: str, communicator: str) -> None:
        self._communicator: CommunicatorBackend = registry.communicator(communicator)
        self._crew = Crew([SEAT, backend, communicator])

    def host(self) -> RendezvousHost:
        """A store in this process, which outlives every rank."""
        return self._communicator.host()

    def expendable_host(self) -> _Elsewhere:
        """A store in a process of its own."""
        return _Elsewhere(self._crew)

    def tell(self, orders: Mapping[int, Order], call: Call) -> dict[int, Answer]:
        """What the ranks answer; after a `Violation` no process is left."""
        self._start(orders.keys() - self._crew.members.keys())
        self._crew.order(orders)
        return self._crew.gather(orders, call.lost, call.watchdog, call.mourn)

    def replace(self, ranks: Collection[int]) -> None:
        """End what is left of them; new ones start when they are needed."""
        self._crew.end(ranks)

    def close(self) -> None:
        """End every process."""
        self._crew.close()

    def _start(self, ranks: Collection[int]) -> None:
        """Importing takes longer than a brisk deadline: nobody is told to meet anybody before."""
        self._crew.start(ranks)
        self._crew.order({rank: {"do": "greet"} for rank in ranks})
        self._crew.gather(ranks, (), START, lambda _rank, _how: None)


class ProcessSubject(RankedSubject):
    """An accelerator and a communicator on up to `ranks` processes.

    Args:
        backend: the accelerator backend by name, or PACKAGE:OBJECT.
        communicator: the communicator backend, likewise.
        ranks: most ranks of a case.
        deadlines: seconds that an operation may last, by pace.
    """

    def __init__(
        self,
        backend: str,
        communicator: str,
        ranks: int,
        deadlines: Mapping[Pace, float] = DEADLINES,
    ) -> None:
        rank_group = ProcessRankGroup(backend, communicator)
        name = f"{backend} with {communicator} on {ranks} processes"
        super().__init__(name, traits(backend, communicator, ranks), rank_group, deadlines)


def traits(backend: str, communicator: str, ranks: int) -> Traits:
    """What the backends declare, on sizes up to `ranks`."""
    return Traits(
        registry.accelerator(backend).capabilities,
        registry.communicator(communicator).capabilities,
        tuple(sorted({size for size in SIZES if size < ranks} | {ranks})),
        controlled=False,
        expendable=True,
    )
