"""Several ranks of an exchange in one thread, on one stream: a transport without a network."""

from functools import partial

from torch import Tensor

from equipoise.hal.errors import Unsupported
from equipoise.hal.stream import Stream


class CompletedWork:
    """It has ended as soon as the stream has come to it."""

    def done(self) -> bool:
        return True

    def wait(self, stream: Stream) -> None:
        """All is on one stream."""

    def result(self, timeout: float) -> None:
        """It ended."""

    def cancel(self) -> None:
        raise Unsupported("it has ended")


class Table:
    """Where the messages of all ranks meet: the last one to come moves all of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._met: dict[int, tuple[Tensor, Tensor]] = {}

    def meet(self, rank: int, into: Tensor, source: Tensor, stream: Stream) -> None:
        self._met[rank] = into, source
        if len(self._met) == self.size:
            stream.launch(partial(_move, self._met))
            self._met = {}


class TableWire:
    """A rank's end of it."""

    def __init__(self, table: Table, rank: int) -> None:
        self.rank = rank
        self.active = (True,) * table.size
        self._table = table

    def all_to_all(self, into: Tensor, source: Tensor, stream: Stream) -> CompletedWork:
        self._table.meet(self.rank, into, source, stream)
        return CompletedWork()


def _move(met: dict[int, tuple[Tensor, Tensor]]) -> None:
    for rank, (into, _) in met.items():
        for peer, (_, source) in met.items():
            into[peer].copy_(source[rank])
