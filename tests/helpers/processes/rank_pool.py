"""A pool of rank processes for tests: started once, used by every case, replaced when broken.

A case is a function `program(fabric, **arguments)` of an importable module; arguments and results
are JSON. It runs on the first `size` ranks, with a store and a fabric of its own.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from helpers.watchdog import WATCHDOG

from equipoise.hal import registry
from equipoise.hal.communicator import Rendezvous, RendezvousHost
from equipoise.hal.conformance.executors.worker_pool import START_TIMEOUT, WorkerPool, WorkerProcess
from equipoise.hal.errors import Violation

DEADLINE = 20.0
"""Seconds that any wait within a case may last, unless the case says otherwise."""


class RanksFailed(AssertionError):
    """Some ranks raised, died or did not answer; quotes each of them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to run, and where.

    Attributes:
        program: `module:function`.
        size: ranks.
        arguments: the same for every rank.
        deadline: of the fabric, seconds.
        lost: ranks that end or stop on purpose: nobody waits for their answer, their death is
            reported to the others as a launcher would.
        communicator: backend by name.
        watchdog: seconds that a rank may take to answer before the case fails.
        spoils: whether the case leaves processes in which no other may run, as an error of the
            device does: what was on it at that time may raise wherever memory is taken next.
    """

    program: str
    size: int
    arguments: dict[str, Any] = field(default_factory=dict)
    deadline: float = DEADLINE
    lost: frozenset[int] = frozenset()
    communicator: str = "gloo"
    watchdog: float = WATCHDOG
    spoils: bool = False


class Ranks:
    """The pool. Not for several threads.

    Args:
        module: whose `main` each rank runs; imported once, in the process that ranks are forked
            from.
        patience: seconds that importing it may take.
    """

    def __init__(
        self, module: str = "helpers.processes.rank_process", patience: float = START_TIMEOUT
    ) -> None:
        self._worker_pool = WorkerPool([module], patience)

    @property
    def members(self) -> dict[int, WorkerProcess]:
        """The processes that run, by rank."""
        return self._worker_pool.workers

    def run(
        self,
        program: Callable[..., Any],
        size: int,
        /,
        *,
        deadline: float = DEADLINE,
        lost: Collection[int] = (),
        watchdog: float = WATCHDOG,
        **arguments: Any,
    ) -> list[Any]:
        """Results of `program(fabric, **arguments)` by rank; None for ranks in `lost`.

        Raises:
            RanksFailed: a rank raised, died, or did not answer within the watchdog's time.
        """
        return self.play(
            Case(
                program=f"{program.__module__}:{program.__qualname__}",
                size=size,
                arguments=arguments,
                deadline=deadline,
                lost=frozenset(lost),
                watchdog=watchdog,
            )
        )

    def play(self, case: Case) -> list[Any]:
        """As `run`."""
        host = registry.communicator(case.communicator).host()
        fit = False
        try:
            self._worker_pool.start(range(case.size))
            self._order(case, host)
            answers = self._gather(range(case.size), case.lost, host, case.watchdog)
            self._worker_pool.kill(case.lost)
            self._close(sorted(set(range(case.size)) - case.lost), host)
            fit = not case.spoils and not any("raised" in answer for answer in answers.values())
        finally:
            host.close()
            if not fit:  # a process in which something went wrong would fail the next case for it
                self._worker_pool.kill(list(self.members))
        return _results(answers, case.size)

    def close(self) -> None:
        """End every process."""
        self._worker_pool.close()

    def _order(self, case: Case, host: RendezvousHost) -> None:
        name, port = host.address
        for rank in range(case.size):
            where = Rendezvous(
                rank=rank, size=case.size, host=name, port=port, deadline=case.deadline
            )
            self.members[rank].send(
                {
                    "case": case.program,
                    "where": asdict(where),
                    "arguments": case.arguments,
                    "communicator": case.communicator,
                }
            )

    def _close(self, ranks: Sequence[int], host: RendezvousHost) -> None:
        self._worker_pool.send({rank: {"close": True} for rank in ranks})
        _results(self._gather(ranks, frozenset(), host), 0)

    def _gather(
        self,
        ranks: Collection[int],
        lost: frozenset[int],
        host: RendezvousHost,
        watchdog: float = WATCHDOG,
    ) -> dict[int, dict[str, Any]]:
        try:
            return self._worker_pool.gather(ranks, lost, watchdog, host.report_loss)
        except Violation as violation:
            raise RanksFailed(str(violation)) from violation


def _results(answers: dict[int, dict[str, Any]], size: int) -> list[Any]:
    failures = {rank: a["raised"] for rank, a in sorted(answers.items()) if "raised" in a}
    if failures:
        raise RanksFailed("\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items()))
    return [answers[rank]["answer"] if rank in answers else None for rank in range(size)]
