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
    """A store in its own process, which the pool starts but which is no rank."""

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
        library: the expert-parallel library that is judged, if one is.
    """

    def __init__(self, backend: str, communicator: str, library: str | None = None) -> None:
        self._communicator: CommunicatorBackend = registry.communicator(communicator)
        names = (backend, communicator, *([library] if library else []))
        self._pool = WorkerPool([RANK_WORKER_MODULE, *names])

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
        deadlines: seconds that an operation may last, by length of the deadline.
        library: the expert-parallel library that is judged, if one is.
    """

    def __init__(
        self,
        backend: str,
        communicator: str,
        ranks: int,
        deadlines: Mapping[DeadlineLength, float] = DEADLINES,
        library: str | None = None,
    ) -> None:
        rank_group = ProcessRankGroup(backend, communicator, library)
        name = f"{backend} with {communicator} on {ranks} processes"
        traits = declared_traits(backend, communicator, ranks, library)
        super().__init__(name, traits, rank_group, deadlines)


def declared_traits(
    backend: str, communicator: str, ranks: int, library: str | None = None
) -> Traits:
    """What the backends declare, on sizes up to `ranks`."""
    return Traits(
        registry.accelerator(backend).capabilities,
        registry.communicator(communicator).capabilities,
        tuple(sorted({size for size in GROUP_SIZES if size < ranks} | {ranks})),
        controlled=False,
        can_end_ranks=True,
        expert_parallel=registry.expert_parallel(library).capabilities if library else None,
    )
