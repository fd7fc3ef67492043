"""What both ends of an edge are made from: who, over what, on which stream, how many buffers."""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import torch
from torch import Tensor

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator
from equipoise.hal.errors import ChannelError
from equipoise.hal.stream import Stream
from equipoise.pipeline.statistics import EdgeMeter


class Reading(StrEnum):
    """How whoever reads comes behind a message."""

    HOST = "host"
    """It blocks: the tensors are in the host's memory, where code reads them without a stream."""
    STREAM = "stream"
    """The edge's stream is ordered behind the message, and the host goes on."""


@dataclass(frozen=True)
class Slices:
    """The ranks that hold the same tensors, and so send and receive a slice each.

    Attributes:
        gathering: of these ranks; those that receive gather over it, in the order of messages.
        comparing: another one of the same ranks; those that send compare what they hold over it.
            A rank between two stages does both, and in no order that its peers would share.
    """

    gathering: Communicator
    comparing: Communicator

    @property
    def parts(self) -> int:
        """How many there are."""
        return self.gathering.size

    @property
    def part(self) -> int:
        """Which slice is this rank's."""
        return self.gathering.rank


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
        slices: where tensors may travel in slices; None where everything travels whole.
        rest: for second parts of messages, which would otherwise meet the receive that is posted
            for the next message's first part; None where there are none.
        reading: how readers come behind a message; by where the tensors are, unless it is said.
        meter: counts.
    """

    name: str
    communicator: Communicator
    peer: int
    accelerator: Accelerator
    stream: Stream
    deadline: float
    depth: int = 4
    slices: Slices | None = None
    rest: Communicator | None = None
    reading: Reading | None = None
    meter: EdgeMeter = field(default_factory=EdgeMeter)

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ChannelError(f"{self.name}: {self.depth} buffers cannot carry a message")
        if self.deadline <= 0:
            raise ChannelError(f"{self.name}: a deadline of {self.deadline} s is none")

    @property
    def parts(self) -> int:
        """Slices that a sliced tensor is cut into."""
        return self.slices.parts if self.slices is not None else 1

    @property
    def second(self) -> Communicator:
        """Over which second parts go. Raises `ChannelError` where there are none."""
        if self.rest is None:
            raise ChannelError(f"{self.name}: its messages have one part")
        return self.rest

    @cached_property
    def read_by(self) -> Reading:
        """How readers come behind a message."""
        on_host = self.accelerator.device.type == "cpu"
        return self.reading or (Reading.HOST if on_host else Reading.STREAM)

    def close(self) -> None:
        """Give its communicators back."""
        self.communicator.close()
        if self.rest is not None:
            self.rest.close()

    def memory(self, nbytes: int) -> Tensor:
        """A fresh buffer of the device, uint8 [nbytes], the edge's stream's; counted, unless it is
        empty. Others come behind that stream before they write into it.

        Made outside of inference mode, whoever asks: engines call in it, and what is made in it
        can be written by no thread that is not.
        """
        if nbytes:
            self.meter.buffer_made(nbytes)
        with self.stream.current(), torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.accelerator.device)
