"""A pool of rank processes for tests: started once, used by every case, replaced when broken.

A case is a function `program(fabric, **arguments)` of an importable module; arguments and results
are JSON. It runs on the first `size` ranks, with a store and a fabric of its own.
"""

import selectors
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from support.member import Member

from equipoise.hal import registry
from equipoise.hal.communicator import Rendezvous, RendezvousHost

WATCHDOG = 60.0
"""Seconds that a rank may take to answer before its case fails."""
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
    """

    program: str
    size: int
    arguments: dict[str, Any] = field(default_factory=dict)
    deadline: float = DEADLINE
    lost: frozenset[int] = frozenset()
    communicator: str = "gloo"


class Ranks:
    """The pool. Not for several threads."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}

    def run(
        self,
        program: Callable[..., Any],
        size: int,
        /,
        *,
        deadline: float = DEADLINE,
        lost: Collection[int] = (),
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
            )
        )

    def play(self, case: Case) -> list[Any]:
        """As `run`."""
        host = registry.communicator(case.communicator).host()
        try:
            self._grow(case.size)
            self._order(case, host)
            answers = self._gather(range(case.size), case.lost, host)
            self._end(case.lost)
            self._close(sorted(set(range(case.size)) - case.lost), host)
        finally:
            host.close()
        return _results(answers, case.size)

    def close(self) -> None:
        """End every process."""
        self._end(list(self.members))

    def _grow(self, size: int) -> None:
        for rank in range(size):
            if rank not in self.members:
                self.members[rank] = Member()

    def _order(self, case: Case, host: RendezvousHost) -> None:
        name, port = host.address
        for rank in range(case.size):
            where = Rendezvous(
                rank=rank, size=case.size, host=name, port=port, deadline=case.deadline
            )
            self.members[rank].order(
                {
                    "case": case.program,
                    "where": asdict(where),
                    "arguments": case.arguments,
                    "communicator": case.communicator,
                }
            )

    def _close(self, ranks: Sequence[int], host: RendezvousHost) -> None:
        for rank in ranks:
            self.members[rank].order({"close": True})
        _results(self._gather(ranks, frozenset(), host), 0)

    def _gather(
        self, ranks: Sequence[int], lost: frozenset[int], host: RendezvousHost
    ) -> dict[int, dict[str, Any]]:
        """Answers by rank, of all but the lost ones; a rank's end is told to the host."""
        expiry = time.monotonic() + WATCHDOG
        answers: dict[int, dict[str, Any]] = {}
        waiting = set(ranks) - lost
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(self.members[rank].pipe, selectors.EVENT_READ, rank)
            while waiting:
                ready = selector.select(max(0.0, expiry - time.monotonic()))
                if not ready:
                    raise self._stuck(waiting)
                for key, _ in ready:
                    try:
                        answer = self.members[key.data].hear()
                    except EOFError:
                        selector.unregister(key.fd)
                        self._mourn(key.data, lost, host)
                        continue
                    if answer is not None:
                        answers[key.data] = answer
                        waiting.discard(key.data)
        return answers

    def _mourn(self, rank: int, lost: frozenset[int], host: RendezvousHost) -> None:
        how = self.members[rank].death()
        host.report_loss(rank, how)
        if rank not in lost:
            error = RanksFailed(f"rank {rank} {how}\n{self.members[rank].complaints()}")
            self.close()
            raise error

    def _stuck(self, waiting: Collection[int]) -> RanksFailed:
        for rank in waiting:
            self.members[rank].stack()
        quotes = [f"rank {r}:\n{self.members[r].complaints()}" for r in sorted(waiting)]
        self.close()
        return RanksFailed(f"no answer within {WATCHDOG:g} s from\n" + "\n".join(quotes))

    def _end(self, ranks: Collection[int]) -> None:
        """End these; the next case that needs as many ranks starts new ones."""
        for rank in ranks:
            self.members.pop(rank).end()


def _results(answers: dict[int, dict[str, Any]], size: int) -> list[Any]:
    raised = {rank: a["raised"] for rank, a in sorted(answers.items()) if "raised" in a}
    if raised:
        raise RanksFailed("\n".join(f"rank {rank}:\n{text}" for rank, text in raised.items()))
    return [answers[rank]["answer"] if rank in answers else None for rank in range(size)]
