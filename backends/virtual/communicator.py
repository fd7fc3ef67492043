"""The communicator of the virtual network, and its rank's end of a group."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from equipoise.backends.virtual.arena import Bytes, bytes_of
from equipoise.backends.virtual.event import VirtualRecording
from equipoise.backends.virtual.operation import (
    NetworkHandle,
    OutboxItem,
    Pair,
    Post,
    VirtualOperation,
)
from equipoise.backends.virtual.transfer import CollectiveKind, Contribution
from equipoise.backends.virtual.work import DEADLINE, VirtualWork
from equipoise.hal.capabilities import CommunicatorCapabilities
from equipoise.hal.communicator import Exchange, PeerBuffer
from equipoise.hal.errors import CommunicatorFailed, Unsupported
from equipoise.hal.support.validation import (
    check_blob,
    check_links,
    check_rank,
    check_reducible,
    check_rows,
    check_shape,
    check_transferable,
)

if TYPE_CHECKING:
    from equipoise.backends.virtual.fabric import VirtualFabric
    from equipoise.backends.virtual.network import Network
    from equipoise.backends.virtual.world import VirtualWorld


class CommunicatorEndpoint:
    """What every operation of one rank in one group goes through.

    Args:
        fabric: whose it is.
        purpose: what it is for.
        opening: how often this rank had opened that purpose before.
        ranks: numbers of the members in the world, in the order of their ranks here.
    """

    def __init__(
        self, fabric: "VirtualFabric", purpose: str, opening: int, ranks: Sequence[int]
    ) -> None:
        self._fabric = fabric
        self._purpose = purpose
        self._opening = opening
        self._failure: tuple[type[CommunicatorFailed], str] | None = None
        self.rebuilds = 0
        self._join(tuple(ranks))

    @property
    def purpose(self) -> str:
        """What the communicator is for."""
        return self._purpose

    @property
    def rank(self) -> int:
        """This rank's number within the communicator."""
        return self._members.index(self.member)

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self._members)

    @property
    def member(self) -> int:
        """This rank's number in the world."""
        return self._fabric.rank

    @property
    def world(self) -> "VirtualWorld":
        """The world that it is in."""
        return self._fabric.world

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """What the backend declares."""
        return self._fabric.declared

    def abort(self) -> None:
        """End what is in flight with an error."""
        if not self.capabilities.abort:
            raise Unsupported(f"communicator {self._purpose!r} cannot end what is in flight")
        self.fail(CommunicatorFailed, f"{self._purpose!r} was aborted", self.rebuilds)
        self._cut_all("was aborted")

    def rebuild(self, ranks: Sequence[int]) -> None:
        """A new group among `ranks` (numbers of the world, not of the communicator)."""
        if not self.capabilities.rebuild:
            raise Unsupported(f"communicator {self._purpose!r} cannot be built again")
        check_rank("rebuild", self.member, ranks)
        self.outbox.retire()
        self._failure = None
        self.rebuilds += 1
        self._join(tuple(ranks))

    def close(self) -> None:
        """Let what can still end do so; cut the rest; every later call is refused (clause E5)."""
        self.world.until(lambda: not self._pending(), DEADLINE)
        self._failure = (CommunicatorFailed, f"communicator {self._purpose!r} was closed")
        self._cut_all("was closed in flight")
        self.outbox.clear()

    def fail(self, kind: type[CommunicatorFailed], text: str, rebuilds: int) -> None:
        """An operation failed; what is heard of before the last rebuild says nothing of now."""
        if rebuilds == self.rebuilds and self._failure is None:
            self._failure = (kind, text)

    def forget(self, operation: VirtualOperation) -> None:
        """An operation is over: nobody here keeps it any more."""
        self._network.pending.pop(operation, None)

    def may_start(self, item: OutboxItem) -> bool:
        """Whether the first item of the outbox may start."""
        return item.may_start()

    @property
    def _network(self) -> "Network":
        return self.world.network

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _join(self, members: tuple[int, ...]) -> None:
        """Become one of a group that has issued nothing."""
        self._members = members
        self._rounds = 0
        key = (self._purpose, self._opening, self.rebuilds, members)
        self._group = self._network.join_group(key, self.member)
        self.outbox = self.world.parts.outbox(self, self._group)
        self._group.outboxes[self.rank] = self.outbox
        self.world.steppers.append(self.outbox)

    def _build(self, link: Pair) -> None:
        """Links need no building on this network."""

    def _pending(self) -> list[VirtualOperation]:
        return [op for op in self._network.pending if op.communicator is self]

    def _cut_all(self, how: str) -> None:
        for operation in self._pending():
            if not operation.over:
                self._network.cut(operation, CommunicatorFailed, f"{operation.what} {how}")

    def _next_round(self) -> int:
        """The number of the next collective: all ranks issue them in one order."""
        self._rounds += 1
        return self._rounds

    def _issue(
        self,
        label: str,
        after: VirtualRecording | None,
        post: Post,
        tensors: Sequence[Tensor],
        peers: frozenset[int],
        links: tuple[Pair, ...],
    ) -> VirtualWork:
        """Put an operation that was admitted into the outbox; the network does the rest."""
        parts = self.world.parts
        operation = parts.operation(self, label, tensors, peers, after, post, links)
        self._network.pending[operation] = None
        self.outbox.push(operation)
        self.world.submitted()
        return parts.work(operation)

    def _admit(self, label: str) -> VirtualRecording | None:
        """Refuse an operation before any side effect; the point after which it starts."""
        self._check_usable(label)
        return self._after()

    def _check_usable(self, label: str) -> None:
        """Raise `CommunicatorFailed` after a failure (clause E2)."""
        if self._failure is not None:
            raise CommunicatorFailed(f"{label} of {self._purpose!r}: {self._failure[1]}")

    def _after(self) -> VirtualRecording | None:
        """The point of the current stream after which an operation starts (clause X6)."""
        device = self.world.device(self.member)
        stream = device.issuing()
        if stream is None or not self.capabilities.stream_ordered:
            return None
        if stream.capturing:
            raise Unsupported("an operation of the virtual network cannot be captured")
        event = device.event()
        stream.record(event)
        return event.latest()


NOTHING: Bytes = np.empty(0, np.uint8)


class VirtualCommunicator(CommunicatorEndpoint):
    """Each method checks its arguments, and describes its operation to the network."""

    def all_reduce(self, tensor: Tensor) -> VirtualWork:
        """Sum over ranks, in place."""
        check_reducible(self.capabilities, tensor)
        view = bytes_of(tensor)
        make = partial(Contribution, CollectiveKind.ALL_REDUCE, view, view, dtype=tensor.dtype)
        return self._collective(make, tensor)

    def all_gather(self, out: Tensor, tensor: Tensor) -> VirtualWork:
        """Every rank's tensor, stacked."""
        check_transferable(self.capabilities, out, tensor)
        check_shape("all_gather", out, (self.size, *tensor.shape))
        make = partial(Contribution, CollectiveKind.ALL_GATHER, bytes_of(tensor), bytes_of(out))
        return self._collective(make, out, tensor)

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> VirtualWork:
        """This rank's part of the sum."""
        check_reducible(self.capabilities, out, tensor)
        check_shape("reduce_scatter", tensor, (self.size, *out.shape))
        views = bytes_of(tensor), bytes_of(out)
        make = partial(Contribution, CollectiveKind.REDUCE_SCATTER, *views, dtype=tensor.dtype)
        return self._collective(make, out, tensor)

    def broadcast(self, tensor: Tensor, source: int) -> VirtualWork:
        """Everybody receives rank `source`'s tensor."""
        check_transferable(self.capabilities, tensor)
        check_rank("broadcast", source, range(self.size))
        view = bytes_of(tensor)
        return self._collective(
            partial(Contribution, CollectiveKind.BROADCAST, view, view, root=source), tensor
        )

    def all_to_all(self, out: Tensor, tensor: Tensor) -> VirtualWork:
        """Even blocks."""
        check_transferable(self.capabilities, out, tensor)
        check_shape("all_to_all", tensor, (self.size, *tensor.shape[1:]))
        check_shape("all_to_all", out, tuple(tensor.shape))
        return self._rows(out, tensor, [1] * self.size, [1] * self.size)

    def all_to_all_uneven(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> VirtualWork:
        """Blocks of given row counts."""
        check_transferable(self.capabilities, out, tensor)
        check_rows("all_to_all_uneven", receives, self.size)
        check_rows("all_to_all_uneven", sends, self.size)
        check_shape("all_to_all_uneven", out, (sum(receives), *tensor.shape[1:]))
        check_shape("all_to_all_uneven", tensor, (sum(sends), *out.shape[1:]))
        return self._rows(out, tensor, receives, sends)

    def barrier(self) -> VirtualWork:
        """Ends after every rank has issued it."""
        return self._collective(partial(Contribution, CollectiveKind.BARRIER, NOTHING, NOTHING))

    def isend(self, tensor: Tensor, destination: int) -> VirtualWork:
        """Send to one rank."""
        check_transferable(self.capabilities, tensor)
        check_rank("isend", destination, self._peers())
        return self._messages(f"isend to {destination}", sends=[(destination, tensor)], receives=[])

    def irecv(self, tensor: Tensor, source: int) -> VirtualWork:
        """Receive from one rank."""
        check_transferable(self.capabilities, tensor)
        check_rank("irecv", source, self._peers())
        return self._messages(f"irecv from {source}", sends=[], receives=[(source, tensor)])

    def exchange(self, round: Exchange) -> VirtualWork:
        """One round of blobs; empty blobs do not travel."""
        for buffer in (*round.sends, *round.receives):
            check_rank("exchange", buffer.peer, self._peers())
            check_blob(buffer.blob)
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
        send_bytes, receive_bytes = (
            tuple(n * width for n in sends),
            tuple(n * width for n in receives),
        )
        views = bytes_of(tensor), bytes_of(out)
        make = partial(
            Contribution,
            CollectiveKind.ALL_TO_ALL,
            *views,
            send_bytes=send_bytes,
            receive_bytes=receive_bytes,
        )
        return self._collective(make, out, tensor)

    def _collective(self, make: partial[Contribution], *tensors: Tensor) -> VirtualWork:
        kind: CollectiveKind = make.args[0]
        after = self._admit(kind)
        index, group, rank = self._next_round(), self._group, self.rank

        def post(operation: VirtualOperation) -> Sequence[NetworkHandle]:
            native = NetworkHandle(operation)
            group.join(index, rank, make(native=native))
            return [native]

        other_members = frozenset(self._members) - {self.member}
        return self._issue(kind, after, post, tensors, other_members, ())

    def _messages(
        self,
        label: str,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
    ) -> VirtualWork:
        """Messages of one operation; receives are posted before sends."""
        group, here = self._group, self.rank
        incoming = [(bytes_of(tensor), (peer, here)) for peer, tensor in receives]
        outgoing = [(bytes_of(tensor), (here, peer)) for peer, tensor in sends]

        def post(operation: VirtualOperation) -> Sequence[NetworkHandle]:
            natives = group.batch(operation, len(incoming) + len(outgoing))
            for place, (buffer, pair) in enumerate((*incoming, *outgoing)):
                enqueue = group.receive if place < len(incoming) else group.send
                enqueue(natives[place % len(natives)], buffer, pair)
            return natives

        both = (*receives, *sends)
        peers = frozenset(self._members[peer] for peer, _ in both)
        links = {(min(here, peer), max(here, peer)) for peer, _ in both}
        after = self._admit(label)
        return self._issue(label, after, post, [t for _, t in both], peers, tuple(sorted(links)))


def _full(buffers: Sequence[PeerBuffer]) -> list[tuple[int, Tensor]]:
    return [(buffer.peer, buffer.blob) for buffer in buffers if buffer.blob.numel()]
