"""Checked mode: ranks compare what they are about to issue before any operation starts.

Collectives are compared by all members of the communicator, a send and its receive by the two ranks
of the pair, both through ballots on the control plane. A mismatch raises `OrderMismatch` and
nothing is started.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod

from torch import Tensor

from equipoise.hal.capabilities import CommunicatorCapabilities
from equipoise.hal.communicator import Communicator, Exchange, PeerBuffer
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import BallotIncomplete, OrderMismatch
from equipoise.hal.stream import Stream
from equipoise.hal.work import Work


@dataclass(frozen=True, kw_only=True)
class OperationSignature:
    """One operation of one rank.

    Attributes:
        epoch: as the rank's owner counts them.
        kind: the operation, with a root where it has one.
        elements: of the part that is equal on all ranks.
        dtype: of the elements.
        sends: rows or bytes to each rank of the group; empty for operations that divide evenly.
        receives: the same from each rank.
    """

    epoch: int
    kind: str
    elements: int
    dtype: str
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        """As a ballot."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, ballot: bytes) -> "OperationSignature":
        """From a ballot."""
        fields = json.loads(ballot)
        sends, receives = tuple(fields.pop("sends")), tuple(fields.pop("receives"))
        return cls(**fields, sends=sends, receives=receives)

    @property
    def common(self) -> tuple[int, str, int, str]:
        """What must be the same on every rank."""
        return self.epoch, self.kind, self.elements, self.dtype

    def __str__(self) -> str:
        text = f"{self.kind} of {self.elements} x {self.dtype} in epoch {self.epoch}"
        if self.sends or self.receives:
            text += f" (sends {list(self.sends)}, receives {list(self.receives)})"
        return text


def operation_signature(epoch: int, kind: str, tensor: Tensor) -> OperationSignature:
    """An operation on a tensor that is equally large on every rank."""
    return OperationSignature(
        epoch=epoch, kind=kind, elements=tensor.numel(), dtype=str(tensor.dtype)
    )


def operations_match(operations: Sequence[OperationSignature]) -> bool:
    """Whether all ranks issued the same operation, and each expects what its peers send."""
    if len({operation.common for operation in operations}) > 1:
        return False
    sends = [list(operation.sends) for operation in operations]
    receives = [list(operation.receives) for operation in operations]
    return sends == [list(column) for column in zip(*receives, strict=False)] or not any(
        (*sends, *receives)
    )


def describe_operations(operations: Sequence[OperationSignature], ranks: Sequence[int]) -> str:
    """The operation of each rank as text; `ranks` are numbers of the run."""
    return "; ".join(
        f"rank {rank} issued {operation}" for rank, operation in zip(ranks, operations, strict=True)
    )


@dataclass(frozen=True)
class P2PCheck:
    """The n-th message from one rank to another.

    Attributes:
        control: carries both ends' ballots.
        question: the question that both ends cast a ballot on.
        ranks: sender and receiver, numbers of the run.
    """

    control: ControlPlane
    question: str
    ranks: tuple[int, int]

    def cast(self, operation: OperationSignature) -> None:
        """Publish what this end issues."""
        self.control.cast(self.question, operation.to_bytes())

    def mismatch(self, timeout: float) -> OrderMismatch | None:
        """The mismatch between the two ends; None when they match.

        Raises `BallotIncomplete` when the peer has not issued its end within `timeout` seconds.
        """
        ballots = self.control.collect(self.question, timeout, self.ranks)
        ends = [OperationSignature.from_bytes(ballot) for ballot in ballots]
        if ends[0].common == ends[1].common:
            return None
        return OrderMismatch(f"{self.question}: {describe_operations(ends, self.ranks)}")


class CheckedWork:
    """A point-to-point operation whose two ends are compared when its result is asked for.

    A mismatch cancels the operation, which fails its communicator: no later operation of this
    pair would match (P2).

    Args:
        inner: the operation itself.
        check: compares both ends; the ballot of this end has been cast.
        deadline: seconds from now until the operation fails by itself.
    """

    def __init__(self, inner: Work, check: P2PCheck, deadline: float) -> None:
        self._inner = inner
        self._check: P2PCheck | None = check
        self._expiry = time.monotonic() + deadline
        self._mismatch: OrderMismatch | None = None

    def done(self) -> bool:
        """Whether it has ended; the ends have been compared by then."""
        if not self._inner.done():
            return self._mismatch is not None
        self._compare(0.0)
        return True

    def wait(self, stream: Stream) -> None:
        """Order `stream` after the operation; a mismatch shows in `done` and `result`."""
        self._inner.wait(stream)

    def result(self, timeout: float) -> None:
        """Block until the end. Raises `OrderMismatch` besides what any operation raises."""
        expiry = time.monotonic() + timeout
        # An operation that fails by itself does so at its deadline: no ballot is awaited longer.
        self._compare(max(min(timeout, self._expiry - time.monotonic()), 0.0))
        if self._mismatch is not None:
            raise self._mismatch
        self._inner.result(max(expiry - time.monotonic(), 0.0))

    def cancel(self) -> None:
        """Stop waiting."""
        self._inner.cancel()

    def _compare(self, timeout: float) -> None:
        check = self._check
        if check is None:
            return
        try:
            self._mismatch = check.mismatch(timeout)
        except BallotIncomplete:
            return  # `result` of the operation itself reports how it ended
        self._check = None
        if self._mismatch is not None:
            self._inner.cancel()


PROCEED = b"go"
TIMED_OUT = b"given up"


class CheckedCommunicator:
    """A communicator that raises where another would hang (clause C7).

    Collectives and exchange rounds first cast a ballot that describes them, under a sequence
    number; where the ranks differ, every rank raises `OrderMismatch`, which names what each issued,
    and nothing starts. `BallotIncomplete` names a rank that does not arrive within the deadline,
    and the operation then starts on no rank, not even on one that arrives later.

    Sends and receives do not wait for each other at the call (P1): they are compared there if the
    peer was first, else when the result is asked for.

    It is meant for debugging: an operation costs several round trips to the store, which keeps
    every ballot.

    Args:
        communicator: does the work.
        control: carries the ballots.
        epoch: part of every ballot; may be set at any time.
        deadline: seconds to wait for the peers, and after which operations fail by themselves.
        ranks: members of the communicator, numbers of the run; all ranks by default.
    """

    def __init__(
        self,
        communicator: Communicator,
        control: ControlPlane,
        epoch: int,
        deadline: float,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.epoch = epoch
        self._inner = communicator
        self._control = control
        self._deadline = deadline
        self._rebuilds = 0
        self._collective = threading.Lock()
        self._pairwise = threading.Lock()
        self._join(range(control.size) if ranks is None else ranks)

    @property
    def purpose(self) -> str:
        """What the communicator is for."""
        return self._inner.purpose

    @property
    def rank(self) -> int:
        """This rank."""
        return self._inner.rank

    @property
    def size(self) -> int:
        """How many ranks."""
        return self._inner.size

    @property
    def capabilities(self) -> CommunicatorCapabilities:
        """What it can do."""
        return self._inner.capabilities

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum over ranks, in place."""
        own_signature = operation_signature(self.epoch, "all_reduce", tensor)
        return self._start_if_all_match(own_signature, lambda: self._inner.all_reduce(tensor))

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """Every rank's tensor."""
        own_signature = operation_signature(self.epoch, "all_gather", tensor)
        return self._start_if_all_match(own_signature, lambda: self._inner.all_gather(out, tensor))

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> Work:
        """This rank's part of the sum."""
        own_signature = operation_signature(self.epoch, "reduce_scatter", out)
        return self._start_if_all_match(
            own_signature, lambda: self._inner.reduce_scatter(out, tensor)
        )

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Copy one rank's tensor to all others."""
        own_signature = operation_signature(self.epoch, f"broadcast from {source}", tensor)
        return self._start_if_all_match(
            own_signature, lambda: self._inner.broadcast(tensor, source)
        )

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Work:
        """Even blocks."""
        own_signature = operation_signature(self.epoch, "all_to_all", tensor)
        return self._start_if_all_match(own_signature, lambda: self._inner.all_to_all(out, tensor))

    def all_to_all_uneven(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> Work:
        """Blocks of the given row counts; a rank must expect what its peer sends."""
        own_signature = OperationSignature(
            epoch=self.epoch,
            kind="all_to_all_uneven",
            elements=prod(tensor.shape[1:]),
            dtype=str(tensor.dtype),
            sends=tuple(sends),
            receives=tuple(receives),
        )
        return self._start_if_all_match(
            own_signature, lambda: self._inner.all_to_all_uneven(out, tensor, receives, sends)
        )

    def barrier(self) -> Work:
        """Ends after every rank has issued it."""
        own_signature = OperationSignature(
            epoch=self.epoch, kind="barrier", elements=0, dtype="nothing"
        )
        return self._start_if_all_match(own_signature, self._inner.barrier)

    def exchange(self, round: Exchange) -> Work:
        """One round of blobs; every rank takes part in every round, even without blobs."""
        own_signature = OperationSignature(
            epoch=self.epoch,
            kind="exchange",
            elements=1,
            dtype="torch.uint8",
            sends=self._by_rank(round.sends),
            receives=self._by_rank(round.receives),
        )
        return self._start_if_all_match(own_signature, lambda: self._inner.exchange(round))

    def isend(self, tensor: Tensor, destination: int) -> Work:
        """Send to one rank."""
        pair = (self.rank, destination)
        return self._start_checked_p2p(pair, tensor, lambda: self._inner.isend(tensor, destination))

    def irecv(self, tensor: Tensor, source: int) -> Work:
        """Receive from one rank."""
        pair = (source, self.rank)
        return self._start_checked_p2p(pair, tensor, lambda: self._inner.irecv(tensor, source))

    def warm(self, links: Sequence[tuple[int, int]]) -> None:
        """Build links."""
        self._inner.warm(links)

    def abort(self) -> None:
        """End what is in flight."""
        self._inner.abort()

    def rebuild(self, ranks: Sequence[int]) -> None:
        """Continue among `ranks`; sequence numbers restart."""
        with self._collective, self._pairwise:
            self._inner.rebuild(ranks)
            self._rebuilds += 1
            self._join(ranks)

    def close(self) -> None:
        """Release all resources."""
        self._inner.close()

    def _join(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        members = "-".join(map(str, self._ranks))
        self._label = f"checked/{self.purpose}/{members}/{self._rebuilds}"
        self._sequence = 0
        self._messages: Counter[tuple[int, int]] = Counter()

    def _by_rank(self, buffers: Sequence[PeerBuffer]) -> tuple[int, ...]:
        sizes = {buffer.peer: buffer.blob.numel() for buffer in buffers}
        return tuple(sizes.get(rank, 0) for rank in range(self.size))

    def _start_if_all_match(
        self, own_signature: OperationSignature, start: Callable[[], Work]
    ) -> Work:
        """Start once all ranks have issued the same operation."""
        # Held over the vote: sequence numbers of all ranks must mean the same operation, although
        # threads issue concurrently (P6).
        with self._collective:
            self._sequence += 1
            question = f"{self._label}/{self._sequence}"
            self._control.cast(question, own_signature.to_bytes())
            ballots = self._collect_all_or_none(question)
            operations = [OperationSignature.from_bytes(ballot) for ballot in ballots]
            if not operations_match(operations):
                raise OrderMismatch(f"{question}: {describe_operations(operations, self._ranks)}")
            return start()

    def _collect_all_or_none(self, question: str) -> tuple[bytes, ...]:
        """All ballots. A decision makes sure that either every rank gets them or none does."""
        try:
            ballots = self._control.collect(question, self._deadline, self._ranks)
        except BallotIncomplete:
            if self._control.decide(question, TIMED_OUT) == TIMED_OUT:
                raise
            return self._control.collect(question, self._deadline, self._ranks)
        if self._control.decide(question, PROCEED) != PROCEED:
            raise OrderMismatch(f"{question}: given up by a rank whose deadline passed before")
        return ballots

    def _start_checked_p2p(
        self, pair: tuple[int, int], tensor: Tensor, start: Callable[[], Work]
    ) -> Work:
        ends = self._ranks[pair[0]], self._ranks[pair[1]]
        own_signature = operation_signature(
            self.epoch, f"a message from rank {ends[0]} to rank {ends[1]}", tensor
        )
        with self._pairwise:
            self._messages[pair] += 1
            question = f"{self._label}/{pair[0]}-{pair[1]}/{self._messages[pair]}"
            check = P2PCheck(self._control, question, ends)
            check.cast(own_signature)
            _refuse_mismatch(check)
            return CheckedWork(start(), check, self._deadline)


def _refuse_mismatch(check: P2PCheck) -> None:
    """Raise if the peer has already issued something else."""
    try:
        mismatch = check.mismatch(0.0)
    except BallotIncomplete:
        return
    if mismatch is not None:
        raise mismatch
