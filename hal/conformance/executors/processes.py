"""Plays cases on rank processes that the suite itself starts on this machine."""

from collections.abc import Collection, Mapping

from equipoise.hal import registry
from equipoise.hal.communicator import CommunicatorBackend, RendezvousHost
from equipoise.hal.conformance.executors.multi_rank import (
    DEADLINES,
    GROUP_SIZES,
    GatherOptions,
    MultiRankSubject,
    answers_or_raise,
)
from equipoise.hal.conformance.executors.rank_worker import RankReply, RankRequest
from equipoise.hal.conformance.executors.worker_pool import WorkerPool
from equipoise.hal.conformance.property import DeadlineLength, Traits

START_TIMEOUT = 60.0
"""Seconds that a process may take to import everything."""
STORE_WORKER = -1
"""The rank number of the process that holds a store."""
RANK_WORKER_MODULE = "equipoise.hal.conformance.executors.rank_worker"


class _StoreProcess:
    """A store in a process of its own: a member of the crew that is no rank."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        pool.start([STORE_WORKER])
        pool.send({STORE_WORKER: {"do": "hold"}})
        replies = pool.gather([STORE_WORKER], (), START_TIMEOUT, lambda _rank, _how: None)
        name, port = answers_or_raise("C6", replies)[STORE_WORKER]
        self.pid: int = pool.workers[STORE_WORKER].pid
        self.address: tuple[str, int] = (name, port)

    def report_loss(self, rank: int, how: str) -> None:
        """Does nothing: a store that may have ended is not notified."""

    def close(self) -> None:
        """End the process, unless it was ended with all others."""
        self._pool.kill({STORE_WORKER} & self._pool.workers.keys())


class ProcessRankGroup:
    """Processes that are reused by all cases; a broken one is replaced.

    Args:
        backend: the accelerator backend by name, or PACKAGE:OBJECT.
        communicator: the communicator backend, likewise.
    """

    def __init__(self, backend: str, communicator: str) -> None:
        self._communicator: CommunicatorBackend = registry.communicator(communicator)
        self._pool = WorkerPool([RANK_WORKER_MODULE, backend, communicator])

    def open_store(self) -> RendezvousHost:
        """A store in this process, which outlives every rank."""
        return self._communicator.host()

    def open_disposable_store(self) -> _StoreProcess:
        """A store in a process of its own."""
        return _StoreProcess(self._pool)

    def request(
        self, orders: Mapping[int, RankRequest], call: GatherOptions
    ) -> dict[int, RankReply]:
        """What the ranks answer; after a `Violation` no process is left."""
        self._start(orders.keys() - self._pool.workers.keys())
        self._pool.send(orders)
        return self._pool.gather(orders, call.expected_exits, call.watchdog, call.on_exit)

    def replace(self, ranks: Collection[int]) -> None:
        """End what is left of them; new ones start when they are needed."""
        self._pool.kill(ranks)

    def close(self) -> None:
        """End every process."""
        self._pool.close()

    def _start(self, ranks: Collection[int]) -> None:
        """Wait until all have imported: that takes longer than a short deadline of a rendezvous."""
        self._pool.start(ranks)
        self._pool.send({rank: {"do": "greet"} for rank in ranks})
        self._pool.gather(ranks, (), START_TIMEOUT, lambda _rank, _how: None)


class ProcessSubject(MultiRankSubject):
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
        deadlines: Mapping[DeadlineLength, float] = DEADLINES,
    ) -> None:
        rank_group = ProcessRankGroup(backend, communicator)
        name = f"{backend} with {communicator} on {ranks} processes"
        super().__init__(name, declared_traits(backend, communicator, ranks), rank_group, deadlines)


def declared_traits(backend: str, communicator: str, ranks: int) -> Traits:
    """What the backends declare, on sizes up to `ranks`."""
    return Traits(
        registry.accelerator(backend).capabilities,
        registry.communicator(communicator).capabilities,
        tuple(sorted({size for size in GROUP_SIZES if size < ranks} | {ranks})),
        controlled=False,
        can_end_ranks=True,
    )
