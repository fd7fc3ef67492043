"""What ends an end of an edge, and errors of others as this project's own.

What both ends of an edge are made from: who, over what, on which stream, how many buffers.

Edges are opened by both ends alike, or not at all.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    """The error itself where it is one of this project; else one that says `what`, and why.

    Memory that cannot be had, an interrupt, an error of torch: they end what was under way as any
    other failure does, and whoever comes later is told.
    """
    if isinstance(failure, EquipoiseError):
        return failure
    told = ChannelError(f"{what}: {type(failure).__name__}: {failure}")
    told.__cause__ = failure
    return told


class EdgeStatus:
    """Whether an end of an edge may go on; the first thing that ends it stays.

    Args:
        name: of the edge.

    Attributes:
        failure: what has ended it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.failure: EquipoiseError | None = None

    def check_open(self) -> None:
        """Raise `ChannelClosed`, with the cause, where the end is over."""
        if self.failure is not None:
            raise ChannelClosed(f"{self._name}: {self.failure}") from self.failure

    def fail(self, failure: BaseException) -> None:
        """Half of something may have happened."""
        self.failure = self.failure or as_equipoise_error(failure, "it failed amid a message")

    def close(self) -> None:
        """Refuse what comes from now on."""
        self.failure = self.failure or ChannelClosed("it was closed")


class ReadMode(StrEnum):
    """How whoever reads comes behind a message."""

    HOST = "host"
    """It blocks: the tensors are in the host's memory, where code reads them without a stream."""
    STREAM = "stream"
    """The edge's stream is ordered behind the message, and the host goes on."""


@dataclass(frozen=True)
class SliceGroup:
    """The ranks that hold the same tensors, and so send and receive a slice each.

    Attributes:
        gather_communicator: of these ranks; those that receive gather over it, in the order of messages.
        verify_communicator: another one of the same ranks; those that send compare what they hold over it.
            A rank between two stages does both, and in no order that its peers would share.
    """

    gather_communicator: Communicator
    verify_communicator: Communicator

    @property
    def size(self) -> int:
        """How many there are."""
        return self.gather_communicator.size

    @property
    def rank(self) -> int:
        """Which slice is this rank's."""
        return self.gather_communicator.rank


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One direction between two ranks.

    Attributes:
        name: in errors and statistics, the same at both ends: "stage 0 to 1".
        communicator: of this edge; nothing else is sent over it.
        peer: the other end's rank in the communicator.
        accelerator: whose memory the tensors are in.
        stream: whose programs make what is sent, or read what is received.
        deadline: seconds that any wait may last.
        depth: buffers of this end: so many messages may be on their way, or still be read.
        slice_group: where tensors may travel in slices; None where everything travels whole.
        second_communicator: for second parts of messages, which would otherwise meet the receive that is posted
            for the next message's first part; None where there are none.
        read_mode: how readers come behind a message; by where the tensors are, unless it is said.
        counters: counts.
    """

    name: str
    communicator: Communicator
    peer: int
    accelerator: Accelerator
    stream: Stream
    deadline: float
    depth: int = 4
    slice_group: SliceGroup | None = None
    second_communicator: Communicator | None = None
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

    @property
    def require_second(self) -> Communicator:
        """Over which second parts go. Raises `ChannelError` where there are none."""
        if self.second_communicator is None:
            raise ChannelError(f"{self.name}: its messages have one part")
        return self.second_communicator

    @cached_property
    def effective_read_mode(self) -> ReadMode:
        """How readers come behind a message."""
        on_host = self.accelerator.device.type == "cpu"
        return self.read_mode or (ReadMode.HOST if on_host else ReadMode.STREAM)

    def close(self) -> None:
        """Give its communicators back."""
        self.communicator.close()
        if self.second_communicator is not None:
            self.second_communicator.close()

    def allocate(self, nbytes: int) -> Tensor:
        """A fresh buffer of the device, uint8 [nbytes], the edge's stream's; counted, unless it is
        empty. Others come behind that stream before they write into it.

        Made outside of inference mode, whoever asks: engines call in it, and what is made in it
        can be written by no thread that is not.
        """
        if nbytes:
            self.counters.add_buffer(nbytes)
        with self.stream.current(), torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.accelerator.device)


_OPENED: "WeakKeyDictionary[Fabric, Counter[str]]" = WeakKeyDictionary()
"""How often each edge was opened: ballots and communicators have a name once."""


@dataclass(frozen=True, kw_only=True)
class EdgeContext:
    """Where an end of an edge is: what a rank has anyway.

    Attributes:
        fabric: opens the edge's communicator; its control plane carries the agreement.
        accelerator: whose memory the tensors are in.
        stream: whose programs make what is sent, or read what is received.
        deadline: seconds that any wait may last.
        slice_group: the ranks that hold the same sliced tensors; None where nothing is sliced.
    """

    fabric: Fabric
    accelerator: Accelerator
    stream: Stream
    deadline: float
    slice_group: SliceGroup | None = None


def open_edge(
    name: str, ends: tuple[int, int], place: EdgeContext, depth: int, said: Mapping[str, object]
) -> Edge:
    """This rank's end of an edge with a communicator of its own; collective of the two ranks.

    Args:
        name: no two edges that are open have one name. Behind its close an edge may be opened
            again, by both ends.
        ends: ranks of the run: who sends, and who receives.
        place: of this rank's end.
        depth: buffers at each end.
        said: what else both ends must say alike; JSON.

    Raises:
        ChannelError: this rank is neither end, or both.
        ShapeClassError: the other end says something else; on both, before anything is sent.
        BallotIncomplete: the other end did not come by the deadline.
        CommunicatorFailed: neither did it to the communicator.
    """
    rank = place.fabric.control.rank
    if rank not in ends or ends[0] == ends[1]:
        raise ChannelError(f"{name}: rank {rank} cannot be an end of the edge {ends}")
    parts = place.slice_group.size if place.slice_group is not None else 1
    called = _called(name, place.fabric)
    _agree(called, ends, place, {**said, "ends": ends, "depth": depth, "parts": parts})
    communicator = place.fabric.open(f"channel {called}", ends)
    communicator.warm([(0, 1)])
    return Edge(
        name=name,
        communicator=communicator,
        peer=1 - ends.index(rank),
        accelerator=place.accelerator,
        stream=place.stream,
        deadline=place.deadline,
        depth=depth,
        slice_group=place.slice_group,
    )


def open_second_communicator(edge: Edge, ends: tuple[int, int], place: EdgeContext) -> Edge:
    """The edge with a communicator for second parts of messages; collective of the two ranks."""
    rest = place.fabric.open(f"{edge.communicator.purpose}, second parts", ends)
    return replace(edge, second_communicator=rest)


def _called(name: str, fabric: Fabric) -> str:
    """The edge's name, and how often it was opened before."""
    opened = _OPENED.setdefault(fabric, Counter())
    opened[name] += 1
    return name if opened[name] == 1 else f"{name}, again {opened[name] - 1}"


def _agree(
    name: str, ends: tuple[int, int], place: EdgeContext, said: Mapping[str, object]
) -> None:
    control, question = place.fabric.control, f"channel/{name}"
    mine = json.dumps(said, sort_keys=True).encode()
    control.cast(question, mine)
    for rank, theirs in zip(ends, control.collect(question, place.deadline, ends), strict=True):
        if theirs != mine:
            raise ShapeClassError(
                f"{name}: rank {rank} opens it with {theirs.decode()}, rank {control.rank} with "
                f"{mine.decode()}"
            )
