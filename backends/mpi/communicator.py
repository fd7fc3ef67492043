"""The communicator over MPI: one MPI communicator of its own, and tensors as addresses, counts and
types."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from equipoise.backends.mpi.progress import MpiInflightOp, MpiRequest, ProgressThread
from equipoise.backends.mpi.work import MpiWork
from equipoise.hal.capabilities import CommunicatorCapabilities
from equipoise.hal.communicator import Exchange
from equipoise.hal.errors import CommunicatorFailed, ResultPending, Unsupported
from equipoise.hal.support.validation import (
    check_blob,
    check_links,
    check_rank,
    check_reducible,
    check_rows,
    check_shape,
    check_transferable,
)

MPI_TYPES = {
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
}
"""What MPI sums by itself, and its name for it."""
BufferSpan: TypeAlias = tuple[object, int, object]
"""What mpi4py takes for a message: the memory, the elements of one rank's part, MPI's type.

mpi4py does not hold an explicit count against the length of the memory.
"""


def byte_span(mpi: ModuleType, tensor: Tensor, parts: int = 1) -> BufferSpan:
    """The bytes of a contiguous CPU tensor of any dtype, in so many equal parts."""
    return _buffer(mpi, tensor), tensor.nbytes // parts, mpi.BYTE


def element_span(mpi: ModuleType, tensor: Tensor, parts: int = 1) -> BufferSpan:
    """The elements of a contiguous CPU tensor whose dtype is summed, in so many equal parts."""
    return _buffer(mpi, tensor), tensor.numel() // parts, getattr(mpi, MPI_TYPES[tensor.dtype])


def copy_if_overlapping(tensor: Tensor, *written: Tensor) -> Tensor:
    """`tensor`, or a copy of it where it overlaps what will be written.

    So an in-place call equals the out-of-place one; MPI itself forbids such aliases (clause A3).
    """
    return tensor.clone() if any(_overlap(tensor, output) for output in written) else tensor


def _overlap(one: Tensor, other: Tensor) -> bool:
    first, second = sorted((one, other), key=lambda tensor: tensor.data_ptr())
    return first.data_ptr() + first.nbytes > second.data_ptr()


def _buffer(mpi: ModuleType, tensor: Tensor) -> object:
    return mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


if TYPE_CHECKING:
    from mpi4py import MPI

Start = Callable[["MPI.Intracomm"], MpiRequest]
"""Starts one request."""


class MpiCommQueue:
    """Issues operations in order, fails with the first that does, and closes with its peers.

    Args:
        mpi: mpi4py's module.
        traffic: the operations' communicator.
        closing_comm: the same ranks; carries one operation, that of closing.
        purpose: what it is for, for errors.
        deadline: seconds that an operation may take.
        progress: drives what is under way.
    """

    def __init__(
        self,
        mpi: ModuleType,
        traffic: MPI.Intracomm,
        closing_comm: MPI.Intracomm,
        purpose: str,
        deadline: float,
        progress: ProgressThread,
    ) -> None:
        self.mpi = mpi
        self.purpose = purpose
        self.rank: int = traffic.rank
        self.size: int = traffic.size
        self._comm = traffic
        self._closing_comm = closing_comm
        self._deadline = deadline
        self._progress = progress
        self._failure: CommunicatorFailed | None = None
        self._pending = 0
        self._collectives = 0
        self._closing_state = torch.zeros(3, dtype=torch.int64)
        self._closing: MpiWork | None = None
        self._issuing = threading.Lock()
        self._counting = threading.Lock()

    def collective(
        self, what: str, start: Callable[[MPI.Intracomm], MPI.Request], *buffers: Tensor
    ) -> MpiWork:
        """Issue an operation of all ranks, which is one request."""
        with self._issuing:
            work = self._issue(what, [lambda traffic: MpiRequest(start(traffic))], buffers)
            self._collectives += 1
        return work

    def issue(self, what: str, starts: Sequence[Start], buffers: Sequence[Tensor]) -> MpiWork:
        """Issue an operation whole, whatever other threads do (clause P6)."""
        with self._issuing:
            return self._issue(what, starts, buffers)

    def refuse_failed(self, what: str) -> None:
        """Raise `CommunicatorFailed` after a failure, and after closing (clause E2)."""
        if self._failure is not None:
            raise CommunicatorFailed(f"{what} of {self.purpose!r}: {self._failure}")

    def close(self) -> None:
        """Take no more operations, and tell the others in what state it ends; does not wait."""
        with self._issuing:
            if self._closing is None:
                self._closing = self._start_closing()

    def release(self, timeout: float) -> bool:
        """Free MPI's communicators; false when not every rank closes within `timeout` seconds.

        Where the ranks did not all end sound and level, something may still be on its way, and MPI
        would deliver it to the next communicator that gets the same context: that one is kept.
        """
        if self._closing is None:
            return False
        try:
            self._closing.result(timeout)
        except (ResultPending, CommunicatorFailed):
            return False
        sound, fewest, most = self._closing_state.tolist()
        if sound and fewest == -most:
            self._comm.Free()
        self._closing_comm.Free()
        return True

    def _issue(self, operation: str, starts: Sequence[Start], buffers: Sequence[Tensor]) -> MpiWork:
        self.refuse_failed(operation)
        # Before the start: an operation that cannot be started is counted down as any that ended.
        with self._counting:
            self._pending += 1
        work = MpiWork(
            f"{operation} of {self.purpose!r}", self._deadline, self._ended, self._failed
        )
        requests: list[MpiRequest] = []
        try:
            for start in starts:
                requests.append(start(self._comm))
        except self.mpi.Exception as error:
            work.fail(f"was not started: {error}")
        # Also where a later part was not started: MPI uses the buffers of those that were.
        self._progress.add(MpiInflightOp(self.mpi, work, requests, buffers))
        return work

    def _ended(self) -> None:
        with self._counting:
            self._pending -= 1

    def _failed(self, failure: CommunicatorFailed) -> None:
        with self._counting:
            self._failure = self._failure or failure

    def _start_closing(self) -> MpiWork:
        with self._counting:
            sound = self._failure is None and self._pending == 0
            self._failure = CommunicatorFailed(f"communicator {self.purpose!r} was closed")
        level = self._collectives
        self._closing_state.copy_(torch.tensor([sound, level, -level]))
        here = element_span(self.mpi, self._closing_state)
        request = self._closing_comm.Iallreduce(self.mpi.IN_PLACE, here, self.mpi.MIN)
        label = f"closing of {self.purpose!r}"
        work = MpiWork(label, math.inf, _nobody_counts, self._failed)
        self._progress.add(
            MpiInflightOp(self.mpi, work, [MpiRequest(request)], [self._closing_state])
        )
        return work


def _nobody_counts() -> None:
    """Closing is not an operation of this queue."""


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
    reductions=frozenset(MPI_TYPES),
)
TAG = 0
"""The only tag: messages of a pair match first in, first out (clause P2)."""


class MpiCommunicator:
    """Collectives and point-to-point for one purpose; data travels as bytes, sums as numbers."""

    capabilities = MPI_CAPABILITIES

    def __init__(self, queue: MpiCommQueue) -> None:
        self._queue = queue
        self._mpi = queue.mpi

    @property
    def purpose(self) -> str:
        """What the communicator is for."""
        return self._queue.purpose

    @property
    def rank(self) -> int:
        """This rank's number within the communicator."""
        return self._queue.rank

    @property
    def size(self) -> int:
        """How many ranks."""
        return self._queue.size

    def all_reduce(self, tensor: Tensor) -> MpiWork:
        """Sum over ranks, in place."""
        check_reducible(self.capabilities, tensor)
        here, mpi = element_span(self._mpi, tensor), self._mpi
        return self._queue.collective(
            "all_reduce", lambda c: c.Iallreduce(mpi.IN_PLACE, here, mpi.SUM), tensor
        )

    def all_gather(self, out: Tensor, tensor: Tensor) -> MpiWork:
        """Every rank's tensor, stacked."""
        check_transferable(self.capabilities, out, tensor)
        check_shape("all_gather", out, (self.size, *tensor.shape))
        source = copy_if_overlapping(tensor, out)
        narrow, wide = byte_span(self._mpi, source), byte_span(self._mpi, out, self.size)
        return self._queue.collective(
            "all_gather", lambda c: c.Iallgather(narrow, wide), out, source
        )

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> MpiWork:
        """This rank's part of the sum."""
        check_reducible(self.capabilities, out, tensor)
        check_shape("reduce_scatter", tensor, (self.size, *out.shape))
        source, mpi = copy_if_overlapping(tensor, out), self._mpi
        whole, part = element_span(mpi, source, self.size), element_span(mpi, out)
        return self._queue.collective(
            "reduce_scatter",
            lambda c: c.Ireduce_scatter_block(whole, part, mpi.SUM),
            *(out, source),
        )

    def broadcast(self, tensor: Tensor, source: int) -> MpiWork:
        """Everybody receives rank `source`'s tensor."""
        check_transferable(self.capabilities, tensor)
        check_rank("broadcast", source, range(self.size))
        here = byte_span(self._mpi, tensor)
        return self._queue.collective("broadcast", lambda c: c.Ibcast(here, source), tensor)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> MpiWork:
        """Even blocks."""
        check_transferable(self.capabilities, out, tensor)
        check_shape("all_to_all", tensor, (self.size, *tensor.shape[1:]))
        check_shape("all_to_all", out, tuple(tensor.shape))
        return self._all_to_all(out, tensor, [1] * self.size, [1] * self.size)

    def all_to_all_uneven(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> MpiWork:
        """Blocks of given row counts."""
        check_transferable(self.capabilities, out, tensor)
        check_rows("all_to_all_uneven", receives, self.size)
        check_rows("all_to_all_uneven", sends, self.size)
        check_shape("all_to_all_uneven", out, (sum(receives), *tensor.shape[1:]))
        check_shape("all_to_all_uneven", tensor, (sum(sends), *out.shape[1:]))
        return self._all_to_all(out, tensor, receives, sends)

    def barrier(self) -> MpiWork:
        """Ends after every rank has issued it."""
        return self._queue.collective("barrier", lambda c: c.Ibarrier())

    def isend(self, tensor: Tensor, destination: int) -> MpiWork:
        """Send to one rank."""
        check_transferable(self.capabilities, tensor)
        operation = f"isend to {destination}"
        check_rank(operation, destination, self._peers())
        return self._queue.issue(operation, [self._send(tensor, destination)], [tensor])

    def irecv(self, tensor: Tensor, source: int) -> MpiWork:
        """Receive from one rank."""
        check_transferable(self.capabilities, tensor)
        operation = f"irecv from {source}"
        check_rank(operation, source, self._peers())
        return self._queue.issue(operation, [self._receive(tensor, source)], [tensor])

    def exchange(self, round: Exchange) -> MpiWork:
        """One round of blobs; empty blobs do not travel."""
        for buffer in (*round.sends, *round.receives):
            check_rank("exchange", buffer.peer, self._peers())
            check_blob(buffer.blob)
        arriving = [(p.peer, p.blob) for p in round.receives if p.blob.numel()]
        into = [blob for _, blob in arriving]
        leaving = [
            (p.peer, copy_if_overlapping(p.blob, *into)) for p in round.sends if p.blob.numel()
        ]
        starts = [self._receive(blob, peer) for peer, blob in arriving]
        starts += [self._send(blob, peer) for peer, blob in leaving]
        return self._queue.issue("exchange", starts, [*into, *(blob for _, blob in leaving)])

    def warm(self, links: Sequence[tuple[int, int]]) -> None:
        """Nothing to build: MPI links a pair at its first message, and blocks nobody."""
        check_links(links, self.size)
        self._queue.refuse_failed("warm")

    def abort(self) -> None:
        """Not possible with MPI."""
        raise Unsupported("MPI cannot end an operation in flight; wait for its deadline")

    def rebuild(self, ranks: Sequence[int]) -> None:
        """Not possible with MPI."""
        raise Unsupported("mpiexec ends the job when a rank dies; open another communicator")

    def close(self) -> None:
        """Take no more operations; does not wait."""
        self._queue.close()

    def _all_to_all(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> MpiWork:
        """Blocks of so many rows each."""
        width = prod(tensor.shape[1:]) * tensor.element_size()
        source, mpi = copy_if_overlapping(tensor, out), self._mpi
        send_spec = (byte_span(mpi, source)[0], [n * width for n in sends], mpi.BYTE)
        receive_spec = (byte_span(mpi, out)[0], [n * width for n in receives], mpi.BYTE)
        return self._queue.collective(
            "all_to_all", lambda c: c.Ialltoallv(send_spec, receive_spec), out, source
        )

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _send(self, tensor: Tensor, destination: int) -> Start:
        # Synchronous: a small message that nobody receives would otherwise end well (clause P3).
        here = byte_span(self._mpi, tensor)
        return lambda c: MpiRequest(c.Issend(here, destination, TAG))

    def _receive(self, tensor: Tensor, source: int) -> Start:
        here = byte_span(self._mpi, tensor)
        return lambda c: MpiRequest(c.Irecv(here, source, TAG), tensor.nbytes)
