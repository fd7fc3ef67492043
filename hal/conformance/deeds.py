"""What ranks do to each other while something breaks: operations that know what is due.

A step is `(op, (n, a, b))`: `n` elements, and two ranks where the operation needs them. Every rank
computes by itself what it must receive, and from whom it depends.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.communicator import Communicator, Exchange, Parcel
from equipoise.hal.conformance.bench import Bench
from equipoise.hal.conformance.program import Step
from equipoise.hal.conformance.property import Traits
from equipoise.hal.work import Work

SUMS = ("all_reduce", "reduce_scatter")
MOVES = ("all_gather", "all_to_all", "broadcast", "barrier", "message", "exchange")


@dataclass(frozen=True)
class Deed:
    """One rank's part in one step.

    Attributes:
        op: the verb of the communicator, which an error has to name.
        issue: calls it.
        needs: ranks without which this part cannot end.
        found: what arrives.
        due: what must.
    """

    op: str
    issue: Callable[[], Work]
    needs: frozenset[int]
    found: Tensor | None = None
    due: Tensor | None = None


def steps(traits: Traits, size: int) -> st.SearchStrategy[Step]:
    """Any step that this communicator can do, for so many ranks."""
    summed = SUMS if torch.int64 in traits.groups.reductions else ()
    rank = st.integers(0, size - 1)
    others = st.tuples(st.integers(1, 64), rank, st.integers(1, size - 1))
    args = others.map(lambda a: (a[0], a[1], (a[1] + a[2]) % size))
    return st.builds(Step, st.sampled_from((*summed, *MOVES)), args)


def deeds(bench: Bench, group: Communicator, step: Step, number: int) -> list[Deed]:
    """This rank's part in step `number`; empty when it has none."""
    count, first, second = (int(argument) for argument in step.args)
    desk = _Desk(bench, group, number, count)
    if step.op == "message":
        return desk.message(first, second)
    if step.op == "broadcast":
        return [desk.broadcast(first)]
    plain: dict[str, Callable[[], Deed]] = {
        "all_reduce": desk.all_reduce,
        "reduce_scatter": desk.reduce_scatter,
        "all_gather": desk.all_gather,
        "all_to_all": desk.all_to_all,
        "barrier": desk.barrier,
        "exchange": desk.exchange,
    }
    return [plain[step.op]()]


@dataclass(frozen=True)
class _Desk:
    """Makes the deeds of one step.

    What a rank gives is a row of bytes that says the rank, the step, and for whom it is.
    """

    bench: Bench
    group: Communicator
    number: int
    count: int

    @property
    def _all(self) -> frozenset[int]:
        return frozenset(range(self.bench.size))

    def all_reduce(self) -> Deed:
        value = self.bench.of(self._row(self.bench.rank).long())
        due = sum((self._row(rank).long() for rank in self._all), torch.zeros(1).long())
        return Deed("all_reduce", lambda: self.group.all_reduce(value), self._all, value, due)

    def reduce_scatter(self) -> Deed:
        mine = self.bench.of(self._rows(lambda other: (self.bench.rank, other)).long())
        out = self.bench.filled((self.count,), 0, torch.int64)
        due = self._rows(lambda other: (other, self.bench.rank)).long().sum(0)
        issue = lambda: self.group.reduce_scatter(out, mine)  # noqa: E731
        return Deed("reduce_scatter", issue, self._all, out, due)

    def all_gather(self) -> Deed:
        mine = self.bench.of(self._row(self.bench.rank))
        out = self.bench.filled((self.bench.size, self.count), 0)
        due = self._rows(lambda other: (other, 0))
        return Deed("all_gather", lambda: self.group.all_gather(out, mine), self._all, out, due)

    def all_to_all(self) -> Deed:
        mine = self.bench.of(self._rows(lambda other: (self.bench.rank, other)))
        out = self.bench.filled((self.bench.size, self.count), 0)
        due = self._rows(lambda other: (other, self.bench.rank))
        return Deed("all_to_all", lambda: self.group.all_to_all(out, mine), self._all, out, due)

    def broadcast(self, source: int) -> Deed:
        value = self.bench.of(self._row(self.bench.rank))
        issue = lambda: self.group.broadcast(value, source)  # noqa: E731
        return Deed("broadcast", issue, frozenset({source}), value, self._row(source))

    def barrier(self) -> Deed:
        return Deed("barrier", self.group.barrier, self._all)

    def message(self, source: int, destination: int) -> list[Deed]:
        if self.bench.rank == source:
            given = self.bench.of(self._row(source))
            send = lambda: self.group.isend(given, destination)  # noqa: E731
            # A send is a rendezvous: it ends at the earliest when its receive is posted.
            return [Deed("isend", send, frozenset({destination}))]
        if self.bench.rank == destination:
            out = self.bench.filled((self.count,), 0)
            receive = lambda: self.group.irecv(out, source)  # noqa: E731
            return [Deed("irecv", receive, frozenset({source}), out, self._row(source))]
        return []

    def exchange(self) -> Deed:
        """A blob to the next rank, one from the rank before."""
        size, rank = self.bench.size, self.bench.rank
        after, before = (rank + 1) % size, (rank - 1) % size
        given, out = self.bench.of(self._row(rank)), self.bench.filled((self.count,), 0)
        parcels = Exchange((Parcel(after, given),), (Parcel(before, out),))
        issue = lambda: self.group.exchange(parcels)  # noqa: E731
        return Deed("exchange", issue, frozenset({after, before}), out, self._row(before))

    def _row(self, giver: int, taker: int = 0) -> Tensor:
        """uint8 [count]."""
        start = 1 + 31 * giver + 7 * taker + 3 * self.number
        return (torch.arange(self.count) + start).to(torch.uint8)

    def _rows(self, ends: Callable[[int], tuple[int, int]]) -> Tensor:
        """uint8 [size, count]: for each rank the row between these two ends."""
        return torch.stack([self._row(*ends(other)) for other in range(self.bench.size)])
