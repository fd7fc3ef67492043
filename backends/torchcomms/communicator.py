"""A communicator over one TorchComm: every call is one call of torchcomms."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from equipoise.backends.common.bounded_wait import poll
from equipoise.backends.common.library_communicator import LibraryCommunicator
from equipoise.backends.common.library_errors import wait_error
from equipoise.hal.capabilities import CommunicatorCapabilities, Operation
from equipoise.hal.communicator import Exchange, Rendezvous
from equipoise.hal.errors import ResultPending, Unsupported
from equipoise.hal.stream import Stream
from equipoise.hal.support.validation import check_shape

_OPENING = threading.Lock()
"""Held while the environment says the rank and the size of a group that is being made."""


class TorchCommsWork:
    """One operation; holds the library's handle, nothing else.

    Args:
        native: the library's handle.
        label: the operation and the purpose of its communicator, for errors.
        timeout: seconds; the library's own time-out.
    """

    def __init__(self, native: Any, label: str, timeout: float) -> None:
        self._native = native
        self._label = label
        self._expiry = time.monotonic() + timeout

    def done(self) -> bool:
        """`is_completed`."""
        return bool(self._native.is_completed())

    def wait(self, stream: Stream) -> None:
        """`wait`, launched: on a device it orders the stream, on the CPU it blocks it."""
        if self.done():  # so its wait returns, or raises what the operation has failed with (E10)
            with stream.current():
                self._wait(self._native.wait)
            return
        stream.launch(lambda: self._wait(self._native.wait))

    def result(self, timeout: float) -> None:
        """`wait_blocking`; torchcomms has no wait with a time-out, so a shorter one polls."""
        ends_first = time.monotonic() + timeout >= self._expiry
        if not ends_first and not poll(self.done, timeout):
            raise ResultPending(f"{self._label} has not ended within {timeout:g} s")
        self._wait(self._native.wait_blocking)

    def cancel(self) -> None:
        """Not in torchcomms."""
        raise Unsupported(f"{self._label}: torchcomms cannot cancel an operation")

    def _wait(self, wait: Callable[[], object]) -> None:
        try:
            wait()
        except Exception as error:
            raise wait_error(self._label, error, soft=False) from error


class TorchCommsCommunicator(LibraryCommunicator[Any, TorchCommsWork]):
    """Collectives and point-to-point of a TorchComm, as it has them; nothing is added to it.

    Args:
        library: the module.
        backend: the name that `new_comm` knows.
        device: the type of its devices.
        store: where the ranks of this communicator meet.
        purpose: what it is for.
        ranks: numbers in the run of its ranks.
        where: this rank; the deadline becomes the library's own time-out.
        capabilities: what is declared.

    Raises:
        CommunicatorFailed: the library made no communicator.
    """

    def __init__(
        self,
        library: Any,
        backend: str,
        device: str,
        store: Store,
        purpose: str,
        ranks: Sequence[int],
        where: Rendezvous,
        capabilities: CommunicatorCapabilities,
    ) -> None:
        self._sum = library.ReduceOp.SUM

        def open_group() -> Any:
            with _OPENING:
                os.environ["TORCHCOMM_RANK"] = str(ranks.index(where.rank))
                os.environ["TORCHCOMM_SIZE"] = str(len(ranks))
                return library.new_comm(
                    backend,
                    torch.device(device),
                    name=f"{purpose}/{'-'.join(map(str, ranks))}",
                    abort_process_on_timeout_or_error=False,
                    timeout=timedelta(seconds=where.deadline),
                    store=store,
                )

        super().__init__(backend, purpose, ranks, where, capabilities, open_group)

    def all_reduce(self, tensor: Tensor) -> TorchCommsWork:
        """`all_reduce`."""
        return self._issue(
            Operation.ALL_REDUCE,
            (tensor,),
            lambda comm: comm.all_reduce(tensor, self._sum, async_op=True),
        )

    def all_gather(self, out: Tensor, tensor: Tensor) -> TorchCommsWork:
        """`all_gather_single`."""
        check_shape("all_gather", out, (self.size, *tensor.shape))
        return self._issue(
            Operation.ALL_GATHER,
            (out, tensor),
            lambda comm: comm.all_gather_single(out, tensor, async_op=True),
        )

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> TorchCommsWork:
        """`reduce_scatter_single`."""
        check_shape("reduce_scatter", tensor, (self.size, *out.shape))
        return self._issue(
            Operation.REDUCE_SCATTER,
            (out, tensor),
            lambda comm: comm.reduce_scatter_single(out, tensor, self._sum, async_op=True),
        )

    def broadcast(self, tensor: Tensor, source: int) -> TorchCommsWork:
        """`broadcast`."""
        return self._issue(
            Operation.BROADCAST,
            (tensor,),
            lambda comm: comm.broadcast(tensor, source, async_op=True),
        )

    def all_to_all(self, out: Tensor, tensor: Tensor) -> TorchCommsWork:
        """`all_to_all_single`."""
        check_shape("all_to_all", tensor, (self.size, *tensor.shape[1:]))
        check_shape("all_to_all", out, tuple(tensor.shape))
        return self._issue(
            Operation.ALL_TO_ALL,
            (out, tensor),
            lambda comm: comm.all_to_all_single(out, tensor, async_op=True),
        )

    def all_to_all_uneven(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> TorchCommsWork:
        """`all_to_all_v_single`."""
        check_shape("all_to_all_uneven", out, (sum(receives), *tensor.shape[1:]))
        return self._issue(
            Operation.ALL_TO_ALL_UNEVEN,
            (out, tensor),
            lambda comm: comm.all_to_all_v_single(
                out, tensor, list(receives), list(sends), async_op=True
            ),
        )

    def barrier(self) -> TorchCommsWork:
        """`barrier`."""
        return self._issue(Operation.BARRIER, (), lambda comm: comm.barrier(async_op=True))

    def isend(self, tensor: Tensor, destination: int) -> TorchCommsWork:
        """`send`."""
        return self._issue(
            Operation.POINT_TO_POINT,
            (tensor,),
            lambda comm: comm.send(tensor, destination, async_op=True),
            f"isend to {destination}",
        )

    def irecv(self, tensor: Tensor, source: int) -> TorchCommsWork:
        """`recv`."""
        return self._issue(
            Operation.POINT_TO_POINT,
            (tensor,),
            lambda comm: comm.recv(tensor, source, async_op=True),
            f"irecv from {source}",
        )

    def exchange(self, round: Exchange) -> TorchCommsWork:
        """A batch of `recv` and `send`."""

        def issue(comm: Any) -> Any:
            batch = comm.batch_op_create()
            for part in round.receives:
                batch.recv(part.blob, part.peer)
            for part in round.sends:
                batch.send(part.blob, part.peer)
            return batch.issue(async_op=True)

        blobs = [part.blob for part in (*round.receives, *round.sends)]
        return self._issue(Operation.EXCHANGE, blobs, issue)

    def abort(self) -> None:
        """`abort`, where the backend says that it has it."""
        comm = self._open_group("abort")
        if not (self.capabilities.abort and comm.is_abort_supported()):
            raise Unsupported("this backend of torchcomms does not support abort")
        comm.abort()

    def rebuild(self, ranks: Sequence[int]) -> None:
        """Not judged: `reconfigure` needs handles that the ranks exchange by means of their own."""
        raise Unsupported("torchcomms' reconfigure is not used")

    def _new_work(self, native: Any, label: str) -> TorchCommsWork:
        return TorchCommsWork(native, label, self._deadline)

    def _destroy(self, group: Any) -> None:
        group.finalize()
