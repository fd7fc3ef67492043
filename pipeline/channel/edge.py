"""An edge: one direction between two ranks, and how both ends open it.

`open_edge` compares the parameters of both ends over the control plane before it opens a
communicator, so that ends that do not match fail on both sides before anything is sent.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.errors import ChannelClosed, ChannelError, EquipoiseError, ShapeClassError
from equipoise.hal.stream import Stream
from equipoise.pipeline.channel.statistics import EdgeCounters


def as_equipoise_error(failure: BaseException, what: str) -> EquipoiseError:
    """Return `failure` if it is an `EquipoiseError`, else a `ChannelError` that wraps it.

    Out of memory, an interrupt or an error of torch ends the operation like any other failure, and
    later calls raise it.
    """
    if isinstance(failure, EquipoiseError):
        return failure
    channel_error = ChannelError(f"{what}: {type(failure).__name__}: {failure}")
    channel_error.__cause__ = failure
    return channel_error


class EdgeStatus:
    """Whether an end of an edge is open; keeps the first failure.

    Args:
        name: of the edge.

    Attributes:
        failure: why it is closed; None while it is open.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.failure: EquipoiseError | None = None

    def check_open(self) -> None:
        """Raise `ChannelClosed`, with its cause, if the end is closed."""
        if self.failure is not None:
            raise ChannelClosed(f"{self._name}: {self.failure}") from self.failure

    def fail(self, failure: BaseException) -> None:
        """Close the end because an operation failed and may have been half done."""
        self.failure = self.failure or as_equipoise_error(failure, "it failed during a message")

    def close(self) -> None:
        """Close the end: later calls raise."""
        self.failure = self.failure or ChannelClosed("it was closed")


class ReadMode(StrEnum):
    """How a reader waits for a message."""

    HOST = "host"
    """The host blocks: the tensors are in host memory, which is read without a stream."""
    STREAM = "stream"
    """The edge's stream waits for the message, and the host does not."""


@dataclass(frozen=True)
class SliceGroup:
    """The ranks that hold the same tensors, and so send and receive one slice each.

    Attributes:
        gather_communicator: of these ranks; receivers gather slices over it, in message order.
        verify_communicator: of the same ranks; senders compare checksums over it. It is a second
            communicator because a rank between two stages sends and receives in an order that its
            peers need not share, and collectives of one communicator must match in order.
    """

    gather_communicator: Communicator
    verify_communicator: Communicator

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.gather_communicator.size

    @property
    def rank(self) -> int:
        """Index of this rank, and so of its slice."""
        return self.gather_communicator.rank


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One end of one direction between two ranks.

    Attributes:
        name: in errors and statistics, the same at both ends: "stage 0 to 1".
        communicator: used by this edge only.
        peer: the other end's rank in the communicator.
        accelerator: the device that holds the tensors.
        stream: runs the programs that compute what is sent, or that read what is received.
        deadline: seconds that any wait may last.
        depth: buffers of this end: the number of messages that may be in flight or still be read.
        slice_group: ranks among which tensors are sliced; None if all tensors travel whole.
        read_mode: how readers wait; None: `HOST` for tensors in host memory, else `STREAM`.
        counters: counts what this end does.
    """

    name: str
    communicator: Communicator
    peer: int
    accelerator: Accelerator
    stream: Stream
    deadline: float
    depth: int = 4
    slice_group: SliceGroup | None = None
    read_mode: ReadMode | None = None
    counters: EdgeCounters = field(default_factory=EdgeCounters)

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ChannelError(f"{self.name}: {self.depth} buffers cannot carry a message")
        if self.deadline <= 0:
            raise ChannelError(f"{self.name}: a deadline of {self.deadline} s is none")

    @property
    def num_slices(self) -> int:
        """Slices that a sliced tensor is cut into."""
        return self.slice_group.size if self.slice_group is not None else 1

    @cached_property
    def effective_read_mode(self) -> ReadMode:
        """How readers wait for a message."""
        on_host = self.accelerator.device.type == "cpu"
        return self.read_mode or (ReadMode.HOST if on_host else ReadMode.STREAM)

    def close(self) -> None:
        """Close the edge's communicator."""
        self.communicator.close()

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate a buffer on the device, uint8 [nbytes], in the order of the edge's stream.

        Other streams have to wait for the edge's stream before they write into it, since the
        allocator may return memory that the stream still uses. Empty buffers are not counted. The
        buffer holds zeros: engines read rows of it that no message has written (`Receiver.take`).
        """
        if nbytes:
            self.counters.add_buffer(nbytes)
        # Engines call this in inference mode, where a tensor would become an inference tensor,
        # which only threads in inference mode may write to.
        with self.stream.current(), torch.inference_mode(False):
            return torch.zeros(nbytes, dtype=torch.uint8, device=self.accelerator.device)


_OPENED: "WeakKeyDictionary[Fabric, Counter[str]]" = WeakKeyDictionary()
"""Number of times each edge was opened, by fabric: see `_unique_name`."""


@dataclass(frozen=True, kw_only=True)
class EdgeContext:
    """What an end of an edge takes from its rank.

    Attributes:
        fabric: opens the edge's communicator; its control plane compares both ends' parameters.
        accelerator: the device that holds the tensors.
        stream: runs the programs that compute what is sent, or that read what is received.
        deadline: seconds that any wait may last.
        slice_group: the ranks that hold the same sliced tensors; None if nothing is sliced.
    """

    fabric: Fabric
    accelerator: Accelerator
    stream: Stream
    deadline: float
    slice_group: SliceGroup | None = None


def open_edge(
    name: str,
    ends: tuple[int, int],
    context: EdgeContext,
    depth: int,
    parameters: Mapping[str, object],
) -> Edge:
    """Open this rank's end of an edge, with a communicator of its own; collective of both ranks.

    Args:
        name: unique among open edges. Once closed, an edge may be opened again by both ends.
        ends: ranks of the run: the sender and the receiver.
        context: of this rank's end.
        depth: buffers at each end.
        parameters: further values that must be equal at both ends; JSON.

    Raises:
        ChannelError: this rank is neither end, or both.
        ShapeClassError: the other end has other parameters; on both, before anything is sent.
        BallotIncomplete: the other end did not open the edge by the deadline.
        CommunicatorFailed: the other end did not open the communicator by the deadline.
    """
    rank = context.fabric.control.rank
    if rank not in ends or ends[0] == ends[1]:
        raise ChannelError(f"{name}: rank {rank} cannot be an end of the edge {ends}")
    parts = context.slice_group.size if context.slice_group is not None else 1
    unique_name = _unique_name(name, context.fabric)
    _check_agreement(
        unique_name, ends, context, {**parameters, "ends": ends, "depth": depth, "parts": parts}
    )
    communicator = context.fabric.open(f"channel {unique_name}", ends)
    communicator.warm([(0, 1)])
    return Edge(
        name=name,
        communicator=communicator,
        peer=1 - ends.index(rank),
        accelerator=context.accelerator,
        stream=context.stream,
        deadline=context.deadline,
        depth=depth,
        slice_group=context.slice_group,
    )


def _unique_name(name: str, fabric: Fabric) -> str:
    """Return the edge's name, with a number if it was opened before.

    Ballots and communicators are identified by name, and each name may be used once.
    """
    open_counts = _OPENED.setdefault(fabric, Counter())
    open_counts[name] += 1
    return name if open_counts[name] == 1 else f"{name}, again {open_counts[name] - 1}"


def _check_agreement(
    name: str, ends: tuple[int, int], context: EdgeContext, parameters: Mapping[str, object]
) -> None:
    control, question = context.fabric.control, f"channel/{name}"
    own = json.dumps(parameters, sort_keys=True).encode()
    control.cast(question, own)
    for rank, ballot in zip(ends, control.collect(question, context.deadline, ends), strict=True):
        if ballot != own:
            raise ShapeClassError(
                f"{name}: rank {rank} opens it with {ballot.decode()}, rank {control.rank} with "
                f"{own.decode()}"
            )
