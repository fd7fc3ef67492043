"""A communicator of the virtual network."""

from collections.abc import Sequence
from functools import partial
from math import prod

import numpy as np
from torch import Tensor

from equipoise.backends.virtual.arena import Bytes, bytes_of
from equipoise.backends.virtual.collective import Kind, Share
from equipoise.backends.virtual.endpoint import Endpoint
from equipoise.backends.virtual.operation import Native, Operation
from equipoise.backends.virtual.work import VirtualWork
from equipoise.hal.communicator import Exchange, Parcel
from equipoise.hal.operands import (
    check_blob,
    check_links,
    check_movable,
    check_rank,
    check_rows,
    check_shape,
    check_summable,
)

NOTHING: Bytes = np.empty(0, np.uint8)


class VirtualCommunicator(Endpoint):
    """The verbs: each checks its arguments, and says what its operation brings to the network."""

    def all_reduce(self, tensor: Tensor) -> VirtualWork:
        """Sum over ranks, in place."""
        check_summable(self.capabilities, tensor)
        view = bytes_of(tensor)
        make = partial(Share, Kind.ALL_REDUCE, view, view, dtype=tensor.dtype)
        return self._collective(make, tensor)

    def all_gather(self, out: Tensor, tensor: Tensor) -> VirtualWork:
        """Every rank's tensor, stacked."""
        check_movable(self.capabilities, out, tensor)
        check_shape("all_gather", out, (self.size, *tensor.shape))
        make = partial(Share, Kind.ALL_GATHER, bytes_of(tensor), bytes_of(out))
        return self._collective(make, out, tensor)

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> VirtualWork:
        """This rank's part of the sum."""
        check_summable(self.capabilities, out, tensor)
        check_shape("reduce_scatter", tensor, (self.size, *out.shape))
        views = bytes_of(tensor), bytes_of(out)
        make = partial(Share, Kind.REDUCE_SCATTER, *views, dtype=tensor.dtype)
        return self._collective(make, out, tensor)

    def broadcast(self, tensor: Tensor, source: int) -> VirtualWork:
        """Everybody receives rank `source`'s tensor."""
        check_movable(self.capabilities, tensor)
        check_rank("broadcast", source, range(self.size))
        view = bytes_of(tensor)
        return self._collective(partial(Share, Kind.BROADCAST, view, view, root=source), tensor)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> VirtualWork:
        """Even blocks."""
        check_movable(self.capabilities, out, tensor)
        check_shape("all_to_all", tensor, (self.size, *tensor.shape[1:]))
        check_shape("all_to_all", out, tuple(tensor.shape))
        return self._rows(out, tensor, [1] * self.size, [1] * self.size)

    def all_to_all_uneven(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> VirtualWork:
        """Blocks of given row counts."""
        check_movable(self.capabilities, out, tensor)
        check_rows("all_to_all_uneven", receives, self.size)
        check_rows("all_to_all_uneven", sends, self.size)
        check_shape("all_to_all", out, (sum(receives), *tensor.shape[1:]))
        check_shape("all_to_all", tensor, (sum(sends), *out.shape[1:]))
        return self._rows(out, tensor, receives, sends)

    def barrier(self) -> VirtualWork:
        """Ends after every rank has issued it."""
        return self._collective(partial(Share, Kind.BARRIER, NOTHING, NOTHING))

    def isend(self, tensor: Tensor, destination: int) -> VirtualWork:
        """Send to one rank."""
        check_movable(self.capabilities, tensor)
        check_rank("isend", destination, self._peers())
        return self._messages(f"isend to {destination}", sends=[(destination, tensor)], receives=[])

    def irecv(self, tensor: Tensor, source: int) -> VirtualWork:
        """Receive from one rank."""
        check_movable(self.capabilities, tensor)
        check_rank("irecv", source, self._peers())
        return self._messages(f"irecv from {source}", sends=[], receives=[(source, tensor)])

    def exchange(self, round: Exchange) -> VirtualWork:
        """One round of blobs; empty blobs do not travel."""
        for parcel in (*round.sends, *round.receives):
            check_rank("exchange", parcel.peer, self._peers())
            check_blob(parcel.blob)
        return self._messages("exchange", _full(round.sends), _full(round.receives))

    def warm(self, links: Sequence[tuple[int, int]]) -> None:
        """Build the links in this order, each once."""
        check_links(links, self.size)
        for link in links:
            self._build(link)

    def _rows(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> VirtualWork:
        width = prod(tensor.shape[1:]) * tensor.element_size()
        gives, takes = tuple(n * width for n in sends), tuple(n * width for n in receives)
        views = bytes_of(tensor), bytes_of(out)
        make = partial(Share, Kind.ALL_TO_ALL, *views, gives=gives, takes=takes)
        return self._collective(make, out, tensor)

    def _collective(self, make: partial[Share], *tensors: Tensor) -> VirtualWork:
        kind: Kind = make.args[0]
        after = self._admit(kind)
        number, group, rank = self._next_round(), self._group, self.rank

        def post(operation: Operation) -> Sequence[Native]:
            native = Native(operation)
            group.join(number, rank, make(native=native))
            return [native]

        others = frozenset(self._members) - {self.member}
        return self._issue(kind, after, post, tensors, others, ())

    def _messages(
        self,
        what: str,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
    ) -> VirtualWork:
        """Messages of one operation; receives are posted before sends."""
        group, here = self._group, self.rank
        taken = [(bytes_of(tensor), (peer, here)) for peer, tensor in receives]
        given = [(bytes_of(tensor), (here, peer)) for peer, tensor in sends]

        def post(operation: Operation) -> Sequence[Native]:
            natives = group.batch(operation, len(taken) + len(given))
            for place, (buffer, pair) in enumerate((*taken, *given)):
                put = group.receive if place < len(taken) else group.send
                put(natives[place % len(natives)], buffer, pair)
            return natives

        both = (*receives, *sends)
        peers = frozenset(self._members[peer] for peer, _ in both)
        links = {(min(here, peer), max(here, peer)) for peer, _ in both}
        after = self._admit(what)
        return self._issue(what, after, post, [t for _, t in both], peers, tuple(sorted(links)))


def _full(parcels: Sequence[Parcel]) -> list[tuple[int, Tensor]]:
    return [(parcel.peer, parcel.blob) for parcel in parcels if parcel.blob.numel()]
