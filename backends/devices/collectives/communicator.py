"""The communicator over a vendor's library, for tensors on its devices."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from equipoise.backends.devices.collectives.ccl import CclComm, CclHandle, as_bytes, check_device
from equipoise.backends.devices.collectives.comm_set import CommContext, CommSet
from equipoise.backends.devices.collectives.comm_stream import Launch
from equipoise.backends.devices.collectives.work import DeviceWork
from equipoise.hal.capabilities import CommunicatorCapabilities
from equipoise.hal.communicator import Exchange, PeerBuffer
from equipoise.hal.errors import CommunicatorFailed, Unsupported
from equipoise.hal.support.validation import (
    check_apart,
    check_blob,
    check_links,
    check_rank,
    check_reducible,
    check_rows,
    check_shape,
    check_transferable,
)


@dataclass(frozen=True)
class P2PRound:
    """A batch of messages of one rank: at most one blob per peer and direction.

    Libraries process the pairs in an order of their own, the same on every rank, so the order here
    does not matter. Empty blobs do not travel.

    Attributes:
        operations: isend or irecv, for each.
        blobs: int8 [bytes].
        peers: whom it goes to or comes from.
    """

    operations: tuple[str, ...]
    blobs: tuple[Tensor, ...]
    peers: tuple[int, ...]

    def launch(self, group: CclComm) -> CclHandle:
        """Launch all messages with one call, which returns one handle."""
        return group.batch(self.operations, self.blobs, self.peers)


def plan_round(plan: Exchange) -> P2PRound:
    """Receives before sends, by peer."""
    arriving, leaving = _sorted(plan.receives), _sorted(plan.sends)
    return P2PRound(
        operations=("irecv",) * len(arriving) + ("isend",) * len(leaving),
        blobs=tuple(buffer.blob.view(torch.int8) for buffer in (*arriving, *leaving)),
        peers=tuple(buffer.peer for buffer in (*arriving, *leaving)),
    )


def _sorted(buffers: tuple[PeerBuffer, ...]) -> list[PeerBuffer]:
    return sorted((p for p in buffers if p.blob.numel()), key=lambda buffer: buffer.peer)


class DeviceCommunicator:
    """Collectives and point-to-point messages for one purpose.

    Data that is moved travels as bytes, sums as numbers. An operation waits for what was launched
    on the caller's current stream. Thread-safe: an operation is issued whole, under one lock (P6).

    Args:
        context: what it needs.
        ranks: members, numbers of the run.

    Raises:
        CommunicatorFailed: a member is late.
    """

    def __init__(self, context: CommContext, ranks: Sequence[int]) -> None:
        self._context = context
        self._rebuilds = 0
        self._closed = False
        self._issuing = threading.RLock()
        self._comms = self._new_comm_set(ranks)

    @property
    def purpose(self) -> str:
        """What the communicator is for."""
        return self._context.purpose

    @property
    def rank(self) -> int:
        """This rank's number within the communicator."""
        return self._comms.rank

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self._comms.ranks)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """What it can do."""
        return self._context.ccl.capabilities

    def all_reduce(self, tensor: Tensor) -> DeviceWork:
        """Sum over ranks, in place."""
        self._check_sum(tensor)
        flat = tensor.detach().view(-1)
        return self._collective("all_reduce", lambda g: g.all_reduce(flat), tensor)

    def all_gather(self, out: Tensor, tensor: Tensor) -> DeviceWork:
        """Every rank's tensor, stacked."""
        self._check_move(out, tensor)
        check_shape("all_gather", out, (self.size, *tensor.shape))
        own = tensor.data_ptr() == out[self.rank].data_ptr()  # in place, as in MPI and NCCL
        if not own:
            check_apart("all_gather", out, tensor)
        wide, narrow = as_bytes(out), as_bytes(tensor)
        # In place only through a copy: not every library documents that it may read its output.
        source = narrow.clone() if own else narrow
        return self._collective(
            "all_gather", lambda g: g.all_gather(wide, source), out, tensor, source
        )

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> DeviceWork:
        """This rank's part of the sum."""
        self._check_sum(out, tensor)
        check_shape("reduce_scatter", tensor, (self.size, *out.shape))
        check_apart("reduce_scatter", out, tensor)
        part, whole = out.detach().view(-1), tensor.detach().view(-1)
        launch: Launch = lambda g: g.reduce_scatter(part, whole)  # noqa: E731
        return self._collective("reduce_scatter", launch, out, tensor)

    def broadcast(self, tensor: Tensor, source: int) -> DeviceWork:
        """All ranks receive rank `source`'s tensor."""
        self._check_move(tensor)
        check_rank("broadcast", source, range(self.size))
        view = as_bytes(tensor)
        return self._collective("broadcast", lambda g: g.broadcast(view, source), tensor)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> DeviceWork:
        """Even blocks."""
        self._check_move(out, tensor)
        check_shape("all_to_all", tensor, (self.size, *tensor.shape[1:]))
        check_shape("all_to_all", out, tuple(tensor.shape))
        check_apart("all_to_all", out, tensor)
        into, source = as_bytes(out), as_bytes(tensor)
        launch: Launch = lambda g: g.all_to_all(into, source, (), ())  # noqa: E731
        return self._collective("all_to_all", launch, out, tensor)

    def all_to_all_uneven(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> DeviceWork:
        """Blocks of given row counts; a rank may have none while others have some."""
        self._check_move(out, tensor)
        check_rows("all_to_all_uneven", receives, self.size)
        check_rows("all_to_all_uneven", sends, self.size)
        width = prod(tensor.shape[1:]) * tensor.element_size()
        check_shape("all_to_all", out, (sum(receives), *tensor.shape[1:]))
        check_shape("all_to_all", tensor, (sum(sends), *out.shape[1:]))
        check_apart("all_to_all", out, tensor)
        into, source = as_bytes(out), as_bytes(tensor)
        receive_bytes, send_bytes = [n * width for n in receives], [n * width for n in sends]
        launch: Launch = lambda g: g.all_to_all(into, source, receive_bytes, send_bytes)  # noqa: E731
        return self._issue("all_to_all", launch, out, tensor)

    def barrier(self) -> DeviceWork:
        """Ends after every rank has issued it."""
        with self._issuing:
            return self._issue("barrier", self._comms.barrier())

    def isend(self, tensor: Tensor, destination: int) -> DeviceWork:
        """Send to one rank."""
        self._check_move(tensor)
        check_rank(f"isend to {destination}", destination, self._peers())
        return self._message(f"isend to {destination}", (self.rank, destination), tensor)

    def irecv(self, tensor: Tensor, source: int) -> DeviceWork:
        """Receive from one rank."""
        self._check_move(tensor)
        check_rank(f"irecv from {source}", source, self._peers())
        return self._message(f"irecv from {source}", (source, self.rank), tensor)

    def exchange(self, round: Exchange) -> DeviceWork:
        """One round of blobs; empty blobs do not travel."""
        for buffer in (*round.sends, *round.receives):
            check_rank("exchange", buffer.peer, self._peers())
            check_blob(buffer.blob)
            self._check_move(buffer.blob)
        planned = plan_round(round)
        if not planned.blobs:
            with self._issuing:
                self._check_usable("exchange")
                return self._comms.completed_work("exchange")
        return self._issue("exchange", planned.launch, *planned.blobs)

    def warm(self, links: Sequence[tuple[int, int]]) -> None:
        """Make the links of each of these pairs of ranks in both directions, one after the other.

        The host waits for the other ends, each up to the deadline. Raises `CommunicatorFailed`.
        """
        check_links(links, self.size)
        with self._issuing:
            self._check_usable("warm")
            for first, second in links:
                for pair in ((first, second), (second, first)):
                    self._comms.connect(pair, time.monotonic() + self._context.deadline)

    def abort(self) -> None:
        """End what is in flight with an error, on this rank only. Raises `Unsupported` if the
        library cannot abort.

        From any thread. An operation that is being issued is waited for up to the deadline; after
        that the abort goes on without the lock, since the call may hang because of what is aborted.
        """
        library = self._context.ccl
        if not library.capabilities.abort:
            raise Unsupported(
                f"{library.title} cannot end an operation in flight; wait for its deadline"
            )
        has_lock = self._issuing.acquire(timeout=self._context.deadline)
        try:
            self._comms.abort()
        finally:
            if has_lock:
                self._issuing.release()

    def rebuild(self, ranks: Sequence[int]) -> None:
        """New communicators of the library among `ranks` (numbers of the run, not of the
        communicator).

        Operations in flight stay on the old ones, which keep their streams as long as they hang.
        """
        if self._context.rank not in ranks:
            raise Unsupported(f"rank {self._context.rank} is not among the ranks {tuple(ranks)}")
        with self._issuing:
            self._rebuilds += 1
            self._comms.retire()
            self._comms = self._new_comm_set(ranks)

    def close(self) -> None:
        """Take no more operations; does not wait for those in flight."""
        with self._issuing:
            if not self._closed:
                self._closed = True
                self._comms.retire()

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _new_comm_set(self, ranks: Sequence[int]) -> CommSet:
        members = "-".join(str(rank) for rank in ranks)
        name = f"{self.purpose}/{self._rebuilds}/{members}"
        expiry = time.monotonic() + self._context.deadline
        return CommSet(self._context, ranks, name, expiry)

    def _check_move(self, *tensors: Tensor) -> None:
        check_transferable(
            self.capabilities, *tensors, device=self._context.ccl.runtime.device_type
        )
        self._check_known(tensors)

    def _check_sum(self, *tensors: Tensor) -> None:
        check_reducible(self.capabilities, *tensors, device=self._context.ccl.runtime.device_type)
        self._check_known(tensors)

    def _check_known(self, tensors: Sequence[Tensor]) -> None:
        check_device(self._context.device, tensors)
        self._context.ccl.check(tensors)

    def _collective(self, operation: str, launch: Launch, *buffers: Tensor) -> DeviceWork:
        """An operation of all ranks on tensors of equal size. Libraries end an empty one at once,
        even if a rank does not take part, so a barrier replaces it."""
        with self._issuing:
            moves = any(buffer.numel() for buffer in buffers)
            return self._issue(operation, launch if moves else self._comms.barrier(), *buffers)

    def _issue(self, operation: str, launch: Launch, *buffers: Tensor) -> DeviceWork:
        with self._issuing:
            self._check_ready(operation)
            return self._comms.collective(operation, launch, buffers)

    def _message(self, operation: str, pair: tuple[int, int], tensor: Tensor) -> DeviceWork:
        with self._issuing:
            self._check_ready(operation)
            return self._comms.message(operation, pair, as_bytes(tensor))

    def _check_ready(self, operation: str) -> None:
        """Called before anything is launched. Raises `CommunicatorFailed`, and `Unsupported` during
        a capture: a captured operation has no handle that could say whether it has ended."""
        self._check_usable(operation)
        self._context.device.set_current()
        if self._context.ccl.capturing():
            raise Unsupported(
                f"{operation} of {self.purpose!r}: it cannot be captured into a graph"
            )

    def _check_usable(self, operation: str) -> None:
        """Raise `CommunicatorFailed` after a failure, and after closing (clause E2)."""
        failure = "it was closed" if self._closed else self._comms.failure
        if failure is not None:
            raise CommunicatorFailed(f"{operation} of {self.purpose!r}: {failure}")
