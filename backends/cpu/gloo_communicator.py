"""A communicator over one gloo process group of its own."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from math import prod
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from equipoise.backends.cpu.gloo_group import GlooGroup, GlooOperation, make_gloo_group
from equipoise.backends.cpu.gloo_waiters import WaiterThreads
from equipoise.backends.cpu.gloo_work import MIN_WAIT, GlooWork
from equipoise.hal.capabilities import CommunicatorCapabilities
from equipoise.hal.communicator import Exchange
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

GLOO_CAPABILITIES = CommunicatorCapabilities(
    stream_ordered=False,
    independent_groups=True,
    abort=False,  # neither the group's nor the backend's abort releases a waiter
    rebuild=True,
    shared_devices=True,
    dtypes=frozenset(
        {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
        | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
        | {torch.float8_e4m3fn, torch.float8_e5m2}
    ),
    reductions=frozenset({torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64}),
)


T = TypeVar("T")


class GlooCommunicator:
    """Collectives and point-to-point for one purpose.

    Data travels as bytes, so every declared dtype moves; only sums depend on the type. The
    group's time-out is the operations' deadline: gloo enforces it, and breaks the group. Threads
    may share it: an operation is issued and entered among those in flight under one lock (P6).
    """

    capabilities = GLOO_CAPABILITIES

    def __init__(
        self, store: Store, purpose: str, ranks: Sequence[int], rank: int, deadline: float
    ):
        self._store = store
        self._purpose = purpose
        self._global_rank = rank
        self._deadline = deadline
        self._rebuilds = 0
        self._failure: CommunicatorFailed | None = None
        self._issuing = threading.RLock()
        self._closed = False
        self._waiters = WaiterThreads(purpose)
        self._join(tuple(ranks))

    @property
    def purpose(self) -> str:
        """What the communicator is for."""
        return self._purpose

    @property
    def closed(self) -> bool:
        """Whether it takes no more operations for ever."""
        return self._closed

    @property
    def rank(self) -> int:
        """This rank's number within the communicator."""
        return self._ranks.index(self._global_rank)

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self._ranks)

    def all_reduce(self, tensor: Tensor) -> GlooWork:
        """Sum over ranks, in place."""
        check_reducible(self.capabilities, tensor)
        return self._collective("all_reduce", lambda g: g.allreduce([tensor]), tensor)

    def all_gather(self, out: Tensor, tensor: Tensor) -> GlooWork:
        """Every rank's tensor, stacked."""
        check_transferable(self.capabilities, out, tensor)
        check_shape("all_gather", out, (self.size, *tensor.shape))
        if tensor.data_ptr() != out[self.rank].data_ptr():  # its own place is where it belongs
            check_apart("all_gather", out, tensor)
        wide, narrow = _bytes(out), _bytes(tensor)
        return self._collective(
            "all_gather", lambda g: g._allgather_base(wide, narrow), out, tensor
        )

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> GlooWork:
        """This rank's part of the sum."""
        check_reducible(self.capabilities, out, tensor)
        check_shape("reduce_scatter", tensor, (self.size, *out.shape))
        flat, parts = out.view(-1), tensor.view(-1)
        return self._bundle(
            "reduce_scatter", lambda g: [g._reduce_scatter_base(flat, parts)], out, tensor
        )

    def broadcast(self, tensor: Tensor, source: int) -> GlooWork:
        """Everybody receives rank `source`'s tensor."""
        check_transferable(self.capabilities, tensor)
        check_rank("broadcast", source, range(self.size))
        view = _bytes(tensor)
        return self._collective("broadcast", lambda g: g.broadcast(view, source), tensor)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> GlooWork:
        """Even blocks."""
        check_transferable(self.capabilities, out, tensor)
        check_shape("all_to_all", tensor, (self.size, *tensor.shape[1:]))
        check_shape("all_to_all", out, tuple(tensor.shape))
        check_apart("all_to_all", out, tensor)
        into, source = _bytes(out), _bytes(tensor)
        return self._collective(
            "all_to_all", lambda g: g.alltoall_base(into, source, [], []), out, tensor
        )

    def all_to_all_uneven(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> GlooWork:
        """Blocks of given row counts."""
        check_transferable(self.capabilities, out, tensor)
        check_rows("all_to_all_uneven", receives, self.size)
        check_rows("all_to_all_uneven", sends, self.size)
        width = prod(tensor.shape[1:]) * tensor.element_size()
        check_shape("all_to_all_uneven", out, (sum(receives), *tensor.shape[1:]))
        check_shape("all_to_all_uneven", tensor, (sum(sends), *out.shape[1:]))
        check_apart("all_to_all_uneven", out, tensor)
        into, source = _bytes(out), _bytes(tensor)
        receive_bytes, send_bytes = [n * width for n in receives], [n * width for n in sends]
        return self._collective(
            "all_to_all",
            lambda g: g.alltoall_base(into, source, receive_bytes, send_bytes),
            out,
            tensor,
        )

    def barrier(self) -> GlooWork:
        """Ends after every rank has issued it."""
        return self._collective("barrier", lambda g: g.barrier())

    def isend(self, tensor: Tensor, destination: int) -> GlooWork:
        """Send to one rank."""
        check_transferable(self.capabilities, tensor)
        view = _bytes(tensor)
        operation = f"isend to {destination}"
        check_rank(operation, destination, self._peers())
        return self._message(operation, lambda g: g.send([view], destination, 0), tensor)

    def irecv(self, tensor: Tensor, source: int) -> GlooWork:
        """Receive from one rank."""
        check_transferable(self.capabilities, tensor)
        view = _bytes(tensor)
        operation = f"irecv from {source}"
        check_rank(operation, source, self._peers())
        return self._message(operation, lambda g: g.recv([view], source, 0), tensor)

    def exchange(self, round: Exchange) -> GlooWork:
        """One round of blobs; empty blobs do not travel."""
        for buffer in (*round.sends, *round.receives):
            check_rank("exchange", buffer.peer, self._peers())
            check_blob(buffer.blob)
        sends = [p for p in round.sends if p.blob.numel()]
        receives = [p for p in round.receives if p.blob.numel()]
        blobs = [p.blob for p in (*sends, *receives)]

        def issue(group: GlooGroup) -> list[GlooOperation]:
            receive_bytes = [group.recv([_bytes(p.blob)], p.peer, 0) for p in receives]
            return receive_bytes + [group.send([_bytes(p.blob)], p.peer, 0) for p in sends]

        return self._bundle("exchange", issue, *blobs)

    def warm(self, links: Sequence[tuple[int, int]]) -> None:
        """Nothing to build: gloo links every pair when the group is made."""
        check_links(links, self.size)
        self._refuse_failed("warm")

    def abort(self) -> None:
        """Not possible with gloo."""
        raise Unsupported("gloo cannot end an operation in flight; wait for its deadline")

    def rebuild(self, ranks: Sequence[int]) -> None:
        """A new group among `ranks` (numbers of the run, not of the communicator)."""
        if self._global_rank not in ranks:
            raise Unsupported(f"rank {self._global_rank} is not among the ranks {tuple(ranks)}")
        with self._issuing:
            self._rebuilds += 1
            self._join(tuple(ranks))

    def close(self) -> None:
        """Let go of the group now, or when the last operation in flight has ended."""
        with self._issuing:
            self._closed = True
            self._failure = CommunicatorFailed(f"communicator {self._purpose!r} was closed")
            for work in list(self._inflight):
                work.watch()  # nobody else may ever ask whether it has ended
            self._release()

    def _release(self) -> None:
        """Let go of the group of a closed communicator when nothing is in flight any more."""
        if not self._closed:
            return  # without the lock, which a rebuild may hold for long
        with self._issuing:
            self._reap()
            if not self._inflight:
                self._waiters.close()
                vars(self).pop("_group", None)  # absent at a second close

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _join(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._failure = CommunicatorFailed(f"communicator {self._purpose!r} was not built")
        self._inflight: dict[GlooWork, Callable[[], bool] | None] = {}
        self._waiters.close()
        members = "-".join(str(rank) for rank in ranks)
        prefix = f"{self._purpose}/{self._rebuilds}/{members}"
        store = PrefixStore(prefix, self._store)
        self._group = make_gloo_group(store, self.rank, self.size, self._deadline)
        self._failure = None

    def _collective(
        self, operation: str, issue: Callable[[GlooGroup], GlooOperation], *buffers: Tensor
    ) -> GlooWork:
        with self._issuing:
            native = self._issue(operation, issue)
            work = self._work([native], operation, buffers)
            self._inflight[work] = lambda: work.poll(native.is_completed)
        return work

    def _message(
        self, operation: str, issue: Callable[[GlooGroup], GlooOperation], tensor: Tensor
    ) -> GlooWork:
        """One message; `operation` names its direction and its peer."""
        with self._issuing:
            work = self._work([self._issue(operation, issue)], operation, (tensor,))
            self._inflight[work] = None  # whoever waits for it forgets it
            work.watch(
                partial(self._waiters.put, operation)
            )  # in the order in which they are issued
        return work

    def _bundle(
        self, operation: str, issue: Callable[[GlooGroup], list[GlooOperation]], *buffers: Tensor
    ) -> GlooWork:
        with self._issuing:
            natives = self._issue(operation, issue)
            work = self._work(natives, operation, buffers)
            self._inflight[work] = work.done
        work.watch()  # gloo's messages and reduce_scatter never complete unless waited for
        return work

    def _issue(self, operation: str, issue: Callable[[GlooGroup], T]) -> T:
        self._reap()
        self._refuse_failed(operation)
        try:
            return issue(self._group)
        except RuntimeError as error:
            self._failure = CommunicatorFailed(f"{operation} of {self._purpose!r}: {error}")
            # Not the kept one: its traceback would keep the frames, and with them the tensors.
            raise CommunicatorFailed(str(self._failure)) from error

    def _refuse_failed(self, operation: str) -> None:
        if self._failure is not None:
            raise CommunicatorFailed(f"{operation} of {self._purpose!r}: {self._failure}")

    def _work(
        self, natives: list[GlooOperation], operation: str, buffers: Sequence[Tensor]
    ) -> GlooWork:
        def finish(seconds: float) -> None:
            # Gloo's own time-out is per message, and a collective is many: a peer that trickles
            # would never pass it. This one is per operation.
            expiry = time.monotonic() + seconds
            for native in natives:
                native.wait(timedelta(seconds=max(expiry - time.monotonic(), MIN_WAIT)))

        rebuilds = self._rebuilds

        def failed(failure: CommunicatorFailed) -> None:
            # What ends late, after a rebuild, says nothing about the new group.
            if rebuilds == self._rebuilds:
                self._failure = self._failure or failure

        label = f"{operation} of {self._purpose!r}"
        on_end = partial(self._forget, self._inflight)
        return GlooWork(finish, buffers, label, self._deadline, failed, on_end)

    def _reap(self) -> None:
        """Look for what has ended; whatever is in flight keeps its buffers, dropped or not."""
        for poll_work in list(self._inflight.values()):  # whole: waiters take what has ended out
            if poll_work is not None:
                poll_work()

    def _forget(self, inflight: dict[GlooWork, Callable[[], bool] | None], work: GlooWork) -> None:
        """It has ended: gloo's own handle, which keeps its tensors, goes at once."""
        inflight.pop(work, None)
        self._release()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
