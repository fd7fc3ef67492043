"""Ranks of the conformance suite as threads of this process: a mutant of gloo is a Python object.

Processes cost seconds of importing a mutant; threads cost none. What ends a rank for good, or the
store, cannot be played here.
"""

from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late

from equipoise.hal.accelerator import Backend
from equipoise.hal.communicator import CommunicatorBackend, RendezvousHost
from equipoise.hal.conformance.executors.multi_rank import (
    DisposableStore,
    GatherOptions,
    MultiRankSubject,
)
from equipoise.hal.conformance.executors.rank_worker import RankReply, RankRequest, RankWorker
from equipoise.hal.conformance.property import DeadlineLength, Traits
from equipoise.hal.errors import Unsupported, Violation
from equipoise.hal.expert_parallel import ExpertParallelLibrary

DEADLINES: Mapping[DeadlineLength, float] = {DeadlineLength.LONG: 6.0, DeadlineLength.SHORT: 1.0}
"""Seconds that an operation may last, by pace."""


class ThreadRankGroup:
    """Ranks that obey orders, each in a thread of its own.

    Args:
        backend: the accelerator.
        communicator: the communicator.
        library: the expert-parallel library that is judged, if one is.
    """

    def __init__(
        self,
        backend: Backend,
        communicator: CommunicatorBackend,
        library: ExpertParallelLibrary | None = None,
    ) -> None:
        self._backend = backend
        self._communicator = communicator
        self._library = library
        self._workers: dict[int, RankWorker] = {}
        self._threads: dict[int, ThreadPoolExecutor] = {}

    def open_store(self) -> RendezvousHost:
        """A store in this process."""
        return self._communicator.host()

    def open_disposable_store(self) -> DisposableStore:
        """Not here: the store is a part of this process."""
        raise Unsupported("the store of ranks that are threads cannot be ended")

    def request(
        self, orders: Mapping[int, RankRequest], call: GatherOptions
    ) -> dict[int, RankReply]:
        """What the ranks answer. Raises `Violation` of C8 when one does not."""
        replies: dict[int, Future[RankReply]] = {}
        for rank, order in orders.items():
            if rank not in self._workers:
                self._workers[rank] = RankWorker(self._backend, self._communicator, self._library)
                self._threads[rank] = ThreadPoolExecutor(1, f"rank {rank}")
            replies[rank] = self._threads[rank].submit(self._workers[rank].handle, order)
        try:
            return {rank: future.result(call.watchdog) for rank, future in replies.items()}
        except Late:
            late_ranks = [rank for rank, future in replies.items() if not future.done()]
            self._workers.clear()  # their threads are left behind
            self._threads.clear()
            raise Violation(
                "C8", f"no answer within {call.watchdog:g} s from {late_ranks}"
            ) from None

    def replace(self, ranks: Collection[int]) -> None:
        """Seats are made when they are needed."""
        for rank in ranks:
            self._workers.pop(rank, None)

    def close(self) -> None:
        """End every thread."""
        for thread in self._threads.values():
            thread.shutdown(wait=False)
        self._workers.clear()
        self._threads.clear()


class ThreadSubject(MultiRankSubject):
    """An accelerator and a communicator on two threads.

    Args:
        backend: the accelerator.
        communicator: the communicator.
        library: the expert-parallel library that is judged, if one is.
    """

    def __init__(
        self,
        backend: Backend,
        communicator: CommunicatorBackend,
        library: ExpertParallelLibrary | None = None,
    ) -> None:
        rank_group = ThreadRankGroup(backend, communicator, library)
        traits = Traits(
            backend.capabilities,
            communicator.capabilities,
            (1, 2),
            controlled=False,
            expert_parallel=library.capabilities if library else None,
        )
        name = f"{backend.name} with {communicator.name} on threads"
        super().__init__(name, traits, rank_group, DEADLINES)
