"""Messages and collectives in transit on the virtual network."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from equipoise.backends.virtual.arena import Bytes
from equipoise.backends.virtual.operation import NetworkHandle, VirtualOperation
from equipoise.backends.virtual.scheduling import in_turn
from equipoise.hal.errors import CommunicatorFailed

if TYPE_CHECKING:
    from equipoise.backends.virtual.network import Network


class InTransit:
    """A transfer or a collective: micro-steps that nothing holds up.

    Args:
        network: forgets it after the last step.
        ranks: numbers, in the world, of those that take part.
        operations: what it belongs to.
    """

    def __init__(
        self, network: "Network", ranks: tuple[int, ...], operations: tuple[VirtualOperation, ...]
    ) -> None:
        self.ranks = ranks
        self.operations = operations
        self._network = network
        self._steps: Iterator[None] = in_turn(self.steps())

    def ready(self) -> bool:
        """Always."""
        return True

    def step(self) -> None:
        """One micro-step."""
        for _ in self._steps:
            return
        self._network.forget(self)

    def cut(self) -> None:
        """It moves no more."""
        self._steps = iter(())
        self._network.forget(self)

    def steps(self) -> Iterator[Callable[[], object]]:
        """The micro-steps in order."""
        raise NotImplementedError


def halves(length: int) -> tuple[slice, ...]:
    """The pieces in which so many bytes are copied."""
    half = (length + 1) // 2
    return (slice(0, half), slice(half, length)) if length else ()


def copy(into: Bytes, source: Bytes, part: slice) -> None:
    """One piece of a copy."""
    into[part] = source[part]


if TYPE_CHECKING:
    from equipoise.backends.virtual.network import Network


class MessageEnd:
    """One end of a message: the rank's buffer, uint8 [n], and the handle of its operation."""

    __slots__ = ("buffer", "native")

    def __init__(self, native: NetworkHandle, buffer: Bytes) -> None:
        self.native = native
        self.buffer = buffer


class MessageTransfer(InTransit):
    """A send and the receive that it met; both ends end when the bytes have arrived."""

    def __init__(
        self, network: "Network", ranks: tuple[int, ...], send: MessageEnd, receive: MessageEnd
    ) -> None:
        super().__init__(network, ranks, (receive.native.operation, send.native.operation))
        self._send = send
        self._receive = receive

    def steps(self) -> Iterator[Callable[[], object]]:
        """The bytes in pieces, then both ends; messages of unequal size fail both ends."""
        into, source = self._receive.buffer, self._send.buffer
        if len(into) != len(source):
            yield self._refuse
            return
        for part in halves(len(source)):
            yield partial(copy, into, source, part)
        yield self._receive.native.end
        yield self._send.native.end

    def _refuse(self) -> None:
        sent_bytes, room = len(self._send.buffer), len(self._receive.buffer)
        for operation in self.operations:
            text = f"{operation.what}: {sent_bytes} bytes were sent where {room} were awaited"
            operation.outbox.withdraw(operation)  # its other messages meet nobody any more
            operation.drop(CommunicatorFailed, text)


if TYPE_CHECKING:
    from equipoise.backends.virtual.network import Network

SUM_DTYPES: dict[torch.dtype, type[np.generic]] = {
    torch.uint8: np.uint8,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.float64: np.float64,
}
"""The element types that are summed."""


class CollectiveKind(StrEnum):
    """What the collective does."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"


@dataclass(slots=True, eq=False)
class Contribution:
    """What one rank brings to a collective.

    Attributes:
        kind: what it takes the collective for.
        source: what is read of it, uint8 [n].
        out: where its result goes, uint8 [m].
        native: the handle of its operation.
        dtype: of the elements, for sums.
        root: the rank whose bytes everybody gets.
        send_bytes: bytes for each rank, of `all_to_all`.
        receive_bytes: bytes from each rank, of `all_to_all`.
        snapshot: what was read.
    """

    kind: CollectiveKind
    source: Bytes
    out: Bytes
    _: KW_ONLY
    native: NetworkHandle
    dtype: torch.dtype = torch.uint8
    root: int = 0
    send_bytes: tuple[int, ...] = ()
    receive_bytes: tuple[int, ...] = ()
    snapshot: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))

    def signature(self) -> tuple[object, ...]:
        """What must be equal on all ranks."""
        if self.kind is CollectiveKind.ALL_TO_ALL:
            return (self.kind,)
        return self.kind, self.dtype, self.root, len(self.source), len(self.out)


def same_collective(shares: Sequence[Contribution]) -> bool:
    """Whether all ranks issued one and the same collective."""
    if len({share.signature() for share in shares}) > 1:
        return False
    return all(
        share.send_bytes[there] == other.receive_bytes[here]
        for here, share in enumerate(shares)
        for there, other in enumerate(shares)
        if share.kind is CollectiveKind.ALL_TO_ALL
    )


class Collective(InTransit):
    """A collective that every rank has come to: its share, by rank of the group."""

    def __init__(
        self, network: "Network", ranks: tuple[int, ...], shares: Sequence[Contribution]
    ) -> None:
        super().__init__(network, ranks, tuple(share.native.operation for share in shares))
        self._shares = shares

    def steps(self) -> Iterator[Callable[[], object]]:
        """Read everything, in pieces; then write each rank's result, in pieces, and end it."""
        for share in self._shares:
            yield from self.reading(share)
        for rank, share in enumerate(self._shares):
            yield from self.writing(rank, share)
            yield share.native.end

    def reading(self, share: Contribution) -> Iterator[Callable[[], object]]:
        """Take what one rank brings."""
        share.snapshot = np.empty_like(share.source)
        for part in halves(len(share.source)):
            yield partial(copy, share.snapshot, share.source, part)

    def writing(self, rank: int, share: Contribution) -> Iterator[Callable[[], object]]:
        """Bring one rank its result."""
        parts = halves(len(share.out))
        result = self.result(rank) if parts else share.out
        for part in parts:
            yield partial(copy, share.out, result, part)

    def result(self, rank: int) -> Bytes:
        """What `rank` gets."""
        match self._shares[rank].kind:
            case CollectiveKind.ALL_REDUCE:
                return self.total(self.addends(rank))
            case CollectiveKind.REDUCE_SCATTER:
                size = len(self._shares[rank].out)
                return self.total(self.addends(rank))[rank * size : (rank + 1) * size]
            case CollectiveKind.BROADCAST:
                return self._shares[self._shares[rank].root].snapshot
            case CollectiveKind.ALL_TO_ALL:
                return np.concatenate([self.block(share, rank) for share in self._shares])
            case _:
                return np.concatenate([share.snapshot for share in self._shares])

    def addends(self, rank: int) -> Sequence[Contribution]:
        """What is added for `rank`, always in the order of the ranks (clause D1)."""
        return self._shares

    def total(self, shares: Sequence[Contribution]) -> Bytes:
        """The sum of what these brought; infinities may cancel out to what is no number."""
        dtype = SUM_DTYPES[shares[0].dtype]
        total = shares[0].snapshot.view(dtype).copy()
        with np.errstate(invalid="ignore"):
            for share in shares[1:]:
                np.add(total, share.snapshot.view(dtype), out=total)
        return total.view(np.uint8)

    def block(self, share: Contribution, rank: int) -> Bytes:
        """What one rank has for another."""
        ends = list(accumulate(share.send_bytes))
        return share.snapshot[ends[rank] - share.send_bytes[rank] : ends[rank]]
