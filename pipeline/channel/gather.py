"""Slices become tensors: at a defined point, in the order of the messages.

A gather is a collective of the ranks that hold slices. If it ran where somebody first reads a
tensor, ranks that read in another order would hang, or mix tensors up. So it is issued when the
message is taken, on the communication stream, behind the message.

Whether tensors that are sent in slices are the same on all ranks that send one.

A slice of each rank is only the whole where all ranks hold the same. Where they do not, what the
receivers gather is of nobody, and nothing crashes (SGLang issue 30015 is of that kind).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.errors import EquipoiseError, NotReplicated
from equipoise.hal.stream import Role, Stream
from equipoise.hal.work import Work
from equipoise.pipeline.channel.edge import Edge, SliceGroup, as_equipoise_error
from equipoise.pipeline.channel.message import HEADER_BYTES, MessageLayout, Tensors
from equipoise.pipeline.channel.schema import Constant


@dataclass(frozen=True)
class GatherSpec:
    """One tensor, as bytes, which every communicator carries: this rank's slice [n], and where the
    whole goes [parts, n]."""

    slice: Tensor
    whole: Tensor


class Completion(Protocol):
    """The end of everything that fills the tensors of a message; a `Work` is one, too."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    def result(self, timeout: float) -> None:
        """Block the host until then. Raises what went wrong."""
        ...

    def wait(self, stream: Stream) -> None:
        """Order what is launched on `stream` from now on behind it."""
        ...


def gather_specs(layout: MessageLayout, message: Tensor, wholes: Tensor) -> list[GatherSpec]:
    """What is gathered of a message: the header, since a slice that another rank received may be
    of another message, which only that rank would see; then the tensors.

    Args:
        layout: of the message.
        message: where the slices come.
        wholes: uint8 [layout.gathered_nbytes], where the tensors go.
    """
    parts = layout.sliced_fields[0].num_slices
    size = HEADER_BYTES
    headers = GatherSpec(message[:size], wholes[: parts * size].view(parts, size))
    return [
        headers,
        *(
            GatherSpec(p.sent_bytes(message), p.gathered_bytes(wholes))
            for p in layout.sliced_fields
        ),
    ]


def gather(
    edge: Edge, slices: SliceGroup, message: Work, parts: Sequence[GatherSpec]
) -> Completion:
    """Begin to gather, behind the message; in the way that the slices' communicator allows."""
    for _ in parts:
        edge.counters.add_gather()
    if slices.gather_communicator.capabilities.stream_ordered:
        return StreamGathering(edge, slices, message, parts)
    return HostGathering(edge, slices, message, parts)


class StreamGathering:
    """Gathers that follow the communication stream; the host does not wait.

    Args:
        edge: over which the slices come.
        slices: the ranks that gather.
        message: ends when this rank's slices are there.
        parts: what is gathered.
    """

    def __init__(
        self, edge: Edge, slices: SliceGroup, message: Work, parts: Sequence[GatherSpec]
    ) -> None:
        self._passed = edge.accelerator.event()
        self._message = message
        comm = edge.accelerator.stream(Role.COMM)
        message.wait(comm)
        with comm.current():
            self._works = [slices.gather_communicator.all_gather(p.whole, p.slice) for p in parts]
        for work in self._works:
            work.wait(comm)
        comm.record(self._passed)

    def done(self) -> bool:
        """Whether all of them have ended."""
        return self._message.done() and all(work.done() for work in self._works)

    def result(self, timeout: float) -> None:
        """Block the host until they have. Raises `CommunicatorFailed`, `ResultPending`."""
        self._message.result(timeout)
        for work in self._works:
            work.result(timeout)

    def wait(self, stream: Stream) -> None:
        """Order what is launched on `stream` from now on behind them."""
        stream.wait(self._passed)


class HostGathering:
    """Gathers for communicators that follow no stream: a program of the communication stream
    blocks until the slices are there, and then issues them.

    Args:
        edge: over which the slices come.
        slices: the ranks that gather.
        message: ends when this rank's slices are there.
        parts: what is gathered.
    """

    def __init__(
        self, edge: Edge, slices: SliceGroup, message: Work, parts: Sequence[GatherSpec]
    ) -> None:
        self._deadline = edge.deadline
        self._communicator = slices.gather_communicator
        self._failure: EquipoiseError | None = None
        self._passed = edge.accelerator.event()
        comm = edge.accelerator.stream(Role.COMM)
        comm.launch(lambda: self._gather(message, parts))
        comm.record(self._passed)

    def done(self) -> bool:
        """Whether all of them have ended."""
        return self._passed.query()

    def result(self, timeout: float) -> None:
        """Block the host until they have.

        Raises:
            CommunicatorFailed: the message, or a gather, failed.
            StreamTimeout: not within `timeout` seconds.
        """
        self._passed.synchronize(timeout)
        if self._failure is not None:
            raise self._failure

    def wait(self, stream: Stream) -> None:
        """Order what is launched on `stream` from now on behind them."""
        stream.wait(self._passed)
        stream.launch(lambda: self.result(self._deadline))

    def _gather(self, message: Work, parts: Sequence[GatherSpec]) -> None:
        """A program of the communication stream. What fails fails the message, not the stream."""
        try:
            message.result(self._deadline)
            works = [self._communicator.all_gather(p.whole, p.slice) for p in parts]
            for work in works:
                work.result(self._deadline)
        except Exception as failure:
            self._failure = as_equipoise_error(failure, "slices could not be gathered")


def check_replicated(
    edge: Edge, slices: SliceGroup, layout: MessageLayout, tensors: Tensors
) -> None:
    """Compare checksums over the ranks of the slices; collective, and blocks the host.

    Raises:
        NotReplicated: names the tensors that differ; on all of these ranks.
        CommunicatorFailed: a rank did not come by the deadline.
    """
    names = [place.field.name for place in layout.sliced_fields]
    found = [as_int64(checksum(_tensor(tensors[name]).contiguous())) for name in names]
    mine = torch.tensor(found, dtype=torch.int64, device=edge.accelerator.device)
    every = mine.new_empty(slices.size, len(names))
    slices.verify_communicator.all_gather(every, mine).result(edge.deadline)
    differing = (every != every[0]).any(0).tolist()
    if any(differing):
        which = ", ".join(name for name, differs in zip(names, differing, strict=True) if differs)
        raise NotReplicated(
            f"{edge.name}: {which} is declared the same on {slices.size} ranks, and is not: "
            "send it whole"
        )


def _tensor(value: Tensor | Constant) -> Tensor:
    assert isinstance(value, Tensor)  # a field of the layout
    return value
