"""A communicator over one process group: every call is one call of `torch.distributed`."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, distributed
from torch.distributed import P2POp, ProcessGroup, Store  # type: ignore[attr-defined]

from equipoise.backends.c10d.process_group import close_group, open_group
from equipoise.backends.c10d.work import C10dWork
from equipoise.backends.common.library_communicator import LibraryCommunicator
from equipoise.hal.capabilities import CommunicatorCapabilities, Operation
from equipoise.hal.communicator import Exchange, Rendezvous
from equipoise.hal.errors import Unsupported
from equipoise.hal.support.validation import check_shape

_NAMES: Any = distributed
# Renamed in torch 2.13, where the old names warn.
all_gather_single = getattr(_NAMES, "all_gather_single", None) or _NAMES.all_gather_into_tensor
reduce_scatter_single = (
    getattr(_NAMES, "reduce_scatter_single", None) or _NAMES.reduce_scatter_tensor
)


class C10dCommunicator(LibraryCommunicator[ProcessGroup, C10dWork]):
    """Collectives and point-to-point of a process group, as it has them.

    Nothing is added to it: no check of what the library checks, no lock, no buffer that is kept, no
    time-out but its own. What is checked is the adapter's own: that operations and dtypes are among
    those that it declares, and shapes, because c10d counts elements where the protocol has a
    dimension per rank.

    Args:
        backend: the name that `init_process_group` knows.
        store: where the ranks of this communicator meet.
        purpose: what it is for.
        ranks: numbers in the run of its ranks.
        where: this rank; the deadline becomes the library's own time-out.
        capabilities: what is declared.

    Raises:
        CommunicatorFailed: the library made no group.
    """

    def __init__(
        self,
        backend: str,
        store: Store,
        purpose: str,
        ranks: Sequence[int],
        where: Rendezvous,
        capabilities: CommunicatorCapabilities,
    ) -> None:
        label = f"{purpose}/{tuple(ranks)}"
        rank, size = ranks.index(where.rank), len(ranks)
        super().__init__(
            backend,
            purpose,
            ranks,
            where,
            capabilities,
            lambda: open_group(backend, store, rank, size, where.deadline, label),
        )

    def all_reduce(self, tensor: Tensor) -> C10dWork:
        """`all_reduce`."""
        return self._issue(
            Operation.ALL_REDUCE,
            (tensor,),
            lambda group: [distributed.all_reduce(tensor, group=group, async_op=True)],
        )

    def all_gather(self, out: Tensor, tensor: Tensor) -> C10dWork:
        """`all_gather_single`."""
        check_shape("all_gather", out, (self.size, *tensor.shape))
        return self._issue(
            Operation.ALL_GATHER,
            (out, tensor),
            lambda group: [all_gather_single(flat(out), flat(tensor), group=group, async_op=True)],
        )

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> C10dWork:
        """`reduce_scatter_single`."""
        check_shape("reduce_scatter", tensor, (self.size, *out.shape))
        return self._issue(
            Operation.REDUCE_SCATTER,
            (out, tensor),
            lambda group: [
                reduce_scatter_single(flat(out), flat(tensor), group=group, async_op=True)
            ],
        )

    def broadcast(self, tensor: Tensor, source: int) -> C10dWork:
        """`broadcast`."""
        return self._issue(
            Operation.BROADCAST,
            (tensor,),
            lambda group: [
                distributed.broadcast(tensor, group_src=source, group=group, async_op=True)
            ],
        )

    def all_to_all(self, out: Tensor, tensor: Tensor) -> C10dWork:
        """`all_to_all_single`."""
        check_shape("all_to_all", tensor, (self.size, *tensor.shape[1:]))
        check_shape("all_to_all", out, tuple(tensor.shape))
        return self._issue(
            Operation.ALL_TO_ALL,
            (out, tensor),
            lambda group: [distributed.all_to_all_single(out, tensor, group=group, async_op=True)],
        )

    def all_to_all_uneven(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> C10dWork:
        """`all_to_all_single` with split sizes."""
        check_shape("all_to_all_uneven", out, (sum(receives), *tensor.shape[1:]))
        return self._issue(
            Operation.ALL_TO_ALL_UNEVEN,
            (out, tensor),
            lambda group: [
                distributed.all_to_all_single(
                    out, tensor, list(receives), list(sends), group=group, async_op=True
                )
            ],
        )

    def barrier(self) -> C10dWork:
        """`barrier`."""
        return self._issue(
            Operation.BARRIER, (), lambda group: [distributed.barrier(group=group, async_op=True)]
        )

    def isend(self, tensor: Tensor, destination: int) -> C10dWork:
        """`isend`."""
        return self._issue(
            Operation.POINT_TO_POINT,
            (tensor,),
            lambda group: [distributed.isend(tensor, group=group, group_dst=destination)],
            f"isend to {destination}",
        )

    def irecv(self, tensor: Tensor, source: int) -> C10dWork:
        """`irecv`."""
        return self._issue(
            Operation.POINT_TO_POINT,
            (tensor,),
            lambda group: [distributed.irecv(tensor, group=group, group_src=source)],
            f"irecv from {source}",
        )

    def exchange(self, round: Exchange) -> C10dWork:
        """`batch_isend_irecv`; a round without blobs is no call."""

        def issue(group: ProcessGroup) -> list[Any]:
            receives = [
                P2POp(distributed.irecv, part.blob, group=group, group_peer=part.peer)
                for part in round.receives
            ]
            sends = [
                P2POp(distributed.isend, part.blob, group=group, group_peer=part.peer)
                for part in round.sends
            ]
            return distributed.batch_isend_irecv(receives + sends) if receives + sends else []

        blobs = [part.blob for part in (*round.receives, *round.sends)]
        return self._issue(Operation.EXCHANGE, blobs, issue)

    def abort(self) -> None:
        """`abort` of the group, where it ends anything."""
        if not self.capabilities.abort:
            raise Unsupported("this library's abort does not end what is in flight")
        group: Any = self._open_group("abort")
        group.abort()

    def rebuild(self, ranks: Sequence[int]) -> None:
        """Not in c10d: a group that has failed is destroyed, and another one made."""
        raise Unsupported("torch.distributed does not rebuild a group")

    def _new_work(self, native: Any, label: str) -> C10dWork:
        return C10dWork([work for work in native if work is not None], label, self._deadline)

    def _destroy(self, group: ProcessGroup) -> None:
        close_group(group)


def flat(tensor: Tensor) -> Tensor:
    """Its elements in one dimension; what is not contiguous is for the library to judge."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor
