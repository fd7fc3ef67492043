"""A communicator over one MPI communicator of its own."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from equipoise.backends.mpi.flight import Leg
from equipoise.backends.mpi.line import Line, Start
from equipoise.backends.mpi.spans import NUMBERS, apart, numbers, raw
from equipoise.backends.mpi.work import MpiWork
from equipoise.hal.capabilities import CommunicatorCapabilities
from equipoise.hal.communicator import Exchange
from equipoise.hal.errors import Unsupported
from equipoise.hal.operands import (
    check_blob,
    check_links,
    check_movable,
    check_rank,
    check_rows,
    check_shape,
    check_summable,
)

MPI_CAPABILITIES = CommunicatorCapabilities(
    stream_ordered=False,
    independent_groups=True,
    abort=False,  # MPI takes back unmatched receives, and nothing else
    rebuild=False,  # mpiexec ends the whole job when a rank dies
    shared_devices=True,
    dtypes=frozenset(
        {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
        | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
        | {torch.float8_e4m3fn, torch.float8_e5m2}
    ),
    reductions=frozenset(NUMBERS),
)
TAG = 0
"""The only tag: messages of a pair match first in, first out (clause P2)."""


class MpiCommunicator:
    """Collectives and point-to-point for one purpose; data travels as bytes, sums as numbers."""

    capabilities = MPI_CAPABILITIES

    def __init__(self, line: Line) -> None:
        self._line = line
        self._mpi = line.mpi

    @property
    def purpose(self) -> str:
        """What the communicator is for."""
        return self._line.purpose

    @property
    def rank(self) -> int:
        """This rank's number within the communicator."""
        return self._line.rank

    @property
    def size(self) -> int:
        """How many ranks."""
        return self._line.size

    def all_reduce(self, tensor: Tensor) -> MpiWork:
        """Sum over ranks, in place."""
        check_summable(self.capabilities, tensor)
        here, mpi = numbers(self._mpi, tensor), self._mpi
        return self._line.collective(
            "all_reduce", lambda c: c.Iallreduce(mpi.IN_PLACE, here, mpi.SUM), tensor
        )

    def all_gather(self, out: Tensor, tensor: Tensor) -> MpiWork:
        """Every rank's tensor, stacked."""
        check_movable(self.capabilities, out, tensor)
        check_shape("all_gather", out, (self.size, *tensor.shape))
        source = apart(tensor, out)
        narrow, wide = raw(self._mpi, source), raw(self._mpi, out, self.size)
        return self._line.collective(
            "all_gather", lambda c: c.Iallgather(narrow, wide), out, source
        )

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> MpiWork:
        """This rank's part of the sum."""
        check_summable(self.capabilities, out, tensor)
        check_shape("reduce_scatter", tensor, (self.size, *out.shape))
        source, mpi = apart(tensor, out), self._mpi
        whole, part = numbers(mpi, source, self.size), numbers(mpi, out)
        return self._line.collective(
            "reduce_scatter",
            lambda c: c.Ireduce_scatter_block(whole, part, mpi.SUM),
            *(out, source),
        )

    def broadcast(self, tensor: Tensor, source: int) -> MpiWork:
        """Everybody receives rank `source`'s tensor."""
        check_movable(self.capabilities, tensor)
        check_rank("broadcast", source, range(self.size))
        here = raw(self._mpi, tensor)
        return self._line.collective("broadcast", lambda c: c.Ibcast(here, source), tensor)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> MpiWork:
        """Even blocks."""
        check_movable(self.capabilities, out, tensor)
        check_shape("all_to_all", tensor, (self.size, *tensor.shape[1:]))
        check_shape("all_to_all", out, tuple(tensor.shape))
        return self._all_to_all(out, tensor, [1] * self.size, [1] * self.size)

    def all_to_all_uneven(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> MpiWork:
        """Blocks of given row counts."""
        check_movable(self.capabilities, out, tensor)
        check_rows("all_to_all_uneven", receives, self.size)
        check_rows("all_to_all_uneven", sends, self.size)
        check_shape("all_to_all", out, (sum(receives), *tensor.shape[1:]))
        check_shape("all_to_all", tensor, (sum(sends), *out.shape[1:]))
        return self._all_to_all(out, tensor, receives, sends)

    def barrier(self) -> MpiWork:
        """Ends after every rank has issued it."""
        return self._line.collective("barrier", lambda c: c.Ibarrier())

    def isend(self, tensor: Tensor, destination: int) -> MpiWork:
        """Send to one rank."""
        check_movable(self.capabilities, tensor)
        what = f"isend to {destination}"
        check_rank(what, destination, self._peers())
        return self._line.issue(what, [self._send(tensor, destination)], [tensor])

    def irecv(self, tensor: Tensor, source: int) -> MpiWork:
        """Receive from one rank."""
        check_movable(self.capabilities, tensor)
        what = f"irecv from {source}"
        check_rank(what, source, self._peers())
        return self._line.issue(what, [self._receive(tensor, source)], [tensor])

    def exchange(self, round: Exchange) -> MpiWork:
        """One round of blobs; empty blobs do not travel."""
        for parcel in (*round.sends, *round.receives):
            check_rank("exchange", parcel.peer, self._peers())
            check_blob(parcel.blob)
        arriving = [(p.peer, p.blob) for p in round.receives if p.blob.numel()]
        into = [blob for _, blob in arriving]
        leaving = [(p.peer, apart(p.blob, *into)) for p in round.sends if p.blob.numel()]
        starts = [self._receive(blob, peer) for peer, blob in arriving]
        starts += [self._send(blob, peer) for peer, blob in leaving]
        return self._line.issue("exchange", starts, [*into, *(blob for _, blob in leaving)])

    def warm(self, links: Sequence[tuple[int, int]]) -> None:
        """Nothing to build: MPI links a pair at its first message, and blocks nobody."""
        check_links(links, self.size)
        self._line.refuse_failed("warm")

    def abort(self) -> None:
        """Not possible with MPI."""
        raise Unsupported("MPI cannot end an operation in flight; wait for its deadline")

    def rebuild(self, ranks: Sequence[int]) -> None:
        """Not possible with MPI."""
        raise Unsupported("mpiexec ends the job when a rank dies; open another communicator")

    def close(self) -> None:
        """Take no more operations; does not wait."""
        self._line.close()

    def _all_to_all(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> MpiWork:
        """Blocks of so many rows each."""
        width = prod(tensor.shape[1:]) * tensor.element_size()
        source, mpi = apart(tensor, out), self._mpi
        given = (raw(mpi, source)[0], [n * width for n in sends], mpi.BYTE)
        taken = (raw(mpi, out)[0], [n * width for n in receives], mpi.BYTE)
        return self._line.collective(
            "all_to_all", lambda c: c.Ialltoallv(given, taken), out, source
        )

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _send(self, tensor: Tensor, destination: int) -> Start:
        # Synchronous: a small message that nobody receives would otherwise end well (clause P3).
        here = raw(self._mpi, tensor)
        return lambda c: Leg(c.Issend(here, destination, TAG))

    def _receive(self, tensor: Tensor, source: int) -> Start:
        here = raw(self._mpi, tensor)
        return lambda c: Leg(c.Irecv(here, source, TAG), tensor.nbytes)
